"""The reader: rows in memory and shared segments are not read, later ones wait for room."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pyctl.cache.pending_snapshot import PendingSnapshot
from pyctl.cache.reads import finish
from pyctl.cache.snapshot import Snapshot
from pyctl.errors import StateError
from tests.unit.disk.making import DirectStore, check_directory, check_equal, conversation

Opener = Callable[..., DirectStore]


def opened(store: DirectStore, made: Snapshot, max_bytes: int | None = None) -> PendingSnapshot:
    tokens = made.last_tokens(made.n)
    pending = finish(store.reader.open(made.prefix, tokens, max_bytes=max_bytes))
    assert pending is not None
    return pending


@pytest.fixture
def made(open_store: Opener) -> list[Snapshot]:
    made = conversation(1)
    store = open_store()
    for each in made:
        store.write(each)
    return made


def test_reads_beyond_the_bound_start_when_earlier_rows_are_freed(
    open_store: Opener, made: list[Snapshot]
) -> None:
    pending = opened(open_store(), made[-1], max_bytes=1)
    assert pending.is_large
    first, second, third = reversed(pending.snapshot.chain)
    assert [pending.has_begun(each) for each in (first, second, third)] == [True, False, False]
    finish(pending.rows(first))
    rows = first.rows.copy()
    pending.free_rows(first)
    assert [pending.has_begun(each) for each in (second, third)] == [True, False]
    whole = finish(pending.complete())
    assert not first.rows.size
    first.rows = rows
    check_equal(whole, made[-1])


def test_the_speed_is_measured_of_reads_without_a_wait(
    open_store: Opener, made: list[Snapshot]
) -> None:
    for max_bytes, n_expected in ((None, 1), (1, 0)):
        store = open_store()
        measured: list[int] = []
        store.reader.record_read = lambda n_bytes, seconds, to=measured: to.append(n_bytes)
        finish(opened(store, made[-1], max_bytes).complete())
        assert len(measured) == n_expected


def test_damage_that_shows_late_fails_the_pending_snapshot(
    open_store: Opener, made: list[Snapshot]
) -> None:
    store = open_store()
    (path,) = store.home.glob("40-60-*.rows")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    pending = opened(store, made[-1])
    with pytest.raises(StateError, match="wrong checksum"):
        finish(pending.complete())
    assert pending.is_lost
    assert store.reader.n_damaged == 1
    assert store.lengths() == {20, 40}
    check_directory(store)


def test_a_state_that_the_model_refuses_is_removed(
    open_store: Opener, made: list[Snapshot]
) -> None:
    store = open_store()
    removals: list[Callable[[], None]] = []
    store.reader.run_soon = removals.append
    store.reader.discard(made[-1].prefix)
    assert not store.contains(made[-1].prefix), "at once, although the file is still there"
    (remove,) = removals
    remove()
    assert not list(store.home.glob("60-*.state"))
    check_directory(store)


def test_a_lack_of_memory_is_no_damage(open_store: Opener, made: list[Snapshot]) -> None:
    def no_space(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        raise MemoryError

    store = open_store(space=no_space)
    tokens = made[-1].last_tokens(made[-1].n)
    assert finish(store.reader.open(made[-1].prefix, tokens)) is None
    assert store.reader.n_damaged == 0
    assert store.contains(made[-1].prefix)
