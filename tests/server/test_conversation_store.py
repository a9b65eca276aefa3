"""Conversations that are kept at the server, and those that have to go."""

from __future__ import annotations

import pytest

from pyctl.errors import NotFoundError
from pyctl.server.conversation_store import ConversationStore


def test_what_was_said_is_kept_in_order() -> None:
    store = ConversationStore()
    name = store.create(["a"], {"k": "v"})["id"]
    store.add(name, ["b", "c"])
    assert store.messages(name) == ["a", "b", "c"]
    before = store.n_bytes
    store.change(name, {"k": "v" * 100})
    assert store.n_bytes == before + 99
    store.delete(name)
    assert store.n_bytes == 0
    store.add(name, ["d"])
    assert store.n_bytes == 0
    with pytest.raises(NotFoundError):
        store.messages(name)


def test_the_one_that_was_used_least_recently_goes_whole() -> None:
    store = ConversationStore(5000)
    first, second = (store.create([], {})["id"] for _ in range(2))
    store.add(first, ["x" * 1000])
    store.add(second, ["x" * 1000])
    store.get(first)
    store.add(first, ["y" * 2000])
    assert store.messages(first) == ["x" * 1000, "y" * 2000]
    with pytest.raises(NotFoundError):
        store.get(second)
    assert store.n_bytes < 5000


def test_one_that_outgrows_the_limit_goes() -> None:
    store = ConversationStore(5000)
    name = store.create([], {})["id"]
    store.add(name, ["x" * 6000])
    assert store.n_bytes == 0
    with pytest.raises(NotFoundError):
        store.get(name)
