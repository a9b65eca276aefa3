"""Histories that broke other prefix caches, replayed on a real tiny model, with a disconnect at
every possible moment.

Each reply must equal, token for token, that of an engine without any cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import PromptMatch
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded
from pyctl.prompt import Prompt
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ask, chat, cold

"""Stands for <|im_start|>: every boundary is where one of these is."""


@pytest.fixture
def backend(open_model: Callable[..., Loaded]) -> LlamaBackend:
    return open_model("tiny-hybrid").backend


_expected: dict[tuple[bytes, int], list[int]] = {}


def check(engine: Engine, prompt: Prompt, n: int = 6) -> int:
    """Ask, compare with the uncached reply; returns the position that was restored."""
    reply = ask(engine, prompt, n)
    assert reply.error is None
    assert reply.done is not None
    check_invariants(engine.prefix_cache.cache)
    for snapshot in engine.prefix_cache.cache.snapshots():
        assert PromptMatch(snapshot.last_tokens(snapshot.n)).prefix(snapshot.n) == snapshot.prefix
    key = (prompt.tokens.tobytes(), n)
    assert key in _expected, "call expect() first: a cold run would disturb the live sequence"
    assert reply.tokens == _expected[key]
    return reply.done.stats.n_cached


def expect(backend: LlamaBackend, *prompts: Prompt, n: int = 6) -> None:
    for prompt in prompts:
        key = (prompt.tokens.tobytes(), n)
        if key not in _expected:
            _expected[key] = cold(backend, prompt, n).tokens


def engine_of(backend: LlamaBackend, n_slots: int) -> Engine:
    return Engine(backend, RamCache(n_slots, None), EngineSettings(exact=True))


@cache
def wrapped() -> dict[str, Prompt]:
    """Return a short conversation, a tiny one, a big one, and follow-ups of the first, shorter and
    longer than it was.
    """
    short = [(1, 360), (2, 300)]
    return {
        "short": chat(*short),
        "tiny": chat((3, 40)),
        "big": chat((4, 700), (5, 500)),
        "shortened": chat((1, 360), (6, 50)),
        "longer": chat(*short, (7, 80), (8, 90)),
    }


def steps_of(prompt: Prompt, n: int = 6) -> int:
    return len(prompt) // 64 + n + 4


@pytest.mark.parametrize("victim", ["none", "tiny", "big", "shortened"])
def test_a_wrap_onto_a_live_slot(backend: LlamaBackend, victim: str) -> None:
    """Short conversation, aborted tiny one, big one wrapping onto its slot, shortened follow-up,
    longer follow-up.
    """
    prompts = wrapped()
    expect(backend, *prompts.values())
    moments = range(steps_of(prompts[victim])) if victim != "none" else [None]
    for moment in moments:
        backend.memory.clear(0)
        engine = engine_of(backend, 2)
        check(engine, prompts["short"])
        ask(engine, prompts["tiny"], cancel_after=1 if victim != "tiny" else moment)
        for name in ("big", "shortened", "longer"):
            if name == victim:
                ask(engine, prompts[name], cancel_after=moment)
                check_invariants(engine.prefix_cache.cache)
            else:
                check(engine, prompts[name])
        again = check(engine, prompts["longer"])
        assert again >= 360, "the follow-up must hit again once it was served"


@pytest.mark.parametrize("moment", [None, *range(steps_of(chat((1, 360), (2, 300))))])
def test_a_history_that_became_shorter_than_its_snapshot(
    backend: LlamaBackend, moment: int | None
) -> None:
    """The prompt ends before the deepest snapshot of its conversation: the next shallower one is
    used.
    """
    long = chat((1, 360), (2, 300), (3, 240))
    short = chat((1, 360), (2, 300))
    shorter = Prompt.from_ids(long.tokens[:400], [b for b in long.boundaries if b < 400])
    expect(backend, long, short, shorter)
    backend.memory.clear(0)
    engine = engine_of(backend, 8)
    check(engine, long)
    asked = moment is not None and ask(engine, short, cancel_after=moment).tokens
    assert check(engine, short) == (663 if asked else 660)
    assert check(engine, shorter) == 360
    assert check(engine, long) == 903, "what was asked before, to its very end"
