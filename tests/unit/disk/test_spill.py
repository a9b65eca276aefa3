"""Spilling writes only missing files and evicts no snapshot of higher value; restores read only
missing parts.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.snapshot import NOTHING, Snapshot, State
from pyctl.disk.write_job import WriteJob, detached_copy
from pyctl.disk.writer import SPILLED_PER_DAY
from tests.unit.disk.making import (
    ROW,
    DirectStore,
    check_directory,
    check_equal,
    check_read,
    conversation,
    opened,
    segment,
    snapshot,
)

Opener = Callable[..., DirectStore]


def leaving(made: Snapshot) -> Snapshot:
    """Return the part of a snapshot to be written when it leaves RAM."""
    job = WriteJob(detached_copy(made), weakref.ref(made), False, 0.0)
    job.take_rows(made, list)
    return job.snapshot


def test_a_state_whose_rows_are_on_disk_is_written_without_them(
    open_store: Opener, tmp_path: Path
) -> None:
    store, (first, second, third) = open_store(), conversation(1)
    store.write(third)
    inner = snapshot(second.segment, 30)
    for made in (first, second, inner):
        lean = leaving(made)
        assert all(not link.rows.size for link in lean.chain)
        before = set(tmp_path.rglob("*.rows"))
        assert 0 < store.write(lean, spilled=True) < 2 * made.state.n_bytes
        assert set(tmp_path.rglob("*.rows")) == before
        check_read(store, made)
    check_directory(store)


def test_rows_that_have_gone_from_disk_meanwhile_are_a_loss_and_no_damage(
    open_store: Opener,
) -> None:
    store, (first, second, _) = open_store(), conversation(1)
    store.write(first)
    lean = leaving(second)
    assert [bool(link.rows.size) for link in lean.chain] == [True, False]
    store.directory.remove(first.prefix.name)
    assert store.write(lean, spilled=True) == 0
    assert not first.segment.file.is_there, "now it is known"
    assert store.write(leaving(second), spilled=True) > 0
    check_read(store, second)
    check_directory(store)


def test_rows_in_memory_are_not_read(open_store: Opener, tmp_path: Path) -> None:
    """A read from disk takes the segments that RAM holds from there, whatever part of the chain
    that is. Only the bytes behind them and the state are read.
    """
    made = conversation(3, turns=4)
    open_store().write(made[3])
    store = open_store()
    read: list[tuple[int, float]] = []
    store.reader.record_read = lambda n_bytes, seconds: read.append((n_bytes, seconds))
    again = conversation(3, turns=4)  # evaluated anew in this process
    for n_turns in (1, 3, 4):
        base = again[n_turns - 1]
        found = opened(store, made[3], Snapshot(base.prefix, base.segment, State()))
        check_equal(found, made[3])
        assert list(found.chain)[4 - n_turns :] == list(base.chain)
        del found  # the reader shares its segments as long as they are alive
        gc.collect()
    fresh = [500 + n * (20 * ROW + 20 * 4) for n in (3, 1, 0)]
    assert [n_bytes for n_bytes, _ in read] == fresh, (
        "the state, and the rows behind those in memory"
    )
    assert all(seconds > 0 for _, seconds in read)


def test_what_was_read_hangs_on_its_file_when_it_is_written_again(
    open_store: Opener, tmp_path: Path
) -> None:
    made = conversation(4, turns=3)
    store = open_store()
    store.write(made[2])
    base = conversation(4, turns=1)[0]
    found = opened(open_store(), made[2], base)
    deeper = snapshot(segment(range(7), found.segment))
    before = set(tmp_path.rglob("*.rows"))
    store.write(deeper)
    assert len(set(tmp_path.rglob("*.rows")) - before) == 1
    check_read(store, deeper)
    check_directory(store)


def test_what_leaves_ram_takes_no_place_from_what_is_worth_more(open_store: Opener) -> None:
    """A snapshot that RAM evicts displaces only files of less value, while one that the policy
    selected displaces any. Otherwise a wave of evictions would empty the disk cache.
    """
    store = open_store()
    valuable, (cheap,) = conversation(1, turns=1)[0], conversation(2, turns=1)
    store.write(valuable)
    for _ in range(5):
        store.touch(valuable.prefix)
    store.directory.budget = store.directory.n_bytes + 100
    cheap.used -= 1e6
    assert store.write(cheap, spilled=True) == 0
    assert store.contains(valuable.prefix)
    assert store.write(cheap) > 0, "as what was chosen does"
    assert not store.contains(valuable.prefix)
    store.directory.remove(cheap.prefix.name)
    store.write(valuable)
    with store.directory.changing() as transaction:
        transaction.connection.execute("UPDATE files SET used = used - 1e7, hits = 0")
        transaction.discard_graph()
    cheap.used += 1e6
    assert store.write(cheap, spilled=True) > 0, (
        "what was used lately is worth more than what was not for long"
    )
    assert not store.contains(valuable.prefix)
    check_directory(store)


@pytest.mark.parametrize("daily", [None, 6000])
@pytest.mark.usefixtures("clock")
def test_a_day_has_room_for_some_only(open_store: Opener, daily: int | None) -> None:
    store = open_store(budget=None, daily_bytes=daily)
    budget = 4_000
    store.directory.budget = budget
    written = 0
    for seed in range(200):
        made = conversation(seed, turns=1)[0]
        written += store.write(made, spilled=True)
        check_directory(store)
    maximum = SPILLED_PER_DAY * budget if daily is None else daily // 2
    assert maximum - 3000 < written <= maximum + 200, "raw and stored bytes differ a little"
    assert store.write(conversation(999, turns=1)[0]) > 0, "what was chosen is still written"


def test_reading_is_estimated_from_sizes() -> None:
    assert BlockSizes(64, 10, 500).n_bytes(100, 40) == 1100
    assert BlockSizes(0, 0, -1).n_bytes(100, 40) == 0, "a state of no certain size"


def test_a_dropped_segment_is_not_written_as_empty(open_store: Opener) -> None:
    store = open_store()
    made = conversation(5)
    made[1].segment.rows = NOTHING
    made[1].segment.dropped = True
    assert store.write(made[2], spilled=True) == 0
    assert store.lengths() == set()
