"""Evictions of snapshots from RAM: in the order of their worth, and none that has to stay."""

from __future__ import annotations

import math

from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Snapshot
from tests.unit.cache.checks import check_invariants
from tests.unit.cache.snapshots import n_bytes_of, snapshot


def filled(n_slots: int = 0) -> tuple[RamCache, list[Snapshot]]:
    """Return a cache with three snapshots of different worth, and these, the lowest first."""
    cache = RamCache(n_slots, None)
    by_worth = []
    for seed, n in ((1, 100), (2, 200), (3, 300)):
        cache.next_turn()
        made = snapshot(seed, n)
        assert cache.add(made)
        by_worth.append(made)
    assert cache.policy.rank() == by_worth
    return cache, by_worth


def test_an_eviction_is_announced_and_counted() -> None:
    cache, (lowest, *rest) = filled()
    announced: list[tuple[Snapshot, int]] = []

    def announce(evicted: Snapshot, worth: float) -> None:
        assert worth > 0
        announced.append((evicted, int(evicted.segment.rows.size)))

    cache.evictor.on_evict = announce
    cache.evictor.evict(lowest)
    assert announced == [(lowest, 1000)]
    assert lowest.segment.dropped
    assert cache.snapshots() == rest
    assert cache.evictor.n_evicted == 1


def test_the_lowest_worth_pays_until_there_is_room() -> None:
    cache, (_, _, highest) = filled()
    cache.budget.limit = n_bytes_of(300) + 10
    cache.evictor.pay(10)
    assert cache.snapshots() == [highest]
    check_invariants(cache)


def test_with_room_nobody_pays() -> None:
    cache, snapshots = filled()
    cache.budget.limit = cache.n_bytes + 10
    cache.evictor.pay(10)
    assert cache.snapshots() == snapshots


def test_locked_and_pinned_snapshots_stay() -> None:
    cache, (lowest, middle, highest) = filled()
    assert cache.pin(middle.prefix.name, True)
    cache.budget.limit = 1
    with cache.locked(lowest):
        cache.evictor.pay(0)
    assert cache.snapshots() == [lowest, middle]
    assert cache.evictor.n_evicted == 1
    assert highest.segment.dropped


def test_a_slot_is_freed_whatever_the_bytes() -> None:
    cache, (lowest, *rest) = filled(n_slots=3)
    assert cache.evictor.can_free_slot
    cache.evictor.free_slot()
    assert cache.snapshots() == rest
    assert not lowest.segment.alive


def test_no_slot_is_free_where_all_stay() -> None:
    cache, snapshots = filled(n_slots=3)
    with cache.locked(*snapshots):
        assert not cache.evictor.can_free_slot
        cache.evictor.free_slot()
    assert cache.snapshots() == snapshots


def test_other_models_get_only_what_is_worth_less() -> None:
    cache, (lowest, middle, highest) = filled()
    worth = cache.policy.value(middle, per_byte=True)
    cache.evictor.evict_below(worth, max_bytes=0)
    assert cache.snapshots() == [middle, highest]
    cache.evictor.evict_below(math.inf, max_bytes=n_bytes_of(300))
    assert cache.snapshots() == [highest]
    assert lowest.segment.dropped
