"""Transactions: files, rows of the index and the graph change together."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from pyctl.disk.file_format import StateName
from pyctl.disk.index import Index, file_path
from tests.unit.disk.making import (
    DirectStore,
    check_directory,
    check_read,
    conversation,
    failing,
)
from tests.unit.engine.drive import ManualClock

Opener = Callable[..., DirectStore]


def test_shrinking_removes_files_and_rows(open_store: Opener) -> None:
    store = open_store()
    for made in conversation(1):
        store.write(made)
    with store.directory.changing() as transaction:
        n_before = transaction.file_bytes
        paths = [file_path(store.directory.path, key) for key in transaction.graph.records]
        freed = transaction.shrink(n_before - 1)
        assert transaction.file_bytes == n_before - freed
        assert Index.n_bytes(transaction.connection) == n_before - freed
        assert transaction.shrink(n_before) == 0
    assert 0 < freed < n_before
    assert sum(path.exists() for path in paths) < len(paths)
    check_directory(store)


def test_a_transaction_that_fails_keeps_the_files_that_it_removed(open_store: Opener) -> None:
    store = open_store()
    made = conversation(1)
    for each in made:
        store.write(each)

    def fail() -> None:
        with store.directory.changing() as transaction:
            transaction.shrink(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    for each in made:
        check_read(store, each)
    check_directory(store)


def test_an_eviction_that_the_drive_refuses_midway_evicts_nothing(open_store: Opener) -> None:
    store = open_store()
    made = conversation(1)
    for each in made:
        store.write(each)
    refused = failing("rename", after=2, lasts=1, number=errno.EIO)
    with refused, pytest.raises(OSError, match="Input/output"):
        store.directory.prune(0)
    for each in made:
        check_read(store, each)
    check_directory(store)


def test_hits_and_pins_are_in_the_index_and_the_graph(
    open_store: Opener, clock: ManualClock
) -> None:
    """A transaction changes the index and the graph in memory alike: evictions are chosen by the
    graph, and the next process reads the index.
    """
    store = open_store()
    made = conversation(1)[0]
    store.write(made)
    key = store.folder.key(StateName.from_prefix(made.prefix))
    clock.advance(60)
    with store.directory.changing() as transaction:
        assert transaction.graph.records[key].hits == 0
        transaction.touch(key)
        transaction.pin(key, True)
    with store.directory.changing() as transaction:
        record = Index.record(transaction.connection, key)
        assert transaction.graph.records[key] == record
    assert record is not None
    assert record.hits == 1
    assert record.pinned is True
    assert record.used == clock.now


def test_a_discarded_graph_is_read_again(open_store: Opener) -> None:
    store = open_store()
    made = conversation(1)[0]
    store.write(made)
    with store.directory.changing() as transaction:
        transaction.graph.remove(store.folder.key(StateName.from_prefix(made.prefix)))
        transaction.discard_graph()
        assert len(transaction.graph.records) == 2
    check_directory(store)
