"""The segments that snapshots share: each is counted once, from its first snapshot to its last."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.segment_pool import SegmentPool
from pyctl.cache.snapshot import NOTHING, Block, PromptMatch, Segment, Snapshot, State
from pyctl.prompt import as_tokens
from tests.unit.cache.fake_rows import FakeHeldRows, FakeWindow

N = 10
ROWS = 30
TOKENS = 4 * N
STATE = 100
SEGMENT = TOKENS + ROWS
"""Tokens of a segment, and bytes: of its rows, of its tokens, of a state, and of a segment."""


def following(parent: Segment | None = None) -> Segment:
    start = parent.end if parent is not None else 0
    return Segment(start, as_tokens(range(start, start + N)), np.zeros(ROWS, np.uint8), parent)


def at(segment: Segment, *window: Block) -> Snapshot:
    """Return the snapshot at the end of ``segment``."""
    tokens = as_tokens(range(segment.end))
    saved_window = FakeWindow(window) if window else None
    state = State.from_parts(np.zeros(STATE, np.uint8), window=saved_window)
    return Snapshot(PromptMatch(tokens).prefix(segment.end), segment, state)


def counted(snapshots: list[Snapshot]) -> int:
    """Return the bytes of ``snapshots``, by a plain count."""
    segments = set()
    for snapshot in snapshots:
        at: Segment | None = snapshot.segment
        while at is not None:
            segments.add(at)
            at = at.parent
    n_states = sum(snapshot.state.own_bytes for snapshot in snapshots)
    return n_states + sum(segment.n_bytes for segment in segments)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=10), st.data())
def test_bytes_are_those_of_a_plain_count(stems: list[int], data: st.DataObject) -> None:
    """The bytes that the pool adds and subtracts one by one equal a count over all its snapshots,
    and its forecasts of new and freed bytes come true. The last release leaves nothing.
    """
    pool = SegmentPool()
    made: list[Segment] = []
    held: list[Snapshot] = []
    for stem in stems:
        parent = made[stem - 1] if 0 < stem <= len(made) else None
        if parent is not None and parent.dropped:
            parent = None
        made.append(following(parent))
        snapshot = at(made[-1])
        n_new = pool.n_new(snapshot.segment) + STATE
        before = pool.n_bytes
        pool.add_reference(snapshot)
        held.append(snapshot)
        assert pool.n_bytes == before + n_new == counted(held)
        if data.draw(st.booleans()):
            gone = held.pop(data.draw(st.integers(0, len(held) - 1)))
            n_freed = pool.n_freed(gone)
            before = pool.n_bytes
            pool.release(gone)
            assert pool.n_bytes == before - n_freed == counted(held)
        assert all(pool.is_whole(each) for each in held)
    for snapshot in held:
        pool.release(snapshot)
    assert pool.n_bytes == 0
    assert list(pool) == []
    assert all(segment.dropped for segment in made)


def test_rows_are_dropped_with_their_last_snapshot_the_deepest_first() -> None:
    pool = SegmentPool()
    dropped: list[Segment] = []
    pool.on_drop = dropped.append
    first = following()
    second = following(first)
    shallow, deep = at(first), at(second)
    pool.add_reference(shallow)
    pool.add_reference(deep)
    pool.release(shallow)
    assert dropped == [], "the deep one needs its rows"
    assert first in pool
    pool.release(deep)
    assert dropped == [second, first]
    assert first not in pool


def test_a_snapshot_on_dropped_rows_is_not_whole() -> None:
    pool = SegmentPool()
    first = following()
    second = following(first)
    assert pool.is_whole(at(second))
    first.drop()
    assert not pool.is_whole(at(second))


def test_a_block_of_a_window_counts_once_however_many_states_have_it() -> None:
    pool = SegmentPool()
    shared = np.zeros(64, np.uint8)
    own = np.zeros(8, np.uint8)
    first = at(following(), shared)
    second = at(following(), shared, own)
    pool.add_reference(first)
    assert pool.n_new(None, [shared, own]) == 8
    pool.add_reference(second)
    assert pool.n_bytes == 2 * (SEGMENT + STATE) + 64 + 8
    assert pool.n_freed(first) == SEGMENT + STATE + 32, "half of the block"
    pool.release(first)
    assert pool.n_bytes == SEGMENT + STATE + 64 + 8
    pool.release(second)
    assert pool.n_bytes == 0


def test_rows_arrive_in_ram_and_leave_it_while_the_device_holds_them() -> None:
    pool = SegmentPool()
    segment = following()
    segment.rows = NOTHING
    segment.held = FakeHeldRows(N, ROWS)
    snapshot = at(segment)
    pool.add_reference(snapshot)
    assert pool.n_bytes == TOKENS + STATE
    assert pool.copies() == []
    pool.add_rows(segment, np.zeros(ROWS, np.uint8))
    assert pool.n_bytes == SEGMENT + STATE
    assert pool.copies() == [segment]
    assert pool.n_freed(snapshot, without_copies=True) == TOKENS + STATE
    pool.drop_ram_copy(segment)
    assert pool.n_bytes == TOKENS + STATE
    assert pool.n_shed == 1


def test_only_an_alive_segment_without_rows_takes_some() -> None:
    pool = SegmentPool()
    segment = following()
    with pytest.raises(ValueError, match="can be given some"):
        pool.add_rows(segment, np.zeros(ROWS, np.uint8))
    pool.add_reference(at(segment))
    with pytest.raises(ValueError, match="can be given some"):
        pool.add_rows(segment, np.zeros(ROWS, np.uint8))


def test_only_an_alive_segment_on_the_device_does_without_rows() -> None:
    pool = SegmentPool()
    segment = following()
    segment.held = FakeHeldRows(N, ROWS)
    with pytest.raises(ValueError, match="can do without"):
        pool.drop_ram_copy(segment)
    segment.held = None
    pool.add_reference(at(segment))
    with pytest.raises(ValueError, match="can do without"):
        pool.drop_ram_copy(segment)


def test_fixed_snapshots_need_room_for_all_rows_and_others_for_those_in_ram() -> None:
    segment = following()
    segment.rows = NOTHING
    segment.held = FakeHeldRows(N, ROWS)
    snapshot = at(segment)
    assert SegmentPool.n_needed([snapshot]) == SEGMENT + STATE
    assert SegmentPool.n_needed([], [snapshot]) == TOKENS + STATE
    assert SegmentPool.n_needed([snapshot], [snapshot]) == SEGMENT + STATE


def test_a_segment_to_come_needs_room_with_its_ancestors_and_its_window() -> None:
    first = following()
    second = following(first)
    block = np.zeros(16, np.uint8)
    assert SegmentPool.n_needed([], [], second, [block]) == 2 * SEGMENT + 16
    assert SegmentPool.n_needed([at(first)], [], second, [block]) == 2 * SEGMENT + STATE + 16
