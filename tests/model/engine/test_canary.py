"""The canary on llama.cpp: intact snapshots are equal to the bit, and a flipped bit is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import RECURRENT, Block, Rows, Segment, Snapshot
from pyctl.disk.file_format import PartKind
from pyctl.disk.segment_files import read_header, read_jobs, segment_parts, write_file
from pyctl.engine.canary.canary_counts import CanaryView
from pyctl.engine.canary.canary_limits import CanaryLimits
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import Prompt
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ManualClock, ask, flushed, tier_of, tier_on
from tools.generator.families import FAMILIES

HOUR = 3600

N_CHECKS = 12

MODELS = ["tiny-dense", "tiny-hybrid", "tiny-gemma3"]
"""Rows alone, rows with a recurrent state, rows with sliding windows."""


def prompt_of(*messages: tuple[int, int]) -> Prompt:
    """Return a prompt of messages (seed, length)."""
    parts = [np.random.default_rng(seed).integers(1, 250, n) for seed, n in messages]
    return Prompt.from_ids(np.concatenate(parts), np.cumsum([part.size for part in parts])[:-1])


PROMPTS = [
    prompt_of((1, 130), (2, 70), (3, 90), (9, 40)),
    prompt_of((1, 130), (2, 70), (3, 90), (4, 120), (9, 40)),
    prompt_of((1, 130), (5, 80), (9, 40)),
]


class ModelBench:
    """An engine on a tiny model with a canary, after some prompts."""

    def __init__(self, backend: LlamaBackend, directory: Path | None = None) -> None:
        self.backend = backend
        self.clock = ManualClock()
        settings = EngineSettings(exact=True, canary=CanaryLimits(seed=1))
        disk = tier_on(directory) if directory is not None else None
        self.engine = Engine(backend, RamCache(0, None), settings, disk, clock=self.clock)
        self.cache = self.engine.prefix_cache.cache
        for prompt in PROMPTS:
            assert ask(self.engine, prompt, 4).error is None
        while self.engine.prefix_cache.write_back.copy_next():
            pass
        backend.memory.synchronize()
        if disk is not None:
            flushed(self.engine)

    def check(self, n: int = N_CHECKS) -> CanaryView:
        """Run ``n`` checks, or until one finds a difference."""
        canary = self.engine.canary
        for _ in range(n):
            self.clock.advance(HOUR)
            canary.step()
            while canary.is_running:
                if canary.reads is not None:
                    canary.reads.wait(1.0)
                canary.step()
            if canary.counts.differing:
                break
        check_invariants(self.cache)
        return canary.view()

    def close(self) -> None:
        if self.engine.prefix_cache.disk is not None:
            tier_of(self.engine).close()
        self.backend.memory.cells.release_all()
        self.backend.memory.clear(0)

    @property
    def deepest(self) -> Snapshot:
        return max(self.cache.snapshots(), key=lambda snapshot: snapshot.n)


@pytest.fixture
def bench_of(
    open_model: Callable[..., Loaded], tmp_path: Path
) -> Iterator[Callable[..., ModelBench]]:
    """bench_of(name, on_disk=False, **options)."""
    made: list[ModelBench] = []

    def build(name: str, *, on_disk: bool = False, **options: object) -> ModelBench:
        backend = open_model(name, n_ctx=2048, **options).backend
        made.append(ModelBench(backend, tmp_path / "kv" if on_disk else None))
        return made[-1]

    yield build
    for bench in made:
        bench.close()


def flip(block: Block) -> None:
    """Flip the lowest bit of the byte in the middle."""
    block[block.size // 2] ^= 1


def flip_on_device(bench: ModelBench, segment: Segment) -> None:
    """Let the device hold rows of ``segment`` that differ in one bit.

    The rows travel through the sequence, which is emptied: the context has no other way in.
    """
    memory = bench.backend.memory
    assert segment.held is not None
    snapshot = bench.deepest
    block = memory.cells.fetch(segment.held, segment.start, segment.end)
    memory.synchronize()
    flip(block)
    bench.engine.prefix_cache.forget(bench.engine.sequences[0])
    before = snapshot.spans(0, segment.start)
    whole = [*before, (Rows(block, segment.draft_rows), segment.start, segment.end)]
    memory.restore(0, 0, whole, snapshot.state if snapshot.n == segment.end else None)
    memory.cells.release(segment.held)
    segment.held = memory.cells.hold_rows(0, segment.start, segment.end)
    memory.clear(0)


@pytest.mark.parametrize("name", MODELS)
def test_intact_snapshots_are_equal_to_the_bit(
    bench_of: Callable[..., ModelBench], name: str
) -> None:
    view = bench_of(name, on_disk=True).check(2 * N_CHECKS)
    assert view.differing == {}
    assert view.skipped == {}
    assert set(view.verified) == {"ram", "device", "disk"}


@pytest.mark.parametrize("name", FAMILIES)
def test_no_kind_of_memory_raises_a_false_alarm(
    model_path: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    settings = ModelSettings(path=str(model_path(name)), n_ctx=2048, n_ubatch=128, n_threads=1)
    backend = load(settings).backend
    bench = ModelBench(backend, tmp_path / "kv")
    try:
        view = bench.check(2 * N_CHECKS)
    finally:
        bench.close()
        backend.unload()
    assert view.differing == {}
    assert view.skipped == {}
    assert sum(view.verified.values()) == 2 * N_CHECKS


@pytest.mark.parametrize(
    "options",
    [{"type_k": "q8_0", "type_v": "q8_0"}, {"flash_attn": "off"}, {"n_seqs": 3}],
    ids=str,
)
@pytest.mark.parametrize("name", ["tiny-dense", "tiny-hybrid"])
def test_other_settings_raise_no_false_alarm(
    bench_of: Callable[..., ModelBench], name: str, options: dict[str, object]
) -> None:
    view = bench_of(name, **options).check()
    assert view.differing == {}
    assert sum(view.verified.values()) == N_CHECKS


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-hybrid"])
def test_a_flipped_bit_of_a_row_in_ram_is_found(
    bench_of: Callable[..., ModelBench], name: str
) -> None:
    bench = bench_of(name)
    flip(bench.deepest.segment.rows)
    assert bench.check(60).differing == {"ram": 1}


def test_a_flipped_bit_of_a_recurrent_state_is_found(bench_of: Callable[..., ModelBench]) -> None:
    bench = bench_of("tiny-hybrid")
    flip(bench.deepest.state.parts[RECURRENT])
    view = bench.check(60)
    assert sum(view.differing.values()) == 1
    assert view.reports[0]["differs"] == "state"


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-hybrid"])
def test_a_flipped_bit_of_a_row_on_the_device_is_found(
    bench_of: Callable[..., ModelBench], name: str
) -> None:
    bench = bench_of(name)
    flip_on_device(bench, bench.deepest.segment)
    assert bench.check(60).differing == {"device": 1}


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-hybrid"])
def test_a_flipped_bit_in_a_file_is_found(
    bench_of: Callable[..., ModelBench], tmp_path: Path, name: str
) -> None:
    bench = bench_of(name, on_disk=True)
    path = max((tmp_path / "kv").rglob("*.rows"), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    view = bench.check(60)
    assert view.differing == {"disk": 1}
    assert view.reports[0]["file"] == path.name
    flushed(bench.engine)
    assert not path.exists()


def write_wrong(path: Path) -> None:
    """Write a file of rows again, with one flipped bit and the right checksum for it."""
    header = read_header(path)
    parts = {part.kind: np.empty(part.size, np.uint8) for part in header.parts}
    for job in read_jobs(path, header, parts):
        job()
    flip(parts[PartKind.ROWS])
    write_file(path, replace(header, parts=segment_parts(parts)), parts)


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-hybrid"])
def test_a_row_that_was_written_wrong_is_found_in_its_file(
    bench_of: Callable[..., ModelBench], tmp_path: Path, name: str
) -> None:
    """Its checksum is right: only an evaluation shows the difference."""
    bench = bench_of(name, on_disk=True)
    bench.cache.clear(pinned=True)
    deepest = max(tier_of(bench.engine).checks.prefixes(), key=lambda prefix: prefix.n)
    (path,) = (tmp_path / "kv").rglob(f"*-{deepest.n}-*.rows")
    write_wrong(path)
    view = bench.check(60)
    assert view.differing == {"disk": 1}
    assert view.reports[0]["differs"] == "rows"
    flushed(bench.engine)
    assert tier_of(bench.engine).checks.prefixes() == []
