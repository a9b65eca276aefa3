"""Conversations beyond the budget of the cache keep the part that fits; no other snapshot is
evicted for the rest.
"""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.cache import ram
from pyctl.cache.plan import batch_ends
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Snapshot
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.prompt import Prompt
from tests.effort import examples
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ask, cold

N_UBATCH = 64


def conversation(seed: int, lengths: list[int]) -> Prompt:
    parts = [
        np.concatenate([[63], np.random.default_rng(1000 * seed + i).integers(1, 60, n)])
        for i, n in enumerate(lengths)
    ]
    tokens = np.concatenate([*parts, [63, 61, 62]])
    return Prompt.from_ids(tokens, np.flatnonzero(tokens == 63))


class WatchedCache(RamCache):
    """Notes what a save that is refused in the end has cost."""

    def __init__(self, n_slots: int, budget: int) -> None:
        super().__init__(n_slots, budget)
        self.lost: list[Snapshot] = []

    def add(self, snapshot: Snapshot) -> bool:
        before = self.snapshots()
        done = super().add(snapshot)
        if not done:
            self.lost += [snapshot for snapshot in before if snapshot not in self.snapshots()]
        return done


def bytes_of(snapshot: Snapshot) -> int:
    """Its part that is not shared: whole segments, and the state."""
    return sum(segment.n_bytes for segment in snapshot.chain) + snapshot.state.n_bytes


@settings(max_examples=examples(150))
@given(
    kind=st.sampled_from(["hybrid", "hybrid", "attention", "opaque"]),
    budget=st.integers(2_000, 25_000),
    n_slots=st.sampled_from([2, 4, 32]),
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([3, 40, 100, 170, 300])),
        min_size=1,
        max_size=14,
    ),
)
def test_nobody_loses_a_snapshot_for_one_that_is_refused(
    kind: str, budget: int, n_slots: int, turns: list[tuple[int, int]]
) -> None:
    backend = FakeBackend(kind, n_ctx=8192, n_ubatch=N_UBATCH)
    cache = WatchedCache(n_slots, budget)
    engine = Engine(backend, cache, EngineSettings(exact=True, min_step=128))
    said: dict[int, list[int]] = {0: [30], 1: [30], 2: [30]}
    for who, n in turns:
        said[who].append(n)
        prompt = conversation(who, said[who])
        reply = ask(engine, prompt, 3)
        assert (
            reply.tokens == cold(FakeBackend(kind, n_ctx=8192, n_ubatch=N_UBATCH), prompt, 3).tokens
        )
        check_invariants(cache)
        assert cache.lost == []


def grown(engine: Engine, seed: int, n_messages: int) -> tuple[list[int], list[int]]:
    """At how many tokens a growing conversation could have been resumed after each turn, and all
    its batch ends.
    """
    lengths = []
    resumable = []
    for _ in range(n_messages):
        lengths.append(100)
        prompt = conversation(seed, lengths)
        assert ask(engine, prompt, 2).error is None
        held = [
            s.n
            for s in engine.prefix_cache.cache.snapshots()
            if (prompt.tokens[: s.n] == s.last_tokens(s.n)).all()
        ]
        resumable.append(max(held, default=0))
    return resumable, batch_ends(prompt, N_UBATCH, 32)


def test_a_conversation_beyond_the_budget_keeps_the_most_that_fits() -> None:
    backend = FakeBackend("hybrid", n_ctx=8192, n_ubatch=N_UBATCH, can_hold=False)
    budget = 20_000
    cache = RamCache(32, budget)
    engine = Engine(backend, cache, EngineSettings(exact=True, min_step=0))
    resumable, _ = grown(engine, 1, 25)
    assert resumable == sorted(resumable), "what could be resumed once can be resumed later"
    assert resumable[-1] == resumable[-5] > 0, "the budget is full"
    deepest = max(cache.snapshots(), key=lambda snapshot: snapshot.n)
    row_bytes = 16 + 4
    assert bytes_of(deepest) + (101 + 2) * row_bytes > budget - 500, (
        "one more message would not have fitted"
    )
    assert cache.n_refused > 0


def test_others_can_go_on_after_one_has_outgrown_the_budget() -> None:
    backend = FakeBackend("hybrid", n_ctx=8192, n_ubatch=N_UBATCH)
    cache = RamCache(32, 20_000)
    engine = Engine(backend, cache, EngineSettings(exact=True, min_step=0))
    grown(engine, 1, 25)
    others = [conversation(seed, [100, 60]) for seed in (2, 3)]
    for prompt in others:
        ask(engine, prompt, 2)
    cached = [ask(engine, prompt, 2).done.stats.n_cached for prompt in others]
    assert min(cached) > 0


def test_the_log_says_once_that_a_conversation_is_too_large(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram, "QUIET_SECONDS", 3600.0)
    engine = Engine(
        FakeBackend("hybrid", n_ctx=8192, n_ubatch=N_UBATCH, can_hold=False),
        RamCache(32, 8_000),
        EngineSettings(min_step=0),
    )
    with caplog.at_level(logging.WARNING):
        grown(engine, 1, 20)
    said = [
        record.getMessage() for record in caplog.records if "no snapshot at" in record.getMessage()
    ]
    assert len(said) == 1
    assert engine.prefix_cache.cache.n_refused > 5
