"""With --exact, evaluations beside other sequences change no bit of a request that runs alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from pyctl.cache.ram import RamCache
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Piece
from pyctl.engine.sampling import Sampling
from pyctl.llama import LlamaBackend, Loaded
from pyctl.prompt import Prompt
from tests.unit.engine.drive import AtOnce, chat, empty, request, run_all, tier_on
from tools.generator.families import FAMILIES

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)

SHAPES = pytest.mark.parametrize("shape", ["tiny-hybrid", "tiny-dense", "tiny-gemma3", "tiny-lfm2-window"])

CHOOSING = ("tiny-minimax-m3", "tiny-deepseek32", "tiny-qwen4exp", "tiny-glm5-next", "tiny-dots3note")
"""Families whose indexer chooses among cells."""

OTHERS = [chat((seed, 150), (seed + 1, 180)) for seed in (50, 60)]
"""What keeps the other sequence busy."""

TURNS = [(1, 90), (2, 210), (3, 40), (4, 310), (5, 60), (6, 200)]
FIRST, NEXT, EDITED = chat(*TURNS[:2]), chat(*TURNS[:4]), chat(*TURNS[:3], (7, 280), *TURNS[4:])


@pytest.fixture
def backend_of(open_model: Callable[..., Loaded]) -> Callable[..., LlamaBackend]:
    def get(shape: str, **settings: object) -> LlamaBackend:
        return open_model(shape, **{"n_ctx": 2048, "n_seqs": 2, **settings}).backend

    return get


def engine_on(backend: LlamaBackend, directory: Path | None = None, *, exact: bool = True) -> Engine:
    backend.memory.release_all()
    empty(backend)
    tier = tier_on(directory, backend.memory.identity, min_tokens=32) if directory is not None else None
    return Engine(backend, RamCache(0, None), EngineSettings(exact=exact), tier)


def admin_of(engine: Engine) -> EngineAdmin:
    return EngineAdmin(cast(Any, AtOnce()), engine)


def submit(engine: Engine, prompt: Prompt, n: int = 6, **fields: object) -> RequestHandle:
    handle = RequestHandle(request(prompt, n, n_probs=5, **fields))
    engine.submit(handle)
    return handle


def finish(engine: Engine, handle: RequestHandle) -> tuple[list[object], int]:
    """The five best log probabilities of each token, and how much of the prompt was cached."""
    events: list[Any] = []
    while not (events and isinstance(events[-1], Done | Failed)):
        engine.step()
        events += handle.drain()
    assert not [event for event in events if isinstance(event, Failed)]
    return [event.probs for event in events if isinstance(event, Piece)], events[-1].stats.n_cached


def asked(engine: Engine, prompt: Prompt, **fields: object) -> tuple[list[object], int]:
    return finish(engine, submit(engine, prompt, **fields))


def beside(engine: Engine, number: int = 0) -> RequestHandle:
    """A reply that goes on until it is cancelled; some tokens of it are there."""
    handle = submit(engine, OTHERS[number], 1000, sampling=ENDLESS)
    for _ in range(20):
        engine.step()
    assert engine.running
    return handle


def leave(engine: Engine, *handles: RequestHandle) -> None:
    for handle in handles:
        handle.cancel()
    run_all(engine)


def check_alone(engine: Engine, *prompts: Prompt) -> list[int]:
    """Each prompt is answered as without a cache; how much of each was cached."""
    shares = []
    for prompt in prompts:
        found, share = asked(engine, prompt)
        expected, _ = asked(engine, prompt, cache_prompt=False)
        assert found == expected, f"{share} of {len(prompt)} tokens cached"
        shares.append(share)
    return shares


@SHAPES
def test_a_prompt_that_was_evaluated_beside_a_reply(
    backend_of: Callable[..., LlamaBackend], shape: str, tmp_path: Path
) -> None:
    backend = backend_of(shape)
    engine = engine_on(backend, tmp_path)
    other = beside(engine)
    together, _ = asked(engine, FIRST)
    leave(engine, other)
    assert together != asked(engine, FIRST, cache_prompt=False)[0], "company changes bits, or this tests nothing"
    check_alone(engine, FIRST, NEXT, EDITED)
    assert engine.prefix_cache.close()
    engine = engine_on(backend, tmp_path)
    assert min(check_alone(engine, EDITED, NEXT)) > 0, "what was evaluated alone is on disk"


@SHAPES
def test_what_was_restored_beside_a_reply(backend_of: Callable[..., LlamaBackend], shape: str) -> None:
    engine = engine_on(backend_of(shape))
    asked(engine, FIRST)
    asked(engine, chat((70, 300)))  # so that the first conversation is in RAM alone
    other = beside(engine)
    assert asked(engine, NEXT)[1] > 0
    leave(engine, other)
    shares = check_alone(engine, NEXT, EDITED)
    assert shares[0] > 0, "the part that was evaluated alone is restored"


@SHAPES
def test_a_conversation_that_another_joins(backend_of: Callable[..., LlamaBackend], shape: str) -> None:
    """Batches evaluated before it came are exact, for its sequence and for others."""
    engine = engine_on(backend_of(shape))
    first = beside(engine)
    second = submit(engine, FIRST)
    finish(engine, second)
    leave(engine, first)
    shares = check_alone(engine, Prompt.of([*OTHERS[0].tokens, *FIRST.tokens], OTHERS[0].boundaries), NEXT)
    assert shares[0] > 0


@SHAPES
def test_replies_that_gave_way_to_each_other(backend_of: Callable[..., LlamaBackend], shape: str) -> None:
    engine = engine_on(backend_of(shape, n_ctx=1024))
    handles = [submit(engine, prompt, 500, sampling=ENDLESS) for prompt in (FIRST, OTHERS[0])]
    for handle in handles:
        finish(engine, handle)
    assert engine.counters.n_suspended
    check_alone(engine, FIRST, OTHERS[0], NEXT)


@SHAPES
def test_a_sequence_from_a_file(backend_of: Callable[..., LlamaBackend], shape: str, tmp_path: Path) -> None:
    backend = backend_of(shape)
    engine = engine_on(backend)
    admin = admin_of(engine)
    asked(engine, FIRST, seq=0)
    admin.save(0, tmp_path / "alone")
    other = beside(engine)
    (seq,) = [each for each in engine.sequences if engine.scheduler.occupancy.owner(each) is None]
    admin.restore(seq.id, tmp_path / "alone")
    leave(engine, other)
    check_alone(engine, NEXT)
    admin.restore(1, tmp_path / "alone")
    assert check_alone(engine, NEXT)[0] > 0
    engine = engine_on(backend_of(shape), exact=False)
    asked(engine, FIRST, seq=0)
    admin_of(engine).save(0, tmp_path / "unknown")
    engine = engine_on(backend_of(shape))
    assert admin_of(engine).restore(0, tmp_path / "unknown").result().n_tokens > 300
    assert engine.sequences[0].ends == []
    check_alone(engine, NEXT)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_clients_at_once(backend_of: Callable[..., LlamaBackend], name: str) -> None:
    """Rows of another sequence change a reply by rounding alone; where an indexer chooses rows, by nothing."""
    engines = [engine_on(backend_of(name, n_seqs=n_seqs)) for n_seqs in (1, 2)]
    alone, again = (best_of(asked(engine, FIRST, n=24, cache_prompt=False)) for engine in engines)
    assert alone == again
    handles = [submit(engines[1], prompt, n=24, cache_prompt=False) for prompt in (FIRST, OTHERS[0])]
    together, _ = (best_of(finish(engines[1], handle)) for handle in handles)
    assert together == pytest.approx(alone, abs=0 if name in CHOOSING else 0.01)


def best_of(reply: tuple[list[Any], int]) -> list[float]:
    """The log probability of each token."""
    return [token[0][1] for probs in reply[0] for token in probs]


def test_without_the_flag_company_costs_nothing(backend_of: Callable[..., LlamaBackend]) -> None:
    engine = engine_on(backend_of("tiny-hybrid"), exact=False)
    other = beside(engine)
    asked(engine, FIRST)
    leave(engine, other)
    assert asked(engine, NEXT)[1] > 250
