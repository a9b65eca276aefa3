"""A store behind the disk: snapshots of one directory reach another, despite faults of the
store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyctl.cache.snapshot import PromptMatch, Snapshot
from pyctl.disk.remote_store import PAUSE_SECONDS, RemoteStore, StoreLimits, connect
from pyctl.errors import ConfigError
from tests.unit.disk.making import DirectStore, check_directory, check_read, conversation
from tests.unit.engine.drive import ManualClock
from tests.waiting import until

pytest.importorskip("obstore")

Opener = Callable[..., DirectStore]
Remote = Callable[..., RemoteStore]


class Faulty:
    """A client of a store that can be told to fail and to hang."""

    def __init__(self) -> None:
        self.client: Any = connect("memory://")
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            assert self.gate.wait(60)
            if self.error is not None:
                raise self.error
            return getattr(self.client, name)(*args, **options)

        return call

    @property
    def objects(self) -> dict[str, bytes]:
        names = [meta["path"] for chunk in self.client.list() for meta in chunk]
        return {name: bytes(self.client.get(name).bytes()) for name in names}


@pytest.fixture
def client() -> Faulty:
    return Faulty()


@pytest.fixture
def store_clock() -> ManualClock:
    """Return the clock of all stores, on which no fetch is ever late."""
    return ManualClock()


@pytest.fixture
def remote(client: Faulty, store_clock: ManualClock) -> Iterator[Remote]:
    """Return a constructor of remote stores on ``client``; all of them are closed in the end."""
    opened: list[RemoteStore] = []

    def get(store: DirectStore, **limits: int) -> RemoteStore:
        opened.append(
            RemoteStore(
                client,  # type: ignore[arg-type]
                "memory://",
                store.writer,
                StoreLimits(**limits),
                store_clock,
            )
        )
        return opened[-1]

    yield get
    client.gate.set()
    for each in opened:
        each.close(10)


def found(remote: RemoteStore, made: Snapshot) -> list[int]:
    return [prefix.n for prefix, _ in remote.find(PromptMatch(made.last_tokens(made.n)), made.n)]


def fetch(remote: RemoteStore, made: Snapshot) -> None:
    until(lambda: made.n in found(remote, made))
    coming = remote.fetch(made.prefix)
    until(coming.ready)


@pytest.fixture
def filled(open_store: Opener, remote: Remote, client: Faulty, tmp_path: Path) -> list[Snapshot]:
    """Return a conversation of which everything is in the store: the files as they are on disk."""
    made = conversation(1)
    store = open_store(directory=tmp_path / "first")
    for each in made:
        store.write(each)
    first = remote(store)
    until(lambda: first.view().sent.n == len(made))
    files = {
        path.name: path.read_bytes()
        for path in store.home.iterdir()
        if path.suffix in (".rows", ".state")
    }
    assert client.objects == {f"model/{name}": data for name, data in files.items()}
    return made


@pytest.fixture
def second(open_store: Opener, tmp_path: Path) -> DirectStore:
    """Another directory."""
    return open_store(directory=tmp_path / "second")


@pytest.fixture
def store(filled: list[Snapshot], second: DirectStore, remote: Remote) -> RemoteStore:
    """Return the store behind that directory, which has found the conversation there."""
    store = remote(second)
    until(lambda: found(store, filled[-1]) == [20, 40, 60])
    return store


def test_what_one_directory_has_comes_to_another(
    filled: list[Snapshot], second: DirectStore, store: RemoteStore
) -> None:
    fetch(store, filled[-1])
    check_read(second, filled[-1])
    assert found(store, filled[-1]) == [20, 40]
    fetch(store, filled[0])  # only its state: the rows are here
    check_read(second, filled[0])
    check_directory(second)
    view = store.view()
    assert view.in_use == 3
    assert view.fetched.n == 2
    assert view.sent.n == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "other", "empty", "gone"])
def test_damage_is_a_miss_and_not_fetched_again(
    damage: str, filled: list[Snapshot], second: DirectStore, store: RemoteStore, client: Faulty
) -> None:
    """A damaged or missing object ends the chain before it, is not fetched a second time, and does
    not count as an outage. The snapshots that do not need it are still found.
    """
    objects = client.objects
    (name,) = [name for name in objects if name.endswith(".rows") and "/40-" in name]
    data = objects[name]
    at = len(objects[name]) // 2
    changed = {
        "flip": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
        "cut": data[:-3],
        "longer": data + b"123",
        "other": next(
            objects[each] for each in objects if "/20-" in each and each.endswith(".rows")
        ),
        "empty": b"",
    }
    client.client.put(name, changed[damage]) if damage in changed else client.client.delete(name)
    fetch(store, filled[-1])
    assert not second.contains(filled[-1].prefix)
    assert found(store, filled[-1]) == [20, 40]
    assert not store.view().is_away, "the store works"
    fetch(store, filled[1])  # which does not need it
    check_read(second, filled[1])
    check_directory(second)


def test_store_pauses_after_three_failures_without_logging_keys(
    filled: list[Snapshot],
    store: RemoteStore,
    client: Faulty,
    caplog: Any,
    store_clock: ManualClock,
) -> None:
    """A store that fails three times is not used for a while, so that requests do not wait for it,
    and then tried again. The log names the error without the URL, which holds credentials.
    """
    client.error = OSError(
        "http://key:secret@host/bucket: 503 Service Unavailable, AWSAccessKeyId=key"
    )
    for each in filled:
        assert not store.view().is_away
        fetch(store, each)
    assert store.view().is_away
    assert not found(store, filled[-1])
    client.error = None
    store_clock.advance(PAUSE_SECONDS)
    fetch(store, filled[-1])
    assert store.view().fetched.n == 1
    away, back = [each.getMessage() for each in caplog.records if "kv store" in each.getMessage()]
    assert away == "kv store: cannot be read (OSError, 503), serving without until it can"
    assert back == "kv store: it can be read again"


def test_a_store_that_cannot_be_written_is_read(
    filled: list[Snapshot],
    second: DirectStore,
    remote: Remote,
    client: Faulty,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A store whose uploads fail is marked and logged, but downloads go on: a read-only bucket is
    still of use.
    """
    other = conversation(2)
    for each in other:
        second.write(each)
    client.put = lambda *args, **options: 1 / 0
    store = remote(second)
    until(lambda: store.wake.set() or store.view().is_away)
    fetch(store, filled[-1])
    check_read(second, filled[-1])
    assert [
        each.getMessage() for each in caplog.records if "cannot be written" in each.getMessage()
    ]


def test_the_end_does_not_wait_for_a_store_that_hangs(
    filled: list[Snapshot], second: DirectStore, store: RemoteStore, client: Faulty
) -> None:
    client.gate.clear()
    fetches = [store.fetch(each.prefix) for each in filled]
    assert not any(each is None or each.ready() for each in fetches)
    assert store.fetch(filled[0].prefix) is fetches[0]
    store.close(10)
    assert all(each is not None and each.ready() for each in fetches)
    assert not client.gate.is_set()
    client.gate.set()
    until(lambda: not store.fetches)
    assert not second.lengths()


@pytest.mark.parametrize(("bound", "value"), [("max_fetches", 1), ("max_in_flight", 500)])
def test_what_is_on_its_way_is_bounded(
    bound: str,
    value: int,
    filled: list[Snapshot],
    second: DirectStore,
    remote: Remote,
    client: Faulty,
) -> None:
    store = remote(second, **{bound: value})
    until(lambda: found(store, filled[-1]) == [20, 40, 60])
    client.gate.clear()
    fetches = [store.fetch(each.prefix) for each in filled[:2]]
    assert [each is None for each in fetches] == [False, bound == "max_fetches"]
    client.gate.set()
    until(lambda: all(each is None or each.ready() for each in fetches))
    assert store.view().fetched.n == (bound == "max_fetches")


def test_no_more_than_so_many_objects_are_sent(
    second: DirectStore, remote: Remote, client: Faulty
) -> None:
    for each in conversation(1):
        second.write(each)
    store = remote(second, max_objects=4)
    until(lambda: store.has_sent_all)
    assert sum(name.endswith(".state") for name in client.objects) >= 1
    assert len(client.objects) <= 4


def test_removed_snapshots_leave_the_store_too(
    filled: list[Snapshot], store: RemoteStore, client: Faulty
) -> None:
    assert store.remove(filled[-1].prefix.name)
    assert not store.remove(filled[-1].prefix.name)
    assert not store.remove("60-none")
    until(lambda: not [name for name in client.objects if name.startswith("model/60-")])
    assert found(store, filled[-1]) == [20, 40]


def test_addresses_that_cannot_be_used_are_not_repeated() -> None:
    with pytest.raises(ConfigError) as told:
        connect("ftp://name:secret@host/bucket")
    assert "secret" not in str(told.value)
    assert "host" not in str(told.value)
