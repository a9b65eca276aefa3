"""Copies in RAM of rows that the device holds: within the room to spare, and each made once."""

from __future__ import annotations

import numpy as np
import pytest

from pyctl.cache.device_copies import DeviceCopies
from pyctl.cache.device_limits import MAX_UNWRITTEN_BYTES, DeviceLimits
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Block, BlockBytes, HeldRows, Snapshot
from pyctl.errors import StateError
from tests.unit.cache.snapshots import ROW, STATE, snapshot

LIMIT = 10_000
"""Bytes that may wait for the disk in these tests."""


class FakeMemory:
    """A device that counts copies; its blocks are complete after `synchronize`."""

    def __init__(self) -> None:
        self.shape = self
        self.cells = self
        self.can_hold = True
        self.n_copies = 0
        self.fails = False
        self.bytes = BlockBytes(0, 0, 0)
        self.is_complete = True

    def state_size(self, seq: int) -> int:
        return STATE

    def block_bytes(self) -> BlockBytes:
        return self.bytes

    def fetch(self, held: HeldRows, first: int, last: int) -> Block:
        if self.fails:
            raise StateError("the copy failed")
        self.n_copies += 1
        self.is_complete = False
        return np.zeros((last - first) * ROW, np.uint8)

    def synchronize(self) -> None:
        self.is_complete = True


class Bench:
    """A cache with a device."""

    def __init__(self) -> None:
        self.memory = FakeMemory()
        self.cache = RamCache(0, None)
        limits = DeviceLimits(unwritten_bytes=LIMIT)
        self.copies = DeviceCopies(self.memory, self.cache.held, limits)  # type: ignore[arg-type]

    def on_device(self, seed: int, n: int) -> Snapshot:
        """Return a snapshot in the cache whose rows only the device has."""
        self.cache.next_turn()
        made = snapshot(seed, n, has_rows=False, is_held=True)
        assert self.cache.add(made)
        return made


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("budget", "maximum"),
    [(None, MAX_UNWRITTEN_BYTES), (0, MAX_UNWRITTEN_BYTES), (2**32, 2**31)],
)
def test_what_may_wait_grows_with_the_cache(budget: int | None, maximum: int) -> None:
    assert DeviceLimits().max_unwritten(budget) == maximum


def test_the_rows_of_most_expected_use_are_copied_first(bench: Bench) -> None:
    older = bench.on_device(1, 100)
    newer = bench.on_device(2, 100)
    assert bench.copies.copy_one()
    assert newer.segment.rows.size == 100 * ROW
    assert older.segment.rows.size == 0
    assert bench.copies.copy_one()
    assert not bench.copies.copy_one(), "all have a copy"


def test_nothing_is_copied_without_room_to_spare(bench: Bench) -> None:
    bench.on_device(1, 100)
    bench.cache.budget.limit = bench.cache.n_bytes + 100 * ROW - 1
    assert not bench.copies.copy_one()
    assert bench.memory.n_copies == 0


def test_a_failed_copy_costs_nothing(bench: Bench) -> None:
    made = bench.on_device(1, 100)
    bench.memory.fails = True
    assert not bench.copies.copy_one()
    bench.copies.copy_within_headroom(made.segment)
    assert made.segment.rows.size == 0
    assert bench.cache.snapshots() == [made]


def test_rows_on_disk_need_no_copy(bench: Bench) -> None:
    made = bench.on_device(1, 100)
    made.segment.file.is_there = True
    bench.copies.copy_within_headroom(made.segment)
    assert bench.memory.n_copies == 0


def test_a_block_that_is_alive_is_not_copied_again(bench: Bench) -> None:
    made = bench.on_device(1, 100)
    (block,) = bench.copies.fetch_rows([made.segment])
    (again,) = bench.copies.fetch_rows([made.segment])
    assert again is block
    assert bench.memory.n_copies == 1
    del block, again
    bench.copies.fetch_rows([made.segment])
    assert bench.memory.n_copies == 2


def test_rows_now_are_complete(bench: Bench) -> None:
    made = bench.on_device(1, 100)
    bench.copies.fetch_rows([made.segment])
    assert not bench.memory.is_complete
    bench.copies.fetch_rows_now([made.segment])
    assert bench.memory.is_complete


@pytest.mark.parametrize(("n_waiting", "is_behind"), [(LIMIT, False), (LIMIT + 1, True)])
def test_complete_blocks_beyond_the_cache_wait(
    bench: Bench, n_waiting: int, is_behind: bool
) -> None:
    in_flight = 77
    bench.memory.bytes = BlockBytes(n_waiting + in_flight, 0, in_flight)
    assert bench.copies.is_backlog_full() == is_behind


def test_too_many_waiting_rows_are_refused(bench: Bench) -> None:
    made = bench.on_device(1, 100)
    bench.memory.bytes = BlockBytes(LIMIT, 0, 0)
    with pytest.raises(MemoryError):
        bench.copies.fetch_rows([made.segment])


def test_a_snapshot_is_large_beyond_what_may_wait(bench: Bench) -> None:
    small = bench.on_device(1, 100)
    large = bench.on_device(2, LIMIT // ROW)
    assert not bench.copies.exceeds_backlog(small)
    assert bench.copies.exceeds_backlog(large)
    large.segment.file.is_there = True
    assert not bench.copies.exceeds_backlog(large)


@pytest.mark.parametrize("can_hold", [True, False])
def test_reads_are_limited_where_rows_can_go_to_the_device(bench: Bench, can_hold: bool) -> None:
    assert bench.copies.max_read is None
    bench.cache.budget.limit = 100
    bench.memory.can_hold = can_hold
    assert bench.copies.max_read == (LIMIT if can_hold else None)
