"""A budget shared by several caches: bytes stay within it, and the snapshot of least value in any
cache is evicted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.ram import RamCache
from pyctl.cache.ram_budget import RamBudget
from tests.unit.cache.test_ram import make, prompt, put

ONE = 1000 + 400 * 10 + 400 * 4
"""Bytes of a snapshot of 400 tokens: its state, its rows and its tokens."""


class FakeEvictableCache:
    """Stands for a cache whose engine rests, or is loaded and evicts later."""

    def __init__(self, cache: RamCache) -> None:
        self.cache = cache
        self.rests = True
        self.later: list[Callable[[], bool]] = []

    @property
    def n_bytes(self) -> int:
        return self.cache.index.pool.n_bytes

    @property
    def n_fixed(self) -> int:
        return (
            self.cache.index.pool.n_needed(tuple(self.cache.index.pinned))
            if self.rests
            else self.n_bytes
        )

    def evict_bytes(self, n_bytes: int, worth: float) -> bool:
        if self.rests:
            return self.cache.evict_bytes(n_bytes, worth)
        self.later.append(lambda: self.cache.evict_bytes(n_bytes, worth))
        return False


def caches(budget: int, n: int = 2) -> list[tuple[RamCache, FakeEvictableCache]]:
    shared = RamBudget(budget)
    made = list[tuple[RamCache, FakeEvictableCache]]()
    for _ in range(n):
        cache = RamCache(0, budget, shared=shared)
        made.append((cache, FakeEvictableCache(cache)))
        shared.add(*made[-1])
    return made


def ask(cache: RamCache, seed: int) -> bool:
    cache.next_turn()
    return put(cache, make(prompt(seed), 399))


def test_the_cache_of_a_model_that_is_unloaded_gives_up_what_is_older() -> None:
    (first, fake), (second, _) = caches(4 * ONE)
    for seed in range(4):
        assert ask(first, seed)
    for seed in range(4, 8):
        assert ask(second, seed)
    assert len(first.snapshots()) == 0
    assert len(second.snapshots()) == 4
    fake.rests = False
    assert ask(second, 8)
    assert len(second.snapshots()) == 4, "nothing is left to take"


def test_what_was_used_since_stays() -> None:
    (first, _), (second, _) = caches(4 * ONE)
    for seed in range(3):
        assert ask(second, seed)
    for _ in range(20):
        first.next_turn()
    assert ask(first, 3)
    assert ask(first, 4)
    assert len(first.snapshots()) == 2
    assert len(second.snapshots()) == 2
    assert ask(second, 5)
    assert len(first.snapshots()) == 2, "its own are older"


def test_a_loaded_model_evicts_later_and_pins_stay() -> None:
    (first, fake), (second, _) = caches(3 * ONE)
    fake.rests = False
    for seed in range(3):
        assert ask(first, seed)
    assert not ask(second, 3), "all the room is that of a model that may wait for this one"
    assert all([evict_bytes() for evict_bytes in fake.later][:1])
    assert ask(second, 3)
    fake.rests = True
    (kept, *_) = first.snapshots()
    assert first.pin(kept.prefix.name, True)
    for seed in range(4, 9):
        ask(second, seed)
    assert first.snapshots() == [kept]


def ask_while(cache: RamCache, seed: int, meanwhile: Callable[[], object]) -> bool:
    """`ask`, where something else happens on another thread after the last look at the room."""
    may_add = cache.may_add

    def looked(*args: Any) -> bool:
        found = may_add(*args)
        meanwhile()
        return found

    with patch.object(cache, "may_add", looked):
        return ask(cache, seed)


def test_two_loaded_models_that_grow_at_once_stay_within_the_budget() -> None:
    (first, fake), (second, other) = caches(4 * ONE)
    fake.rests = other.rests = False
    for seed in range(3):
        assert ask(first, seed)
    grown = []
    assert not ask_while(second, 3, lambda: grown.append(ask(first, 4)))
    assert grown == [True]
    assert len(first.snapshots()) == 4
    assert len(second.snapshots()) == 0
    assert first.n_bytes + second.n_bytes <= 4 * ONE


KINDS = ("ask", "ask", "race", "pin", "rest", "later", "clear")


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 30), st.sampled_from(KINDS)), max_size=60
    )
)
def test_all_together_stay_within_the_budget(steps: list[tuple[int, int, str]]) -> None:
    """The sum over three caches stays within the shared budget after any sequence of insertions,
    races, pins and late evictions. A budget that held for each cache alone would fill the RAM.
    """
    made = caches(5 * ONE, 3)
    budget = 5 * ONE
    for number, seed, kind in steps:
        cache, fake = made[number]
        if kind == "ask":
            ask(cache, seed)
        elif kind == "race":
            ask_while(
                cache, seed, lambda seed=seed, other=made[(number + 1) % 3][0]: ask(other, seed + 1)
            )
        elif kind == "pin":
            for kept in cache.snapshots()[:1]:
                cache.pin(kept.prefix.name, kept not in cache.index.pinned)
        elif kind == "clear":
            cache.clear()
        elif kind == "rest":
            fake.rests = not fake.rests
        else:
            calls = fake.later
            fake.later = []
            for evict_bytes in calls:
                evict_bytes()
        assert sum(cache.n_bytes for cache, _ in made) <= budget
