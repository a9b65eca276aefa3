"""A simulated server: the real engine, cache, disk and index, all on the calling thread."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from bench.simulate.clock import SimulatedClock
from bench.simulate.drive import Drive, Process
from bench.simulate.faults import EventLog, Faults
from bench.simulate.model import DigestModel, Weights
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Block, Snapshot
from pyctl.disk.directory import CacheDirectory
from pyctl.disk.disk import Disk, WriteLimits
from pyctl.disk.file_format import StateName
from pyctl.disk.model_folder import ModelFolder
from pyctl.disk.reader import StoreReader
from pyctl.disk.readers import Job, Readers
from pyctl.disk.write_job import Writing
from pyctl.disk.write_queue import WriteQueue
from pyctl.disk.writer import StoreWriter
from pyctl.engine.backend import Backend
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.errors import EngineError, UnavailableError

R = TypeVar("R")

SCALE = 128
"""Tokens of the recordings for each token here."""

N_SEQS = 4
N_UBATCH = 32
MIN_STEP = 64
"""Tokens between the snapshots of a long message, the default at this scale."""

MIN_DISK_TOKENS = 16
COLD_MAX_TOKENS = 80

PROMPT_SECONDS = SCALE / 900
"""Seconds for each token of a prompt, at a published 3090's 900 tokens a second."""

DECODE_SECONDS = SCALE / 43
"""Seconds for each token of a reply: a 27B on that card."""


@dataclass(frozen=True)
class Setup:
    """The flags and the model of a server.

    Attributes:
        weights: The model.
        n_cells: Tokens of context.
        batch_cost: Half a batch as on a GPU, or 0 as on a CPU.
        ram_bytes: The limit of the cache in RAM.
        disk_bytes: The limit of the directory.
        daily_bytes: The bytes that may be written in a day, None for no limit.
        policy: The policy of the disk.
    """

    weights: Weights
    n_cells: int
    batch_cost: int
    ram_bytes: int
    disk_bytes: int
    daily_bytes: int | None
    policy: str

    @classmethod
    def draw(cls, rng: random.Random) -> Setup:
        """Return a setup that a user may have; the small limits have much evicted."""
        is_hybrid = rng.random() < 0.7
        rounds = rng.random() < 0.3
        seed = rng.randrange(2)
        disk_bytes = rng.choice((60_000, 200_000, 600_000))
        return cls(
            weights=Weights(seed, is_hybrid, rounds),
            n_cells=rng.choice((1536, 2048, 4096)),
            batch_cost=rng.choice((0, N_UBATCH // 2)),
            ram_bytes=rng.choice((25_000, 60_000, 200_000)),
            disk_bytes=disk_bytes,
            daily_bytes=rng.choice((None, None, 20 * disk_bytes)),
            policy=rng.choice(("auto", "full", "auto,spill", "spill")),
        )

    @property
    def fingerprint(self) -> str:
        """The name of the model in the directory."""
        weights = self.weights
        kind = "hybrid" if weights.is_hybrid else "attention"
        return f"{kind}-{weights.seed}-{'exact' if weights.rounds else 'plain'}"


class InlineReaders(Readers):
    """Readers without threads: a read runs when the caller waits for it, or with `run_next`."""

    def __init__(self, clock: SimulatedClock) -> None:
        super().__init__(0, "simulated", clock=clock)
        self._queued: list[tuple[Future[Any], Callable[[], Any]]] = []

    def start(self, jobs: Iterable[Callable[[], R]]) -> list[Future[R]]:
        futures: list[Future[R]] = []
        for job in jobs:
            future: Future[R] = Future()
            futures.append(future)
            self._queued.append((future, job))
        return futures

    def run(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job()

    def wait(self, reads: Sequence[Future[Any]], seconds: float) -> None:
        self.run_next()

    @property
    def is_busy(self) -> bool:
        return bool(self._queued)

    def run_next(self) -> bool:
        """Run the read that waits longest; return False if none does."""
        if not self._queued:
            return False
        future, job = self._queued.pop(0)
        if future.set_running_or_notify_cancel():
            self.moved = self.clock()
            try:
                result = job()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        return True

    def close(self, timeout: float = 1.0) -> None:
        while self.run_next():
            continue


class InlineQueue(WriteQueue):
    """A write queue without a thread: the caller of `run_next` writes."""

    def start(self) -> None:
        """Start nothing."""

    def wait_for_change(self, seconds: float) -> None:
        if not self.run_next():
            assert isinstance(self._clock, SimulatedClock)
            self._clock.advance(seconds)

    def join(self, seconds: float) -> bool:
        while self.run_next():
            continue
        return True


class InlineDisk(Disk):
    """A disk whose queue has no thread."""

    def _make_queue(self) -> WriteQueue:
        clock = self.directory.readers.clock
        return InlineQueue(self._write, clock=clock)


class Server:
    """A server process on a directory of ``drive``.

    Attributes:
        process: Its process on the machine.
        engine: The engine; its disk is None if the directory could not be opened.
        disk: The disk, None without one.
        stored: The snapshots that it reported as written, as far as they were not dropped since.
    """

    def __init__(
        self,
        name: str,
        setup: Setup,
        drive: Drive,
        faults: Faults,
        clock: SimulatedClock,
        log: EventLog,
        rng: random.Random,
        on_stored: Callable[[Server, StateName], None],
    ) -> None:
        """Open the directory and recover it; without a directory if that fails."""
        self.process = Process(name)
        self.setup = setup
        self.clock = clock
        self.readers = InlineReaders(clock)
        self.disk: Disk | None = None
        self.evaluation_fault_rate = 0.0
        self.hangs = False
        self._drive = drive
        self._faults = faults
        self._log = log
        self._rng = rng
        self._on_stored = on_stored
        self.model = DigestModel(
            setup.weights,
            setup.n_cells,
            N_SEQS,
            N_UBATCH,
            setup.batch_cost,
            self._spend,
            faults.allocate,
        )
        drive.process = self.process
        try:
            self.disk = self._open_disk()
        except OSError as error:
            log.add("no directory", str(error).replace(str(drive.root), ""))
        settings = EngineSettings(min_step=MIN_STEP, exact=setup.weights.rounds)
        self.engine = Engine(
            cast(Backend, self.model),
            RamCache(0, setup.ram_bytes),
            settings,
            self.disk,
            clock=clock,
        )

    def _open_disk(self) -> Disk:
        setup = self.setup
        directory = CacheDirectory(self._drive.root, setup.disk_bytes, self.readers)
        folder = ModelFolder(directory, setup.fingerprint, self.model.shape.sizes)
        writer = StoreWriter(folder, setup.daily_bytes)
        disk = InlineDisk(
            StoreReader(folder, self._allocate),
            writer,
            DiskPolicy.from_flag(setup.policy),
            WriteLimits(MIN_DISK_TOKENS, COLD_MAX_TOKENS),
        )
        writer.write = partial(self._write, writer.write)  # type: ignore[method-assign]
        return disk

    def _allocate(self, size: int) -> Block:
        self._faults.allocate()
        return np.empty(size, np.uint8)

    def _spend(self, n_tokens: int, is_decode: bool) -> None:
        """Let the time of an evaluation pass; some fail."""
        self.clock.advance(DECODE_SECONDS if is_decode else n_tokens * PROMPT_SECONDS)
        if self._faults.is_active and self._rng.random() < self.evaluation_fault_rate:
            self._log.add("evaluation fails")
            raise EngineError("made to fail")

    def _write(
        self,
        write: Callable[..., Writing],
        snapshot: Snapshot,
        label: str,
        *,
        spilled: bool,
    ) -> Writing:
        """Write ``snapshot``, and report it once that is done."""
        n_bytes = yield from write(snapshot, label, spilled=spilled)
        if n_bytes:
            self._on_stored(self, StateName.from_prefix(snapshot.prefix))
        return n_bytes

    # -- work
    # ----------------------------------------------------------------------------------

    def step(self) -> None:
        """Run a step of the engine, and the work of other threads meanwhile."""
        self._drive.process = self.process
        engine = self.engine
        has_work = engine.step()
        if not has_work:
            engine.prefix_cache.write_back.flush_copies()
        self.work_beside(self._rng.randrange(3))

    def work_beside(self, n_turns: int) -> bool:
        """Run the reads that wait, and ``n_turns`` of the writing thread; return whether any ran.
        Nothing runs while the drive hangs.
        """
        self._drive.process = self.process
        has_run = False
        while not self.hangs and self.readers.run_next():
            has_run = True
        if self.hangs or self.disk is None:
            return has_run
        for _ in range(n_turns):
            has_run = self.disk.queue.run_next() or has_run
        return has_run

    def rest(self) -> None:
        """Do all that an idle server does, until nothing is left to do now."""
        self._drive.process = self.process
        write_back = self.engine.prefix_cache.write_back
        while write_back.copy_next() or self.work_beside(1):
            write_back.flush_copies()

    def close(self) -> bool:
        """Stop as after SIGTERM; return whether all was written."""
        self._drive.process = self.process
        while self.readers.run_next():
            continue
        is_complete = self.engine.close(UnavailableError("the server is shutting down"))
        if self.disk is not None:
            self.disk.directory.close()
        self.process.end()
        self._drive.process = None
        return is_complete

    def kill(self) -> None:
        """Be gone, with everything that was in memory."""
        self._drive.process = self.process
        self.process.is_dead = True
        if self.disk is not None:
            for job in self.disk.queue.jobs:
                if job.writing is not None:
                    with suppress(OSError):
                        job.writing.close()
        for active in self.engine.running:
            if active.steps is not None:
                with suppress(OSError):
                    active.steps.close()
        self.process.end()
        self._drive.process = None
