"""Returns to conversations with held rows are bit-identical to a cold run, also when device and RAM
are full.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded
from pyctl.prompt import Prompt
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ask, cold

HEAD = np.random.default_rng(0).integers(1, 250, 130)


def prompt_of(messages: list[int]) -> Prompt:
    """Return a head that all conversations share, and messages of 60 to 140 tokens."""
    parts = [np.random.default_rng(seed).integers(1, 250, 60 + seed % 81) for seed in messages]
    return Prompt.from_ids(
        np.concatenate([HEAD, *parts]),
        [130, *(130 + np.cumsum([part.size for part in parts])).tolist()],
    )


def bits(backend: LlamaBackend, engine: Engine | None, prompt: Prompt) -> NDArray[np.float32]:
    """Return the logits at the end of a prompt, of a cold run without an engine."""
    reply = cold(backend, prompt, 1) if engine is None else ask(engine, prompt, 1)
    assert reply.error is None
    return backend.logits(0)


def check(engine: Engine, backend: LlamaBackend) -> None:
    cache = engine.prefix_cache.cache
    check_invariants(cache)
    held = [segment.held for segment in cache.segments() if segment.held is not None]
    assert {each.handle for each in held} == backend.memory.cells._handles, (
        "rows are held for the cache alone"
    )
    assert all(segment.held is not None or segment.rows.size for segment in cache.segments())
    assert engine.cells.n_used + backend.memory.cells.n_held_cells <= backend.facts.n_cells


SHAPES = [
    ("tiny-hybrid", {}),
    ("tiny-dense", {}),
    ("tiny-hybrid", {"type_k": "q8_0", "type_v": "q8_0"}),
]


@pytest.mark.parametrize(("shape", "options"), SHAPES)
def test_a_return_moves_no_byte_to_or_from_ram(
    open_model: Callable[..., Loaded], shape: str, options: dict[str, str]
) -> None:
    """Conversations that fit the device together return by their held rows alone, with the bits of
    a cold run: a return costs a state, and no copy of rows over the bus.
    """
    backend = open_model(shape, n_ctx=2048, **options).backend
    prompts = [prompt_of([seed, seed + 10, seed + 20]) for seed in (1, 2, 3)]
    expected = [bits(backend, None, prompt) for prompt in prompts]
    engine = Engine(backend, RamCache(0, None), EngineSettings(exact=True))
    for number in (0, 1, 2, 0, 1, 2):
        assert (bits(backend, engine, prompts[number]) == expected[number]).all()
        check(engine, backend)
    counts = engine.prefix_cache.device.counts
    cache = engine.prefix_cache.cache
    assert counts.to_ram == 0
    assert counts.lost == 0
    assert counts.returned > 3 * 100, "all but those of the head, which stay, came from the device"
    assert not any(segment.rows.size for segment in cache.segments())
    assert (
        engine.prefix_cache.totals.n_cached["ram"] + engine.prefix_cache.totals.n_cached["live"]
        > 3 * 200
    )
    backend.memory.clear(0)


@pytest.mark.parametrize(("shape", "options"), SHAPES)
@pytest.mark.parametrize("budget", [None, 0.3])
def test_bits_are_those_of_a_cold_run_when_device_and_ram_are_full(
    open_model: Callable[..., Loaded], shape: str, options: dict[str, str], budget: float | None
) -> None:
    """A context of 1,024 tokens, conversations of together four times that, and RAM for a part of
    them, or for all.
    """
    backend = open_model(shape, n_ctx=1024, n_seqs=2, **options).backend
    choice = random.Random(f"{shape}{budget}")
    talks = [[seed] for seed in range(6)]
    row_bytes = backend.memory.shape.sizes.rows(0, 2) - backend.memory.shape.sizes.rows(0, 1)
    n_bytes = (
        int(budget * (4096 * row_bytes + 40 * backend.memory.state_size(0)))
        if budget is not None
        else None
    )
    engine = Engine(backend, RamCache(0, n_bytes), EngineSettings(exact=True))
    asked: list[tuple[Prompt, NDArray[np.float32]]] = []
    for _ in range(30):
        talk = choice.choice(talks)
        if len(talk) > 6 or choice.random() < 0.2:
            del talk[choice.randint(1, 3) :]
        talk.append(choice.randrange(1000))
        prompt = prompt_of(talk)
        asked.append((prompt, bits(backend, engine, prompt)))
        check(engine, backend)
        if choice.random() < 0.1:
            engine.sleep()
            assert not any(segment.held for segment in engine.prefix_cache.cache.segments())
            engine.wake()
    counts = engine.prefix_cache.device.counts
    totals = engine.prefix_cache.totals
    assert counts.returned > 0
    assert counts.to_ram > 0
    assert totals.n_cached["ram"] > 0
    assert totals.failed_restores == 0
    n_evicted = engine.prefix_cache.cache.evictor.n_evicted
    assert (counts.lost > 0 or n_evicted > 0) == (budget is not None)
    backend.memory.cells.release_all()
    for prompt, found in asked:
        assert (bits(backend, None, prompt) == found).all()
