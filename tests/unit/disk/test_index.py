"""The index: its statements, and what becomes of a damaged, lost or older one."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pyctl.cache.snapshot import Snapshot
from pyctl.disk.file_format import (
    INDEX,
    SegmentName,
    StateName,
)
from pyctl.disk.index import Index, Record, is_corrupt
from tests.unit.disk.harm import HARM
from tests.unit.disk.making import (
    DirectStore,
    check_directory,
    check_read,
    conversation,
)
from tests.unit.engine.drive import ManualClock

Opener = Callable[..., DirectStore]


def test_an_index_of_an_older_version_is_read_and_stays_readable_for_it(
    store: DirectStore, made: list[Snapshot], open_store: Opener
) -> None:
    """An index without the column of labels is read with its pins and hits. The added column keeps
    the version, and an older pyctl can still insert rows.
    """
    store.directory.pin(made[0].prefix.name, True)
    store.touch(made[2].prefix)
    store.close()
    connection = sqlite3.connect(store.directory.path / INDEX)
    connection.execute("ALTER TABLE files DROP COLUMN label")
    connection.commit()
    connection.close()
    store = open_store()
    check_read(store, made[-1])
    entries = {entry.n: entry for entry in store.directory.entries()}
    assert entries[20].pinned is True
    assert entries[60].hits == 1
    assert entries[60].label == ""
    following = conversation(3, turns=4)[-1]
    assert store.write(following, "how it begins \ud800") > 0
    assert {entry.n: entry.label for entry in store.directory.entries()}[80] == "how it begins ?"
    columns = "fingerprint, file, n, n_bytes, needs, state, exact, created, used, hits, pinned"
    connection = sqlite3.connect(store.directory.path / INDEX)
    rows = connection.execute(f"SELECT {columns} FROM files").fetchall()
    connection.execute(
        f"INSERT OR REPLACE INTO files({columns}) VALUES({', '.join('?' * 11)})", rows[0]
    )
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    connection.close()


def garbage(path: Path) -> None:
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    path.write_bytes(os.urandom(10_000))


def other_schema(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE files(x)")
    connection.execute("PRAGMA user_version = 77")
    connection.close()


@pytest.mark.parametrize(
    "harm",
    [HARM["remove"], garbage, HARM["empty"], lambda path: os.truncate(path, 5000), other_schema],
)
@pytest.mark.parametrize("running", [False, True])
def test_lost_index_is_rebuilt(
    open_store: Opener, made: list[Snapshot], harm: Callable[[Path], None], running: bool
) -> None:
    """Harm to the index, under a running store or before its start, gives misses at worst, never a
    wrong snapshot or a damaged file. Recovery finds all snapshots again.
    """
    store = open_store()
    for each in made:
        store.write(each)
    if not running:
        store.close()
    harm(store.directory.path / INDEX)
    if not running:
        store = open_store()
    for each in made:
        found = store.read(each.prefix, each.last_tokens(each.n))
        assert (
            found is None
            or found.last_tokens(found.n).tolist() == each.last_tokens(each.n).tolist()
        )
    assert store.damaged == 0
    store.directory.recover()
    for each in made:
        check_read(store, each)
    check_directory(store)


def test_stale_index(store: DirectStore, made: list[Snapshot], open_store: Opener) -> None:
    store.close()
    home = store.directory.path / "model"
    (path,) = home.glob("20-40-*")
    path.unlink()
    store = open_store()
    assert store.write(made[-1]) == 0, "its own state is there"
    report = store.directory.recover()
    assert report.missing == [f"model/{path.name}"]
    assert store.lengths() == {20}
    check_directory(store)
    assert store.write(made[-1]) > 0
    check_read(store, made[-1])


# -- statements
# ----------------------------------------------------------------------------------

PARENT = SegmentName(0, 10, bytes(16), bytes(8))
ROWS = Record("f", PARENT, 40, None, True, 1.0, 1.0)
STATE = Record("f", StateName(10, bytes(16)), 100, PARENT, False, 2.0, 3.0, hits=4, pinned=True)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    made = Index(tmp_path / INDEX)
    yield made
    made.close()


def test_records_come_back_as_they_were_entered(index: Index) -> None:
    with index.writing() as connection:
        for record in (ROWS, STATE):
            Index.insert(connection, record)
    with index.reading() as connection:
        assert {record.key: record for record in Index.records(connection)} == {
            ROWS.key: ROWS,
            STATE.key: STATE,
        }
        assert Index.record(connection, STATE.key) == STATE
        assert Index.record(connection, ("other", STATE.name)) is None
        assert Index.n_bytes(connection) == 140


def test_states_are_listed_by_fingerprint(index: Index) -> None:
    with index.writing() as connection:
        for record in (ROWS, STATE, replace(STATE, fingerprint="g", exact=True)):
            Index.insert(connection, record)
        states, n_bytes = Index.states(connection)
    assert states == {"f": {STATE.name: False}, "g": {STATE.name: True}}
    assert n_bytes == 240


def test_a_use_a_pin_and_a_removal_change_one_record(index: Index) -> None:
    with index.writing() as connection:
        Index.insert(connection, ROWS)
        Index.insert(connection, STATE)
        Index.touch(connection, STATE.key, 50.0)
        Index.pin(connection, STATE.key, False)
        assert Index.record(connection, STATE.key) == replace(
            STATE, used=50.0, hits=5, pinned=False
        )
        Index.delete(connection, STATE.key)
        assert Index.records(connection) == [ROWS]


def test_labels_are_those_that_were_given(index: Index) -> None:
    with index.writing() as connection:
        Index.insert(connection, ROWS)
        Index.insert(connection, STATE, "how it begins")
        assert Index.labels(connection) == {STATE.key: "how it begins"}


def test_written_bytes_count_for_their_day_and_are_forgotten_after_a_month(
    index: Index, clock: ManualClock
) -> None:
    with index.writing() as connection:
        assert Index.written_today(connection) == 0
        Index.add_written(connection, 100)
        Index.add_written(connection, 20)
        assert Index.written_today(connection) == 120
        clock.advance(86_400)
        assert Index.written_today(connection) == 0
        clock.advance(40 * 86_400)
        Index.add_written(connection, 1)
        assert connection.execute("SELECT count(*) FROM days").fetchone() == (1,)


def test_a_transaction_that_fails_changes_nothing(index: Index) -> None:
    def fail() -> None:
        with index.writing() as connection:
            Index.insert(connection, ROWS)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with index.reading() as connection:
        assert Index.records(connection) == []


def test_the_version_changes_with_commits_of_others_alone(index: Index) -> None:
    other = Index(index.path)
    with index.idle() as connection:
        before = index.version(connection)
    with index.writing() as connection:
        Index.insert(connection, ROWS)
    with index.idle() as connection:
        assert index.version(connection) == before
    with other.writing() as connection:
        Index.insert(connection, STATE)
    with index.idle() as connection:
        assert index.version(connection) != before
    other.close()


def test_a_new_index_is_lost_until_it_is_filled(index: Index) -> None:
    assert index.lost
    other = Index(index.path)
    assert not other.lost
    other.close()


@pytest.mark.parametrize(
    ("error", "corrupt"),
    [
        (sqlite3.OperationalError("database is locked"), False),
        (sqlite3.OperationalError("database or disk is full"), False),
        (sqlite3.OperationalError("no such table: files"), True),
        (sqlite3.OperationalError("table files has no column named label"), True),
        (sqlite3.DatabaseError("file is not a database"), True),
        (sqlite3.InterfaceError("bad parameter"), False),
    ],
)
def test_an_index_is_lost_if_its_file_is_wrong_and_not_if_it_is_busy(
    error: sqlite3.Error, corrupt: bool
) -> None:
    assert is_corrupt(error) == corrupt


def test_a_record_names_the_file_that_it_continues() -> None:
    assert STATE.is_state
    assert STATE.n == 10
    assert STATE.parent_key == ROWS.key
    assert not ROWS.is_state
    assert ROWS.n == 10
    assert ROWS.parent_key is None
