"""A reply with --exact depends on its request alone, and has the bits of a cold run on an idle
server.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from pyctl.cache.ram import RamCache
from pyctl.cache.resume_points import NOWHERE
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Piece
from pyctl.engine.sampling import Sampling
from pyctl.engine.schedule.turns import TURN_SECONDS
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded
from pyctl.prompt import Prompt
from tests.unit.engine.drive import AtOnce, chat, empty, request, run_all, tier_on
from tools.generator.families import FAMILIES

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)

SHAPES = pytest.mark.parametrize(
    "shape", ["tiny-hybrid", "tiny-dense", "tiny-gemma3", "tiny-lfm2-window"]
)

CHOOSING = (
    "tiny-minimax-m3",
    "tiny-deepseek32",
    "tiny-qwen4exp",
    "tiny-glm5-next",
    "tiny-dots3note",
)
"""Families whose indexer chooses among cells."""

OTHERS = [chat((seed, 150), (seed + 1, 180)) for seed in (50, 60)]
"""Prompts that keep the other sequence busy."""

TURNS = [(1, 90), (2, 210), (3, 40), (4, 310), (5, 60), (6, 200)]
FIRST = chat(*TURNS[:2])
NEXT = chat(*TURNS[:4])
EDITED = chat(*TURNS[:3], (7, 280), *TURNS[4:])


class QuickClock:
    """A clock on which a turn takes some steps."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __call__(self) -> float:
        self._seconds += TURN_SECONDS / 8
        return self._seconds


@pytest.fixture
def backend_of(open_model: Callable[..., Loaded]) -> Callable[..., LlamaBackend]:
    def get(shape: str, **settings: object) -> LlamaBackend:
        return open_model(shape, **{"n_ctx": 2048, "n_seqs": 2, **settings}).backend

    return get


def engine_on(
    backend: LlamaBackend, directory: Path | None = None, *, exact: bool = True
) -> Engine:
    backend.memory.cells.release_all()
    empty(backend)
    tier = (
        tier_on(directory, backend.memory.identity, min_tokens=32)
        if directory is not None
        else None
    )
    return Engine(backend, RamCache(0, None), EngineSettings(exact=exact), tier, clock=QuickClock())


def admin_of(engine: Engine) -> EngineAdmin:
    return EngineAdmin(cast(Any, AtOnce()), engine)


def submit(engine: Engine, prompt: Prompt, n: int = 6, **fields: object) -> RequestHandle:
    handle = RequestHandle(request(prompt, n, n_probs=5, **fields))
    engine.submit(handle)
    return handle


def finish(engine: Engine, handle: RequestHandle) -> tuple[list[object], int]:
    """Return the five best log probabilities of each token, and how much of the prompt was
    cached.
    """
    events: list[Any] = []
    while not (events and isinstance(events[-1], Done | Failed)):
        engine.step()
        events += handle.drain()
    assert not [event for event in events if isinstance(event, Failed)]
    return [event.probs for event in events if isinstance(event, Piece)], events[-1].stats.n_cached


def asked(engine: Engine, prompt: Prompt, **fields: object) -> tuple[list[object], int]:
    return finish(engine, submit(engine, prompt, **fields))


def beside(engine: Engine, number: int = 0) -> RequestHandle:
    """Return the request of a reply that goes on until it is cancelled; some tokens of it are
    there.
    """
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
    """Check that each prompt is answered as without a cache; return how much of each was cached."""
    shares = []
    for prompt in prompts:
        found, share = asked(engine, prompt)
        expected, _ = asked(engine, prompt, cache_prompt=False)
        assert found == expected, f"{share} of {len(prompt)} tokens cached"
        shares.append(share)
    return shares


@SHAPES
def test_a_prompt_that_is_asked_beside_a_reply(
    backend_of: Callable[..., LlamaBackend], shape: str, tmp_path: Path
) -> None:
    """It waits for its turn, is answered as if it were alone, and is of use to the next ones."""
    backend = backend_of(shape)
    engine = engine_on(backend, tmp_path)
    other = beside(engine)
    together, _ = asked(engine, FIRST)
    leave(engine, other)
    assert together == asked(engine, FIRST, cache_prompt=False)[0]
    assert min(check_alone(engine, FIRST, NEXT, EDITED)) > 0
    assert engine.prefix_cache.close()
    engine = engine_on(backend, tmp_path)
    assert min(check_alone(engine, EDITED, NEXT)) > 0, "it is on disk, too"


@SHAPES
def test_without_the_flag_company_changes_bits(
    backend_of: Callable[..., LlamaBackend], shape: str
) -> None:
    """Else the tests here would test nothing."""
    engine = engine_on(backend_of(shape), exact=False)
    other = beside(engine)
    together, _ = asked(engine, FIRST)
    leave(engine, other)
    assert together != asked(engine, FIRST, cache_prompt=False)[0]


@SHAPES
def test_a_conversation_that_another_joins(
    backend_of: Callable[..., LlamaBackend], shape: str
) -> None:
    """A reply that gives way goes on from the same bits."""
    engine = engine_on(backend_of(shape))
    expected, _ = asked(engine, OTHERS[0], n=200, sampling=ENDLESS, cache_prompt=False)
    first = submit(engine, OTHERS[0], 200, sampling=ENDLESS)
    while not engine.running or engine.running[0].pending is None:
        engine.step()
    second, _ = asked(engine, FIRST)
    assert engine.counters.n_turns_yielded > 0
    assert finish(engine, first)[0] == expected
    assert second == asked(engine, FIRST, cache_prompt=False)[0]
    assert min(check_alone(engine, NEXT)) > 0


@SHAPES
def test_replies_that_take_turns(backend_of: Callable[..., LlamaBackend], shape: str) -> None:
    """Requests take turns in prompts and in replies when the context cannot hold all of them, and
    each gets the reply of a cold run.
    """
    engine = engine_on(backend_of(shape, n_ctx=1024, n_ubatch=64))
    prompts = (FIRST, OTHERS[0], OTHERS[1])
    expected = [
        asked(engine, prompt, n=300, sampling=ENDLESS, cache_prompt=False)[0] for prompt in prompts
    ]
    handles = [submit(engine, prompt, 300, sampling=ENDLESS) for prompt in prompts]
    assert [finish(engine, handle)[0] for handle in handles] == expected
    assert engine.counters.n_turns_yielded > 2
    assert min(check_alone(engine, FIRST, OTHERS[0], NEXT)) > 0


@SHAPES
def test_a_sequence_from_a_file(
    backend_of: Callable[..., LlamaBackend], shape: str, tmp_path: Path
) -> None:
    """A sequence restored from a slot file beside a running reply is answered as by a cold run; a
    file that was saved without --exact has no batch ends, and replies are still exact.
    """
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
    assert engine.sequences[0].batch_ends == []
    check_alone(engine, NEXT)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_clients_at_once(backend_of: Callable[..., LlamaBackend], name: str) -> None:
    """Replies of each family that take turns have the bits of a context with one sequence."""
    alone = engine_on(backend_of(name, n_seqs=1))
    fields = {"n": 40, "sampling": ENDLESS}
    expected = [
        asked(alone, prompt, cache_prompt=False, **fields)[0] for prompt in (FIRST, OTHERS[0])
    ]
    engine = engine_on(backend_of(name))
    handles = [submit(engine, prompt, **fields) for prompt in (FIRST, OTHERS[0])]
    assert [finish(engine, handle)[0] for handle in handles] == expected
    can_give_way = (
        engine.backend.memory.shape.resume_points != NOWHERE and engine.backend.facts.n_seqs > 1
    )
    assert (engine.counters.n_turns_yielded > 0) == can_give_way


@pytest.mark.parametrize("name", FAMILIES)
def test_two_clients_in_one_batch(backend_of: Callable[..., LlamaBackend], name: str) -> None:
    """Without the flag rows of another sequence change a reply by rounding alone; chosen rows by
    nothing.
    """
    engines = [engine_on(backend_of(name, n_seqs=n_seqs), exact=False) for n_seqs in (1, 2)]
    alone, again = (best_of(asked(engine, FIRST, n=24, cache_prompt=False)) for engine in engines)
    assert alone == again
    handles = [
        submit(engines[1], prompt, n=24, cache_prompt=False) for prompt in (FIRST, OTHERS[0])
    ]
    together, _ = (best_of(finish(engines[1], handle)) for handle in handles)
    assert together == pytest.approx(alone, abs=0 if name in CHOOSING else 0.01)


def best_of(reply: tuple[list[Any], int]) -> list[float]:
    """Return the log probability of each token."""
    return [token[0][1] for probs in reply[0] for token in probs]


def test_without_the_flag_company_costs_nothing(backend_of: Callable[..., LlamaBackend]) -> None:
    engine = engine_on(backend_of("tiny-hybrid"), exact=False)
    other = beside(engine)
    asked(engine, FIRST)
    leave(engine, other)
    assert asked(engine, NEXT)[1] > 250
