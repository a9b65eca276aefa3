"""Buffers of copies beside the computation: kept until the copies are complete, and not longer.

No device is needed: with a lag, the extension treats buffers as if a device were so many calls
behind.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from llama_cpp import llama_cpp as api

from pyctl import _core
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Rows
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.errors import StateError
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import load
from pyctl.llama.memory import context_memory
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import Prompt, as_tokens
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ask

LAG = 3
MAX_CALLS = 16
"""Calls that may be under way before one waits."""

Opened = Callable[[int], LlamaBackend]


@pytest.fixture
def open_lagging(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Opened]:
    """open_lagging(n) -> a backend whose copies are n calls behind."""
    opened = []

    def get(lag: int) -> LlamaBackend:
        if lag > LAG and api.llama_supports_gpu_offload():
            pytest.skip("a device says itself when a copy is complete")
        monkeypatch.setattr(context_memory, "KVState", partial(_core.KVState, lag=lag))
        settings = ModelSettings(
            path=str(model_path("tiny-hybrid")), n_ctx=4096, n_ubatch=64, n_threads=1
        )
        opened.append(load(settings).backend)
        return opened[-1]

    yield get
    for backend in opened:
        backend.unload()


def prompt(seed: int, n: int = 300) -> Prompt:
    return Prompt.from_ids(np.random.default_rng(seed).integers(0, 250, n), [n // 3, 2 * n // 3])


def live_bytes() -> int:
    gc.collect()
    return _core.HostBuffer.used()


def test_what_was_evicted_is_freed_while_copies_run_beside_the_computation(
    open_lagging: Opened,
) -> None:
    """Evicted buffers are freed once their copies have arrived: memory stays within the cache's
    bytes and those of the calls under way.
    """
    backend = open_lagging(LAG)
    assert backend.facts.is_async
    before = live_bytes()
    budget = 3 * 2**20
    engine = Engine(backend, RamCache(32, budget), EngineSettings())
    cache = engine.prefix_cache.cache
    largest = 0
    for seed in range(40):
        assert ask(engine, prompt(seed), 2).error is None
        check_invariants(cache)
        largest = max(
            largest, *(max(s.state.n_bytes, s.segment.rows.nbytes) for s in cache.snapshots())
        )
        assert live_bytes() - before <= cache.n_bytes + (LAG + 1) * largest
        assert backend.memory.kv.in_flight_bytes <= (LAG + 1) * largest
    assert cache.evictor.n_evicted > 20, "nothing was ever at stake"
    cache.clear()
    backend.memory.synchronize()
    assert live_bytes() == before


def test_a_device_that_never_catches_up_is_waited_for(open_lagging: Opened) -> None:
    backend = open_lagging(10**6)
    before = live_bytes()
    size = backend.memory.shape.sizes.rows(0, 10)
    backend.evaluate(0, as_tokens(range(50)), 0)
    for _ in range(2 * MAX_CALLS):
        backend.memory.save_rows(0, 0, 10)  # the block is dropped at once
        assert live_bytes() - before == backend.memory.kv.in_flight_bytes <= MAX_CALLS * size
    assert backend.memory.kv.in_flight_bytes == MAX_CALLS * size


def test_nothing_is_held_after_a_wait(open_lagging: Opened) -> None:
    backend = open_lagging(10**6)
    before = live_bytes()
    backend.evaluate(0, as_tokens(range(50)), 0)
    rows = backend.memory.save_rows(0, 0, 50).block
    state = backend.memory.save_state(0, 50)
    backend.memory.rewind(0, 20)
    backend.memory.restore(0, 20, [(Rows(rows), 20, 50)])
    backend.memory.restore(0, 50, (), state)
    assert backend.memory.kv.in_flight_bytes == 2 * (rows.nbytes + state.n_bytes), (
        "each is written and read"
    )
    del rows, state
    assert live_bytes() > before
    backend.memory.synchronize()
    assert backend.memory.kv.in_flight_bytes == 0
    assert live_bytes() == before


def test_what_was_refused_is_not_held(open_lagging: Opened) -> None:
    backend = open_lagging(10**6)
    before = live_bytes()
    backend.evaluate(0, as_tokens(range(50)), 0)
    with pytest.raises(StateError):
        backend.memory.save_rows(0, 0, 51)
    with pytest.raises(StateError):
        backend.memory.restore(0, 50, [(Rows(np.zeros(100, np.uint8)), 50, 51)])
    assert backend.memory.kv.in_flight_bytes == 0
    assert live_bytes() == before
