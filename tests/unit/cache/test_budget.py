"""The budget of a RAM cache: its room, its slots, and the order of those who pay."""

from __future__ import annotations

import math

import pytest

from pyctl.cache.budget import Budget
from pyctl.cache.ram_budget import RamBudget
from pyctl.cache.segment_pool import SegmentPool
from pyctl.cache.snapshot import Snapshot
from tests.unit.cache.snapshots import n_bytes_of, snapshot


class OtherCache:
    """A cache of another model, which evicts what it is asked for."""

    n_bytes = 300
    n_fixed = 100

    def __init__(self) -> None:
        self.asked: list[tuple[int, float]] = []

    def evict_bytes(self, n_bytes: int, worth: float) -> bool:
        self.asked.append((n_bytes, worth))
        return True


class Payer:
    """A payer that records its calls."""

    def __init__(self, name: str, calls: list[tuple[str, int]]) -> None:
        self.name = name
        self.calls = calls

    def pay(self, n_bytes: int) -> None:
        self.calls.append((self.name, n_bytes))


def made(limit: int | None, n_slots: int = 0) -> tuple[Budget, SegmentPool, list[Snapshot]]:
    pool = SegmentPool()
    snapshots: list[Snapshot] = []
    budget = Budget(pool, snapshots, limit, n_slots, RamBudget(limit), owner="this")
    return budget, pool, snapshots


def test_room_is_what_no_snapshot_takes() -> None:
    budget, pool, _ = made(5000)
    pool.add_reference(snapshot(1, 100))
    assert budget.room() == 5000 - n_bytes_of(100)
    assert budget.room(200) == 4800 - n_bytes_of(100)
    assert budget.room(5000) < 0


def test_room_without_a_limit_is_infinite() -> None:
    budget, pool, _ = made(None)
    pool.add_reference(snapshot(1, 100))
    assert budget.room(10**12) == math.inf


@pytest.mark.parametrize(("n_slots", "n_free"), [(0, math.inf), (3, 1)])
def test_free_slots(n_slots: int, n_free: float) -> None:
    budget, _, snapshots = made(None, n_slots)
    snapshots += [snapshot(1, 10), snapshot(2, 10)]
    assert budget.n_free_slots == n_free


def test_other_models_take_a_part() -> None:
    budget, _, _ = made(5000)
    other = OtherCache()
    budget.shared.add("other", other)
    assert budget.room() == 4700
    assert budget.fixed_by_others == 100
    assert budget.take_from_others(50, 0.5)
    assert other.asked == [(50, 0.5)]


def test_the_own_bytes_count_once() -> None:
    budget, pool, _ = made(5000)
    pool.add_reference(snapshot(1, 100))
    budget.shared.add("this", OtherCache())
    assert budget.room() == 5000 - n_bytes_of(100)


def test_payers_pay_in_their_order() -> None:
    budget, _, _ = made(5000)
    calls: list[tuple[str, int]] = []
    budget.payers = [Payer("first", calls), Payer("second", calls)]
    budget.make_room(70)
    assert calls == [("first", 70), ("second", 70)]
