"""The writer of snapshots: whatever fails at whichever call, files, index and limits stay right."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.cache.snapshot import Prefix, Segment, Snapshot, State
from pyctl.disk.file_format import MAX_TOKENS
from pyctl.disk.index import Index
from pyctl.disk.writer import MAX_ATTEMPTS
from pyctl.errors import NotWrittenError
from pyctl.prompt import as_tokens
from tests.effort import examples
from tests.unit.disk.making import (
    DirectStore,
    check_directory,
    check_equal,
    check_read,
    conversation,
    on_disk,
)

Opener = Callable[..., DirectStore]

CALLS = ("pwrite", "fsync", "replace", "unlink")

FAILURES = st.fixed_dictionaries(
    {
        "call": st.sampled_from(CALLS),
        "after": st.integers(0, 6),
        "lasts": st.integers(1, 3),
        "number": st.sampled_from([errno.ENOSPC, errno.EIO, errno.EROFS]),
    }
)


@contextmanager
def failing(call: str, after: int, lasts: int, number: int) -> Iterator[None]:
    """Let ``lasts`` calls of `os` fail, ``after`` others have succeeded."""
    real = getattr(os, call)
    n_calls = 0

    def run(*args: object, **options: object) -> object:
        nonlocal n_calls
        n_calls += 1
        if after < n_calls <= after + lasts:
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    with patch.object(os, call, run):
        yield


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 3),  # a conversation
            st.integers(0, 2),  # its turn
            st.booleans(),  # whether it was evicted
            st.one_of(st.none(), FAILURES),
        ),
        min_size=1,
        max_size=8,
    ),
    budget=st.sampled_from([None, 6_000, 12_000]),
)
@settings(max_examples=examples(60), deadline=None)
def test_random_failures_leave_whole_snapshots_and_nothing_else(
    steps: list[tuple[int, int, bool, dict[str, int] | None]], budget: int | None
) -> None:
    """Also for a second store on the directory, which has not seen the failures."""
    made = [conversation(seed) for seed in range(4)]
    with tempfile.TemporaryDirectory() as name:
        store, other = (DirectStore(Path(name), budget=budget) for _ in range(2))
        for seed, turn, spilled, failure in steps:
            with suppress(OSError), failing(**failure) if failure is not None else nullcontext():
                store.write(made[seed][turn], spilled=spilled)
            assert not [path for path in on_disk(Path(name)) if path.suffix == ".tmp"]
            for each in (each for turns in made for each in turns):
                found = store.read(each.prefix, each.last_tokens(each.n))
                if found is not None:  # else a miss: it was evicted for one that then failed
                    check_equal(found, each)
        store.directory.recover()  # files whose removal failed
        other.directory.refresh()
        for each in (each for turns in made for each in turns):
            assert store.contains(each.prefix) == other.contains(each.prefix)
            if other.contains(each.prefix):
                check_read(other, each)
        check_directory(other)
        store.close()
        other.close()


def test_a_segment_is_written_each_time_that_its_rows_are_there(open_store: Opener) -> None:
    store = open_store()
    made = conversation(1)[-1]
    rows = [segment.rows for segment in made.chain]
    for segment in made.chain:
        segment.rows = np.empty(0, np.uint8)
    writing = store.writer.write(made)
    pairs = list(zip(made.chain, rows, strict=True))
    for n_written, (segment, block) in enumerate(reversed(pairs)):
        assert next(writing) is segment
        assert len(list(store.home.glob("*.tmp"))) == n_written
        segment.rows = block
    with pytest.raises(StopIteration):
        next(writing)
    check_read(store, made)
    check_directory(store)


def test_a_write_that_is_given_up_counts_for_the_day_and_leaves_no_file(
    open_store: Opener,
) -> None:
    store = open_store()
    writing = store.writer.write(conversation(1)[-1])
    next(writing)
    next(writing)
    (temp,) = store.home.glob("*.tmp")
    n_bytes = temp.stat().st_size
    writing.close()
    assert on_disk(store.directory.path) == []
    with store.directory.reading() as connection:
        assert Index.written_today(connection) == n_bytes


def test_segments_that_others_remove_meanwhile_are_written_again(open_store: Opener) -> None:
    store = open_store()
    other = open_store()
    first, second, _ = conversation(1)
    store.write(first)
    writing = store.writer.write(second)
    assert next(writing) is second.segment
    other.directory.remove(first.prefix.name)
    assert list(writing) == [first.segment, second.segment]
    check_read(store, second)
    check_directory(store)


def test_segments_that_are_removed_each_time_end_the_write(open_store: Opener) -> None:
    store = open_store()
    first, second, _ = conversation(1)
    store.write(first)
    writing = store.writer.write(second)

    def write_all() -> None:
        for n_yielded, segment in enumerate(writing):
            assert n_yielded < 2 * MAX_ATTEMPTS
            if segment is second.segment:
                store.directory.remove(first.prefix.name)
            else:
                store.write(first)

    with pytest.raises(NotWrittenError, match="other processes remove segments"):
        write_all()
    assert on_disk(store.directory.path) == []


def test_a_snapshot_that_is_removed_while_it_is_written_is_not_published(
    open_store: Opener,
) -> None:
    store = open_store()
    made = conversation(1)[0]
    writing = store.writer.write(made)
    next(writing)
    made.facts = type(made.facts)(for_disk=False)
    with pytest.raises(NotWrittenError, match="no longer selected"):
        next(writing)
    assert on_disk(store.directory.path) == []


def test_a_prefix_that_is_too_long_is_not_written(open_store: Opener) -> None:
    store = open_store()
    far = Segment(MAX_TOKENS, as_tokens([1]), np.zeros(48, np.uint8), None)
    made = Snapshot(Prefix(bytes(16), far.end), far, State.of(np.zeros(9, np.uint8)))
    assert store.write(made) == 0
    assert on_disk(store.directory.path) == []
