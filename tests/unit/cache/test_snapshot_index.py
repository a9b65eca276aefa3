"""The index of snapshots: what it counts, and which snapshots may be evicted."""

from __future__ import annotations

from pyctl.cache.snapshot import Snapshot
from pyctl.cache.snapshot_index import SnapshotIndex
from tests.unit.cache.snapshots import n_bytes_of, snapshot


def filled() -> tuple[SnapshotIndex, Snapshot, Snapshot]:
    """Return an index of a snapshot and a deeper one that builds on it, and both."""
    index = SnapshotIndex()
    shallow = snapshot(1, 50)
    deep = snapshot(1, 100, shallow.segment)
    for made in (shallow, deep):
        index.pool.add_reference(made)
        index.add(made, used=0)
    return index, shallow, deep


def test_both_need_the_rows_that_they_share() -> None:
    index, shallow, deep = filled()
    assert set(index.needing(shallow.segment)) == {shallow, deep}
    assert index.needing(deep.segment) == [deep]
    assert list(index.by_prefix.values()) == [shallow, deep]


def test_shared_rows_stay_until_the_last_is_removed() -> None:
    index, shallow, deep = filled()
    index.remove(shallow)
    assert index.needing(shallow.segment) == [deep]
    assert not shallow.segment.dropped
    index.remove(deep)
    assert shallow.segment.dropped
    assert index.pool.n_bytes == 0
    assert not index.by_prefix


def test_a_removed_snapshot_is_not_pinned() -> None:
    index, shallow, deep = filled()
    index.pinned |= {shallow, deep}
    index.remove(deep)
    assert index.pinned == {shallow}


def test_pinned_and_locked_snapshots_are_not_evictable() -> None:
    index, shallow, deep = filled()
    index.pinned.add(shallow)
    assert not index.is_evictable(shallow)
    with index.locked(deep):
        assert not index.is_evictable(deep)
    assert index.is_evictable(deep)


def test_a_lock_ends_with_its_last_block() -> None:
    index, shallow, _ = filled()
    with index.locked(shallow):
        with index.locked(shallow):
            pass
        assert not index.is_evictable(shallow)
    assert index.is_evictable(shallow)
    assert not index.locks


def test_rows_of_pinned_and_retained_snapshots_are_fixed() -> None:
    index, shallow, deep = filled()
    assert not index.is_fixed(shallow.segment)
    index.pinned.add(deep)
    assert index.is_fixed(shallow.segment)
    other = snapshot(2, 10)
    index.retained.append(other)
    assert index.fixed() == [deep, other]
    assert index.is_fixed(other.segment)


def test_bytes_count_once() -> None:
    index, _, _ = filled()
    assert index.pool.n_bytes == n_bytes_of(50) + n_bytes_of(50)
