from __future__ import annotations

import tracemalloc
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.errors import NotFoundError, RequestError
from pyctl.server.body import ByteAccount
from pyctl.server.http import encode
from pyctl.server.stores import SHARE, ResponseStore

ENTRY = 600
"""What a response costs beside its text."""


def test_many_small_messages_take_what_is_counted() -> None:
    store = ResponseStore(4 << 20)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(400):
        messages = [{"role": "user", "content": f"{number} {i}"} for i in range(500)]
        store.put({"id": f"resp_{number}", "output": [{"type": "message", "n": i} for i in range(100)]}, messages, None)
        del messages
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0 < len(store) < 400, "the limit was reached"
    assert 0.5 * taken < store.n_bytes <= 4 << 20
    assert taken <= 1.2 * (4 << 20)


def test_one_id_again_counts_once() -> None:
    store = ResponseStore()
    put(store, "a", text="x" * 1000)
    put(store, "a")
    put(store, "b")
    assert store.n_bytes < 2 * (ENTRY + 100)


def put(store: ResponseStore, name: str, parent: str | None = None, text: str = "") -> None:
    store.put({"id": name, "text": text}, [f"asked {name}", f"answered {name}"], parent)


def test_a_conversation_is_everything_since_its_beginning() -> None:
    store = ResponseStore()
    put(store, "a")
    put(store, "b", "a")
    put(store, "c", "b")
    put(store, "x", "a")
    assert said(store, "c") == [f"{did} {name}" for name in "abc" for did in ("asked", "answered")]
    assert said(store, "x") == [f"{did} {name}" for name in "ax" for did in ("asked", "answered")]
    assert store.get("b") == {"id": "b", "text": ""}


def said(store: ResponseStore, name: str) -> list[Any]:
    return store.conversation(name, ByteAccount())


def test_what_is_not_there_is_not_found() -> None:
    store = ResponseStore()
    for ask in (store.get, partial(said, store), store.delete):
        with pytest.raises(NotFoundError, match="'nothing'"):
            ask("nothing")


def test_the_end_of_a_conversation_goes_before_its_beginning() -> None:
    limit = SHARE * (4 * ENTRY + 100)
    store = ResponseStore(limit)
    put(store, "a", text="x" * 3 * ENTRY)
    put(store, "b", "a", text="x" * 3 * ENTRY)
    for i in range(SHARE - 2):
        put(store, f"other{i}", text="x" * 3 * ENTRY)
    assert limit - 4 * ENTRY < store.n_bytes <= limit
    assert store.get("a")
    put(store, "last", text="x" * 3 * ENTRY)
    assert store.get("a")
    with pytest.raises(NotFoundError):
        store.get("b")


def test_a_response_that_is_larger_than_its_share_is_not_kept_and_no_other_goes_for_it() -> None:
    store = ResponseStore(SHARE * (ENTRY + 200))
    put(store, "a")
    before = store.n_bytes
    put(store, "b", text="x" * 200)
    assert (len(store), store.n_bytes) == (1, before)


def test_a_client_that_writes_much_loses_its_own() -> None:
    store = ResponseStore(SHARE * 3 * ENTRY)
    for name in ("one", "two"):
        store.put({"id": name}, [], None, owner="a")
    for i in range(100):
        store.put({"id": f"much {i}", "text": "x" * ENTRY}, [], "much 0" if i % 2 else None, owner="b")
    assert store.get("one")
    assert store.get("two")
    assert len(store) > 6


def test_what_is_read_of_a_conversation_is_charged() -> None:
    store = ResponseStore()
    put(store, "a", text="x")
    store.put({"id": "b"}, ["y" * 1000], "a")
    with pytest.raises(RequestError, match="unpacks to more than 1000 bytes"):
        store.conversation("b", ByteAccount(1000))
    assert len(store.conversation("b", ByteAccount(1050))) == 3


def test_a_response_whose_parent_has_gone_is_not_kept() -> None:
    store = ResponseStore()
    put(store, "b", "gone")
    assert len(store) == 0


def test_a_deleted_response_stays_for_those_that_continue_it() -> None:
    store = ResponseStore()
    put(store, "a")
    put(store, "b", "a")
    store.delete("a")
    with pytest.raises(NotFoundError):
        store.get("a")
    assert said(store, "b")[0] == "asked a"
    store.delete("b")
    assert (len(store), store.n_bytes) == (0, 0)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "get", "conversation", "delete"]),
        st.integers(0, 9),
        st.none() | st.integers(0, 9),
        st.integers(0, 120),
    ),
    max_size=40,
)


@given(ACTIONS, st.integers(0, 5 * SHARE * ENTRY))
def test_bytes_are_bounded_and_everything_known_can_be_continued(actions: list[Any], limit: int) -> None:
    store = ResponseStore(limit)
    told: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for number, (action, target, parent, size) in enumerate(actions):
        names = list(told)
        if action == "put":
            at = names[parent % len(names)] if names and parent is not None else None
            name = f"r{number}"
            put(store, name, at, "x" * size)
            messages = [f"asked {name}", f"answered {name}"]
            told[name] = [*(told[at] if at else []), *messages]
            sizes[name] = len(encode({"id": name, "text": "x" * size})) + len(encode(messages)) + ENTRY
        elif names:
            try:
                ask = partial(said, store) if action == "conversation" else getattr(store, action)
                ask(names[target % len(names)])
            except NotFoundError:
                continue
        assert store.n_bytes <= limit
        for name in told:
            try:
                assert said(store, name) == told[name]
            except NotFoundError:
                continue
    assert store.n_bytes <= sum(sizes.values())
