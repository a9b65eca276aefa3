"""Conversations that the server keeps, and those that it drops."""

from __future__ import annotations

import pytest

from pyctl.errors import NotFoundError, RequestError
from pyctl.server.body import ByteAccount
from pyctl.server.stores import SHARE, ConversationStore


def said(store: ConversationStore, name: str) -> list[object]:
    return store.messages(name, ByteAccount())


def test_what_was_said_is_kept_in_order() -> None:
    store = ConversationStore()
    name = store.create(["a"], {"k": "v"})["id"]
    store.add(name, ["b", "c"])
    assert said(store, name) == ["a", "b", "c"]
    before = store.n_bytes
    store.change(name, {"k": "v" * 100})
    assert store.n_bytes == before + 99
    store.delete(name)
    assert store.n_bytes == 0
    store.add(name, ["d"])
    assert store.n_bytes == 0
    with pytest.raises(NotFoundError):
        said(store, name)


def test_the_one_that_was_used_least_recently_goes_whole() -> None:
    store = ConversationStore(SHARE * 2000)
    first, *others = (store.create(["x" * 1000], {})["id"] for _ in range(SHARE + 1))
    store.get(first)
    store.add(first, ["y" * 100])
    last = store.create(["x" * 1000], {})["id"]
    assert said(store, first) == ["x" * 1000, "y" * 100]
    assert said(store, last) == ["x" * 1000]
    with pytest.raises(NotFoundError):
        store.get(others[0])
    assert store.n_bytes <= SHARE * 2000


def test_one_that_outgrows_its_share_says_so_and_no_other_goes() -> None:
    store = ConversationStore(SHARE * 1000)
    other, name = store.create(["z"], {})["id"], store.create([], {})["id"]
    store.add(name, ["x" * 500])
    with pytest.raises(RequestError, match="more than 1000 bytes and cannot be continued"):
        said(store, name)
    assert said(store, other) == ["z"]
    with pytest.raises(RequestError, match="may have 1000 bytes"):
        store.create(["x" * 500], {})
    store.delete(name)


def test_metadata_have_a_bound_however_they_come() -> None:
    store = ConversationStore()
    large = {"k": "x" * (17 << 10)}
    name = store.create([], {})["id"]
    before = store.n_bytes
    with pytest.raises(RequestError, match="metadata"):
        store.change(name, large)
    with pytest.raises(RequestError, match="metadata"):
        store.create([], large)
    assert store.n_bytes == before
    assert store.get(name)["metadata"] == {}


def test_metadata_that_are_changed_hold_the_limit() -> None:
    store = ConversationStore(SHARE * 20_000)
    names = []
    for _ in range(2 * SHARE):
        names.append(store.create([], {})["id"])
        store.change(names[-1], {"k": "x" * 16_000})
        assert store.n_bytes <= SHARE * 20_000
    assert store.get(names[-1])
    with pytest.raises(NotFoundError):
        store.get(names[0])


def test_a_client_that_writes_much_loses_its_own() -> None:
    store = ConversationStore(SHARE * 2000)
    mine = store.create(["mine"], {}, owner="a")["id"]
    for _ in range(5 * SHARE):
        store.create(["x" * 1200], {}, owner="b")
    assert said(store, mine) == ["mine"]
