"""A store behind the disk: snapshots of one directory reach another, despite faults of the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyctl.cache.disk.behind import StoreBehind, connect
from pyctl.cache.disk.store import DiskStore
from pyctl.cache.snapshot import PromptMatch, Snapshot
from pyctl.errors import ConfigError
from tests.unit.cache.disk.making import check_directory, check_read, conversation, tokens_of
from tests.waiting import until

obstore = pytest.importorskip("obstore")

Opener = Callable[..., DiskStore]
Behind = Callable[..., StoreBehind]


class Faulty:
    """A client of an object store that can be told to fail, to hang, and to lie."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.n_got = 0

    def _pass(self) -> None:
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error

    def list(self, *args: Any) -> Any:
        self._pass()
        return self.client.list(*args)

    def get(self, *args: Any, **options: Any) -> Any:
        self.n_got += 1
        self._pass()
        return self.client.get(*args, **options)

    def put(self, *args: Any, **options: Any) -> Any:
        self._pass()
        return self.client.put(*args, **options)

    def delete(self, *args: Any) -> None:
        self._pass()
        self.client.delete(*args)


@pytest.fixture
def client() -> Faulty:
    return Faulty(connect("memory://"))


@pytest.fixture
def behind(client: Faulty) -> Iterator[Behind]:
    opened: list[StoreBehind] = []

    def get(store: DiskStore, **options: int) -> StoreBehind:
        opened.append(StoreBehind(client, "memory://", store.files, store.sizes, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield get
    client.gate.set()
    for each in opened:
        each.close(10)


def find(behind: StoreBehind, made: Snapshot) -> bool:
    behind.look_soon()
    return made.prefix in behind.find(PromptMatch(tokens_of(made)), made.n)


def fetch(behind: StoreBehind, made: Snapshot) -> None:
    until(lambda: find(behind, made))
    coming = behind.fetch(made.prefix)
    assert coming is not None
    until(coming.ready)


def sent(client: Faulty) -> dict[str, bytes]:
    names = [meta["path"] for chunk in client.client.list() for meta in chunk]
    return {name: bytes(client.client.get(name).bytes()) for name in names}


@pytest.fixture
def filled(open_store: Opener, behind: Behind, client: Faulty, tmp_path: Path) -> list[Snapshot]:
    """A conversation of which everything is in the store."""
    made = conversation(1)
    store = open_store(directory=tmp_path / "first")
    for each in made:
        store.write(each)
    first = behind(store)
    until(lambda: first.view().sent.n == len(made))
    files = {path.name for path in store.home.iterdir() if path.suffix in (".rows", ".state")}
    until(lambda: "model/hints" in sent(client))
    found = sent(client)
    assert {name.removeprefix("model/") for name in found} == {*files, "hints"}
    assert all(found[f"model/{file}"] == (store.home / file).read_bytes() for file in files)
    return made


def test_what_one_directory_has_comes_to_another(
    filled: list[Snapshot], open_store: Opener, behind: Behind, tmp_path: Path
) -> None:
    store = open_store(directory=tmp_path / "second")
    second = behind(store)
    until(lambda: find(second, filled[-1]))
    assert [prefix.n for prefix in second.find(PromptMatch(tokens_of(filled[-1])), 10**6)] == [20, 40, 60]
    assert second.seconds(filled[-1].prefix) > 0
    fetch(second, filled[-1])
    check_read(store, filled[-1])
    assert not find(second, filled[-1])
    fetch(second, filled[0])  # only its state: the rows are here
    check_read(store, filled[0])
    check_directory(store)
    assert second.view().fetched.n == 2
    assert second.view().sent.n == 0


def test_without_hints_headers_are_read(
    filled: list[Snapshot], open_store: Opener, behind: Behind, client: Faulty, tmp_path: Path
) -> None:
    client.client.put("model/hints", b"\xff\x00 lies\n" + b"60-" + b"0" * 32 + b".state exact nothing\n" * 9)
    store = open_store(directory=tmp_path / "second")
    second = behind(store)
    fetch(second, filled[-1])
    check_read(store, filled[-1])


def test_hints_that_lie_are_corrected_by_the_files(
    filled: list[Snapshot], open_store: Opener, behind: Behind, client: Faulty, tmp_path: Path
) -> None:
    lines = sent(client)["model/hints"].decode().splitlines()
    (top,) = [line for line in lines if line.startswith("60-")]
    (first,) = [line.split()[0] for line in lines if line.startswith("0-20-")]
    lies = [f"{top.split()[0]} exact {first}" if line == top else line for line in lines]
    client.client.put("model/hints", "\n".join(lies).encode())
    store = open_store(directory=tmp_path / "second")
    fetch(behind(store), filled[-1])
    check_read(store, filled[-1])


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "other", "empty"])
def test_damage_is_a_miss_and_not_fetched_again(
    damage: str, filled: list[Snapshot], open_store: Opener, behind: Behind, client: Faulty, tmp_path: Path
) -> None:
    found = sent(client)
    for name in [name for name in found if name.endswith(".rows") and "/40-" in name]:
        data = bytearray(found[name])
        data[len(data) // 2 :] = {
            "flip": bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
            "cut": data[len(data) // 2 : -3],
            "longer": data[len(data) // 2 :] + b"123",
            "other": next(bytes(found[each]) for each in found if "/20-" in each and each.endswith(".rows")),
            "empty": b"",
        }[damage]
        client.client.put(name, bytes(data))
    store = open_store(directory=tmp_path / "second")
    second = behind(store)
    fetch(second, filled[-1])
    assert not store.contains(filled[-1].prefix)
    n_got = client.n_got
    assert not find(second, filled[-1])
    fetch(second, filled[1])  # which does not need it
    check_read(store, filled[1])
    check_directory(store)
    assert client.n_got > n_got


def test_a_store_that_fails_is_left_alone_and_its_keys_stay_out_of_the_log(
    filled: list[Snapshot],
    open_store: Opener,
    behind: Behind,
    client: Faulty,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = open_store(directory=tmp_path / "second")
    second = behind(store)
    until(lambda: find(second, filled[-1]))
    client.error = OSError("http://key:secret@host/bucket: 503 Service Unavailable, AWSAccessKeyId=key")
    coming = second.fetch(filled[-1].prefix)
    assert coming is not None
    until(coming.ready)
    assert not find(second, filled[-1])
    assert second.fetch(filled[-1].prefix) is None
    assert second.view().is_away
    (line,) = [record.getMessage() for record in caplog.records if "kv store" in record.getMessage()]
    assert "503" in line
    assert not any(secret in line for secret in ("secret", "key:", "host", "=key"))
    client.error = None
    later = time.monotonic() + 30
    monkeypatch.setattr("pyctl.cache.disk.behind.time.monotonic", lambda: later)
    fetch(second, filled[-1])
    check_read(store, filled[-1])
    assert not second.view().is_away


def test_a_store_that_hangs_holds_up_nothing(
    filled: list[Snapshot], open_store: Opener, behind: Behind, client: Faulty, tmp_path: Path
) -> None:
    store = open_store(directory=tmp_path / "second")
    second = behind(store)
    until(lambda: find(second, filled[-1]))
    client.gate.clear()
    coming = second.fetch(filled[-1].prefix)
    assert coming is not None
    assert not coming.ready()
    assert coming.until(0.0).ready()
    assert second.fetch(filled[-1].prefix) is not None  # the same
    client.gate.set()
    until(coming.ready)
    check_read(store, filled[-1])


def test_the_budget(open_store: Opener, behind: Behind, tmp_path: Path) -> None:
    made = conversation(1)
    store = open_store(directory=tmp_path / "first")
    budget = sum(map(store.write, made)) - 1
    one = behind(store, budget=budget)
    until(lambda: one._seen is store.directory.contents)
    assert 0 < one.view().sent.n < len(made)
    assert one.view().sent.n_bytes <= budget


def test_the_bytes_of_a_day_count_over_restarts(
    open_store: Opener, behind: Behind, client: Faulty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for all that share a directory: what one has sent, another one may not send again."""
    now = 100.5 * 86_400
    monkeypatch.setattr(time, "time", lambda: now)
    made = conversation(1)
    store = open_store(directory=tmp_path / "first")
    limit = sum(map(store.write, made)) - 1
    counts = []
    for number in range(3):
        client.client = connect("memory://")  # empty, so that everything would have to be sent
        now += 86_400 * (number == 2)
        one = behind(store, daily_bytes=limit)
        until(lambda: one._seen is store.directory.contents)  # noqa: B023
        one.close(10)
        counts.append(one.view().sent.n)
        store.close()
        store = open_store(directory=tmp_path / "first")
    assert counts == [2, 0, 2]


def test_removed_snapshots_leave_the_store_too(
    filled: list[Snapshot], open_store: Opener, behind: Behind, client: Faulty, tmp_path: Path
) -> None:
    second = behind(open_store(directory=tmp_path / "second"))
    until(lambda: find(second, filled[-1]))
    assert second.remove(filled[-1].prefix.name)
    assert not second.remove("60-none")
    assert not [name for name in sent(client) if name.startswith("model/60-")]
    assert not find(second, filled[-1])


def test_addresses_that_cannot_be_used_are_not_repeated() -> None:
    with pytest.raises(ConfigError) as told:
        connect("ftp://name:secret@host/bucket")
    assert "secret" not in str(told.value)
    assert "host" not in str(told.value)
