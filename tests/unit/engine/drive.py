"""Drives an engine without a thread: submit, step, collect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Block, Snapshot
from pyctl.disk.directory import THREADS, CacheDirectory
from pyctl.disk.disk import Disk, WriteLimits
from pyctl.disk.model_folder import ModelFolder
from pyctl.disk.reader import StoreReader
from pyctl.disk.readers import Readers
from pyctl.disk.remote_store import RemoteStore
from pyctl.disk.write_job import Writing
from pyctl.disk.writer import StoreWriter
from pyctl.engine.backend import Backend
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Piece, Request
from pyctl.engine.sampling import Sampling
from pyctl.prompt import Prompt

SLOW_SECONDS = 240.0
"""A busy machine may return nothing for seconds; a disk that takes longer hangs."""

GREEDY = Sampling(temperature=0.0)


@dataclass
class Reply:
    """The tokens of a reply, and its end."""

    text: str
    tokens: list[int]
    done: Done | None
    error: Exception | None


class ManualClock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


START = 257
"""The token that begins a message for `chat`."""


def chat(*messages: tuple[int, int]) -> Prompt:
    """Return messages (seed, length) and a generation header, as the tiny models' tokens."""
    parts = [[START, *np.random.default_rng(seed).integers(0, 250, n - 1)] for seed, n in messages]
    tokens = np.concatenate([*parts, [START, 97, 115]])
    return Prompt.from_ids(tokens, np.flatnonzero(tokens == START))


def tier_of(engine: Engine) -> Disk:
    assert isinstance(engine.prefix_cache.disk, Disk)
    return engine.prefix_cache.disk


def flushed(engine: Engine) -> Disk:
    """Return the disk once everything that left RAM or waits for rows is written."""
    tier = tier_of(engine)
    done = tier.flush(60)
    while tier.awaits_rows:
        engine.prefix_cache.write_back.flush_copies()
        done = tier.flush(60)
    assert done
    return tier


@contextmanager
def standing(tier: Disk) -> Iterator[None]:
    """Hold the thread that writes until the end of the block."""
    is_over = threading.Event()
    tier.queue.run_soon(partial(is_over.wait, 60))
    try:
        yield
    finally:
        is_over.set()


def watch(engine: Engine, see: Callable[[Block], None]) -> None:
    """Have ``see`` called with the rows of each segment before they are written."""
    writer = tier_of(engine).writer
    real = writer.write

    def write(snapshot: Snapshot, label: str = "", *, spilled: bool = False) -> Writing:
        with closing(real(snapshot, label, spilled=spilled)) as writing:
            while True:
                try:
                    segment = next(writing)
                except StopIteration as end:
                    return int(end.value)
                yield segment
                see(segment.rows)

    writer.write = write


class AtOnce:
    """A worker that does on the spot what it is asked."""

    info = SimpleNamespace(fingerprint="one model", n_vocab=2**20)

    def call(self, run: Callable[[], object], **_: object) -> Future[object]:
        done: Future[object] = Future()
        done.set_result(run())
        return done


def request(prompt: Prompt, n: int = 8, **fields: object) -> Request:
    return Request(prompt, **{"sampling": GREEDY, "max_tokens": n, **fields})


def collect(handle: RequestHandle) -> Reply:
    reply = Reply("", [], None, None)
    for event in handle.drain():
        if isinstance(event, Piece):
            reply.text += event.text
            reply.tokens += event.tokens
        elif isinstance(event, Done):
            reply.done = event
        elif isinstance(event, Failed):
            reply.error = event.error
    return reply


def tier_on(
    path: Path,
    model: str = "fake",
    policy: DiskPolicy | str = "full",
    *,
    budget: int | None = None,
    daily_bytes: int | None = None,
    sizes: BlockSizes | None = None,
    remote: Callable[[StoreWriter], RemoteStore] | None = None,
    text_of: Callable[[Sequence[int]], str] | None = None,
    clock: Callable[[], float] = time.monotonic,
    **limits: Any,
) -> Disk:
    """Return a disk on a directory that may take a minute to close, and a busy machine's time to
    read and write; ``limits`` are of `WriteLimits`, ``clock`` times the reads.
    """
    chosen = {"min_tokens": 100, "close_seconds": 60.0, "stall_seconds": SLOW_SECONDS, **limits}
    readers = Readers(THREADS, "disk-read", SLOW_SECONDS, clock)
    folder = ModelFolder(CacheDirectory(path, budget, readers), model, sizes)
    writer = StoreWriter(folder, daily_bytes)
    return Disk(
        StoreReader(folder),
        writer,
        DiskPolicy.parse(policy) if isinstance(policy, str) else policy,
        WriteLimits(**chosen),
        text_of=text_of,
        remote=remote(writer) if remote is not None else None,
    )


def engine_of(
    backend: Backend, n_slots: int = 32, budget: int | None = None, **options: object
) -> Engine:
    """Return an engine with a cache in RAM alone; ``options`` are those of `EngineSettings`."""
    return Engine(backend, RamCache(n_slots, budget), EngineSettings(**options))


def run_all(engine: Engine, *handles: RequestHandle) -> int:
    """Submit ``handles`` and step until nothing is left to do; how many steps that took."""
    for handle in handles:
        engine.submit(handle)
    for n_steps in range(20_000):
        if not engine.step():
            return n_steps
    raise AssertionError("it never ends")


def empty(backend: Backend) -> None:
    """Clear all sequences."""
    for seq in range(backend.facts.n_seqs):
        backend.memory.clear(seq)


def ask(
    engine: Engine, prompt: Prompt, n: int = 8, *, cancel_after: int | None = None, **fields: object
) -> Reply:
    """Run one request to its end, or cancel it after so many steps."""
    handle = RequestHandle(request(prompt, n, **fields))
    engine.submit(handle)
    steps = 0
    while True:
        if steps == cancel_after:
            handle.cancel()
        if not engine.step():
            return collect(handle)
        steps += 1
        assert steps < 10_000


def cold(
    backend: Backend,
    prompt: Prompt,
    n: int = 8,
    options: EngineSettings | None = None,
    **fields: object,
) -> Reply:
    """Return the reply of a fresh engine without any cache, on a backend that holds nothing
    afterwards.
    """
    empty(backend)
    reply = ask(
        Engine(backend, RamCache(0, 0), options or EngineSettings()),
        prompt,
        n,
        cache_prompt=False,
        **fields,
    )
    empty(backend)
    return reply
