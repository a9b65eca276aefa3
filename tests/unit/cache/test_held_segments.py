"""Segments that the device holds: their order of eviction, and their way to RAM."""

from __future__ import annotations

import math

import pytest

from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Segment, Snapshot
from tests.unit.cache.checks import check_invariants
from tests.unit.cache.snapshots import ROW, STATE, n_bytes_of, snapshot


def on_device(cache: RamCache, seed: int, n: int, *, has_copy: bool = False) -> Snapshot:
    """Return a snapshot in ``cache`` whose rows the device holds, and RAM if it ``has_copy``."""
    cache.next_turn()
    made = snapshot(seed, n, has_rows=has_copy, is_held=True)
    assert cache.add(made)
    return made


def all_cells(segment: Segment) -> int:
    return 1


def test_copies_leave_first_then_the_least_expected() -> None:
    cache = RamCache(0, None)
    older = on_device(cache, 1, 100)
    newer = on_device(cache, 2, 100)
    copied = on_device(cache, 3, 100, has_copy=True)
    in_ram = snapshot(4, 100)
    assert cache.add(in_ram)
    assert cache.held.resumes.on(older.segment) < cache.held.resumes.on(newer.segment)
    order = list(cache.held.eviction_order(all_cells))
    assert order == [copied.segment, older.segment, newer.segment]
    assert cache.held.only_held() == [newer.segment, older.segment]


def test_a_locked_segment_leaves_only_with_a_copy() -> None:
    cache = RamCache(0, None)
    only = on_device(cache, 1, 100)
    copied = on_device(cache, 2, 100, has_copy=True)
    other = on_device(cache, 3, 100, has_copy=True)
    with cache.locked(only, copied):
        assert list(cache.held.eviction_order(all_cells)) == [other.segment, copied.segment]


def test_a_segment_that_frees_no_cell_stays() -> None:
    cache = RamCache(0, None)
    one = on_device(cache, 1, 100)
    other = on_device(cache, 2, 100)
    order = cache.held.eviction_order(lambda segment: int(segment is other.segment))
    assert list(order) == [other.segment]
    assert one.segment.held is not None


def test_a_segment_that_was_released_meanwhile_is_passed() -> None:
    cache = RamCache(0, None)
    first = on_device(cache, 1, 100)
    second = on_device(cache, 2, 100)
    order = cache.held.eviction_order(all_cells)
    assert next(order) is first.segment
    second.segment.held = None
    assert list(order) == []


def test_copies_pay_before_conversations() -> None:
    cache = RamCache(0, None)
    copied = on_device(cache, 1, 100, has_copy=True)
    in_ram = snapshot(2, 100)
    assert cache.add(in_ram)
    cache.budget.limit = cache.n_bytes
    cache.budget.make_room(100 * ROW)
    assert copied.segment.rows.size == 0
    assert copied.segment.held is not None
    assert cache.snapshots() == [copied, in_ram]
    check_invariants(cache)


@pytest.mark.parametrize("only_if_free", [False, True])
def test_rows_of_more_worth_take_the_room_of_less(only_if_free: bool) -> None:
    cache = RamCache(0, None)
    cheap = snapshot(1, 50)
    assert cache.add(cheap)
    dear = on_device(cache, 2, 400)
    cache.budget.limit = cache.n_bytes + 400 * ROW - 1
    has_room = cache.held.make_room(dear.segment, 400 * ROW, only_if_free=only_if_free)
    assert has_room != only_if_free
    assert (cheap in cache.snapshots()) == only_if_free
    check_invariants(cache)


def test_rows_of_less_worth_find_no_room() -> None:
    cache = RamCache(0, None)
    cheap = on_device(cache, 1, 50)
    dear = snapshot(2, 400)
    cache.next_turn()
    assert cache.add(dear)
    cache.budget.limit = cache.n_bytes
    assert not cache.held.make_room(cheap.segment, 50 * ROW)
    assert cache.snapshots() == [cheap, dear]


def test_an_old_conversation_of_many_bytes_pays_for_the_rows_of_a_young_one() -> None:
    """All of the old one is worth more, but only a tenth of its bytes is missing."""
    cache = RamCache(0, None)
    old = snapshot(1, 4000)
    cache.next_turn()
    assert cache.add(old)
    for _ in range(8):
        cache.next_turn()
    young = on_device(cache, 2, 400)
    assert cache.policy.value(old) > cache.policy.value(young)
    assert cache.policy.value(old) * 400 / 4000 < cache.policy.value(young)
    cache.budget.limit = cache.n_bytes
    assert cache.held.make_room(young.segment, 400 * ROW)
    assert cache.snapshots() == [young]
    check_invariants(cache)


def test_rows_that_stay_find_room_beyond_the_budget() -> None:
    cache = RamCache(0, n_bytes_of(100))
    pinned = on_device(cache, 1, 100)
    assert cache.pin(pinned.prefix.name, True)
    cache.budget.limit = STATE
    assert cache.held.make_room(pinned.segment, 100 * ROW)
    with pytest.raises(ValueError, match="has to stay"):
        cache.held.evict_dependents(pinned.segment)
    assert cache.snapshots() == [pinned]


def test_rows_that_no_snapshot_needs_find_no_room() -> None:
    cache = RamCache(0, None)
    stray = snapshot(1, 100, has_rows=False, is_held=True)
    assert not cache.held.make_room(stray.segment, 100 * ROW)


def test_all_that_needs_lost_rows_is_evicted_the_deepest_first() -> None:
    cache = RamCache(0, None)
    shallow = on_device(cache, 1, 50)
    deep = snapshot(1, 100, shallow.segment)
    other = snapshot(2, 100)
    for made in (deep, other):
        assert cache.add(made)
    evicted: list[Snapshot] = []
    cache.evictor.on_evict = lambda snapshot, worth: evicted.append(snapshot)
    cache.held.evict_dependents(shallow.segment)
    assert evicted == [deep, shallow]
    assert cache.snapshots() == [other]
    assert cache.held.n_lost == 1


def test_expectations_are_those_of_the_turn() -> None:
    cache = RamCache(0, None)
    first = on_device(cache, 1, 100)
    before = cache.held.resumes.on(first.segment)
    later = snapshot(2, 100)
    assert cache.add(later)
    assert cache.held.resumes.on(later.segment) == math.inf
    cache.next_turn()
    assert cache.held.resumes.on(later.segment) < math.inf
    assert cache.held.resumes.on(first.segment) < before
    cache.held.resumes.forget()
    assert cache.held.resumes.on(later.segment) < math.inf
