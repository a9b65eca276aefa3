"""The mirror of the index: own changes show at once, those of others after a look."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyctl.disk.file_format import StateName
from tests.unit.disk.making import DirectStore, conversation

Opener = Callable[..., DirectStore]


def test_own_changes_show_without_a_look(open_store: Opener) -> None:
    store = open_store()
    first, second, _ = conversation(1)
    before = store.directory.contents
    store.write(first)
    assert store.directory.contents is not before
    assert store.lengths() == {20}
    store.write(second)
    store.directory.remove(first.prefix.name)
    assert store.lengths() == {40}
    assert store.directory.contents.n_bytes == store.directory.n_bytes


def test_changes_of_others_show_after_a_look_or_an_own_transaction(open_store: Opener) -> None:
    store = open_store()
    other = open_store()
    first, second, _ = conversation(1)
    other.write(first)
    assert store.lengths() == set()
    store.directory.refresh()
    assert store.lengths() == {20}
    other.write(second)
    store.touch(first.prefix)
    assert store.lengths() == {20, 40}
    with store.directory.changing() as transaction:
        assert len(transaction.graph.records) == 4


def test_a_look_without_changes_keeps_the_same_object(open_store: Opener) -> None:
    store = open_store()
    store.write(conversation(1)[0])
    before = store.directory.contents
    store.directory.refresh()
    store.directory.read_ahead()
    with store.directory.changing(is_shown=False):
        pass
    assert store.directory.contents is before
    (store.home / "replies").write_bytes(bytes(100))
    store.directory.refresh()
    assert store.directory.contents.auxiliary_bytes == 100
    assert store.directory.contents.states is before.states


def test_a_hidden_state_is_back_after_a_look(open_store: Opener) -> None:
    store = open_store()
    made = conversation(1)[0]
    store.write(made)
    store.directory.hide("model", StateName.from_prefix(made.prefix))
    assert not store.contains(made.prefix)
    assert store.lengths() == set()
    store.directory.refresh()
    assert store.contains(made.prefix)


def test_a_transaction_that_fails_changes_nothing_that_is_shown(open_store: Opener) -> None:
    store = open_store()
    made = conversation(1)[0]
    store.write(made)

    def fail() -> None:
        with store.directory.changing() as transaction:
            transaction.graph.remove(store.folder.key(StateName.from_prefix(made.prefix)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert store.contains(made.prefix)
    with store.directory.changing() as transaction:
        assert len(transaction.graph.records) == 2


def test_an_index_that_was_replaced_is_read_again(open_store: Opener) -> None:
    store = open_store()
    made = conversation(1)[0]
    store.write(made)
    for path in store.directory.path.glob("index.sqlite3*"):
        path.unlink()
    store.directory.refresh()
    assert store.lengths() == set()
    store.directory.restore_index()
    assert store.contains(made.prefix)
