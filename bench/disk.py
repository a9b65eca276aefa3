"""The disk tier: the delay that writing adds, the speed of reading, and the bytes written.

    python -m bench.disk                               # a dense shape with 16 KiB of rows per token
    python -m bench.disk -m model.gguf --tokens 8192 32768

Three tables. `delay` compares turns with the tier on and off in one process, in turn. `read` compares DiskStore.read
with a plain read of the same files, both from the page cache. `written` compares the files of each turn with its new
rows and state. `pyctl bench` measures restarts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.common import WIDE_DENSE, add_model, answered, median_seconds, parse, parser_of, show
from pyctl.cache.disk.store import DiskStore
from pyctl.cache.disk_tier import DiskTier
from pyctl.cache.persist import DiskPolicy
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import PromptMatch
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.model_settings import ModelSettings
from pyctl.engine.request import Done, Request
from pyctl.engine.sampling import Sampling
from pyctl.llama import Loaded, allocate, load, reserve_pinned
from pyctl.prompt import Prompt
from tools.generator import write_model

MIB = 2**20

MESSAGE, HEADER = 64, 4
"""Tokens of a message, and of a generation header."""


def prompt_of(seeds: Sequence[int], head: int) -> Prompt:
    """A head of ``head`` tokens, one message per further seed, and a generation header."""
    parts = [np.random.default_rng(seed).integers(0, 200, head if i == 0 else MESSAGE) for i, seed in enumerate(seeds)]
    parts.append(np.full(HEADER, 7))
    return Prompt.of(np.concatenate(parts), np.cumsum([part.size for part in parts])[:-1])


def ask(engine: Engine, prompt: Prompt, *, n_predict: int = 1) -> Done:
    return answered(engine, Request(prompt, Sampling(temperature=0.0), max_tokens=n_predict))


@contextmanager
def engine_on(loaded: Loaded, directory: Path | None) -> Iterator[Engine]:
    """A fresh engine with an empty RAM cache, and with a tier on ``directory`` if there is one."""
    tier = None
    if directory is not None:
        store = DiskStore(directory, loaded.info.fingerprint, None, space=allocate)
        tier = DiskTier(store, DiskPolicy("full"), cold_max=10240)
    loaded.backend.memory.clear(0)
    engine = Engine(loaded.backend, RamCache(64, None), EngineSettings(), tier)
    try:
        yield engine
    finally:
        engine.prefix_cache.close()


def delay(loaded: Loaded, n: int, turns: int, conversations: int) -> list[list[object]]:
    """First token and whole turn with the tier on, against off, medians over turns of conversations in alternation."""
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for conversation in range(conversations):
        for on in (False, True) if conversation % 2 else (True, False):
            with tempfile.TemporaryDirectory() as name, engine_on(loaded, Path(name) if on else None) as engine:
                ask(engine, prompt_of([conversation], n))
                for turn in range(turns):
                    seeds = [conversation, *range(100, 101 + turn)]
                    began = time.perf_counter()
                    done = ask(engine, prompt_of(seeds, n), n_predict=32)
                    times[on].append((done.timings.first_token_ms, (time.perf_counter() - began) * 1e3))
    rows: list[list[object]] = []
    for i, what in enumerate(("first token ms", "turn ms")):
        ours, without = (statistics.median(pair[i] for pair in times[state]) for state in (True, False))
        rows.append([n, what, f"{without:.1f}", f"{ours:.1f}", f"{ours / without:.3f}"])
    return rows


def read(loaded: Loaded, n: int) -> list[object]:
    """GB/s of reading a snapshot back, verified and decoded, against reading its files."""
    with tempfile.TemporaryDirectory() as name:
        with engine_on(loaded, Path(name)) as engine:
            ask(engine, prompt_of([1], n))
        prompt = prompt_of([1], n)
        store = DiskStore(Path(name), loaded.info.fingerprint, None, space=allocate)
        position = max(store.lengths())
        prefix = PromptMatch(prompt.tokens).prefix(position)
        snapshot = store.read(prefix, prompt.tokens)
        assert snapshot is not None
        files = [path for path in Path(name).rglob("*") if path.suffix in (".rows", ".state")]
        stored, raw = sum(path.stat().st_size for path in files), snapshot.n_bytes
        plain = stored / median_seconds(lambda: [path.read_bytes() for path in files], 5) / 1e9
        # The store hands out segments again that are still in use: let go of them first.
        del snapshot
        seconds = median_seconds(lambda: store.read(prefix, prompt.tokens) is not None, 5)
        store.close()
        ours = stored / seconds / 1e9
        decoded = f"{raw / seconds / 1e9:.2f}"
        return [
            n,
            f"{raw / MIB:,.1f}",
            f"{stored / MIB:,.1f}",
            f"{plain:.2f}",
            f"{ours:.2f}",
            f"{ours / plain:.0%}",
            decoded,
        ]


def written(loaded: Loaded, n: int) -> list[list[object]]:
    """Bytes written in each turn against its new rows and one state, before compression."""
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as name, engine_on(loaded, Path(name)) as engine:
        before_bytes, before = 0, 0
        for turn in range(4):
            prompt = prompt_of([1, *range(100, 100 + turn)], n)
            ask(engine, prompt)
            assert engine.prefix_cache.disk is not None
            engine.prefix_cache.disk.flush(60)
            total = sum(path.stat().st_size for path in Path(name).rglob("*") if path.suffix in (".rows", ".state"))
            backend = loaded.backend
            theory = backend.memory.shape.sizes.rows(before, prompt.end) + backend.memory.state_size(0)
            rows.append(
                [
                    n,
                    turn + 1,
                    prompt.end - before,
                    total - before_bytes,
                    theory,
                    f"{(total - before_bytes) / theory:.3f}",
                ]
            )
            before_bytes, before = total, prompt.end
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    add_model(parser, None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--conversations", type=int, default=4)
    arguments = parse(parser, argv, tokens=[600], turns=1, conversations=1, threads=1)
    with tempfile.TemporaryDirectory() as name:
        path = arguments.model or f"{name}/wide-dense.gguf"
        if not arguments.model:
            write_model(path, WIDE_DENSE)
        loaded = load(ModelSettings(path=path, n_ctx=max(arguments.tokens) + 4096, n_threads=arguments.threads))
        reserve_pinned(None)
        sizes = arguments.tokens
        tables = {
            "delay": (
                "Turns with the disk tier off and on",
                ["tokens", "what", "off", "on", "on / off"],
                [row for n in sizes for row in delay(loaded, n, arguments.turns, arguments.conversations)],
            ),
            "read": (
                "Reading a snapshot from disk",
                ["tokens", "raw MiB", "files MiB", "plain read GB/s", "files GB/s", "share", "decoded GB/s"],
                [read(loaded, n) for n in sizes],
            ),
            "written": (
                "Bytes written per turn",
                ["tokens", "turn", "new tokens", "written", "new rows + state", "ratio"],
                [row for n in sizes for row in written(loaded, n)],
            ),
        }
        loaded.backend.unload()
    for key, (title, columns, rows) in tables.items():
        show(title, columns, rows, keep=f"disk-{key}" if arguments.keep else "")


if __name__ == "__main__":
    main()
