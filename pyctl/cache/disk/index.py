"""The index of a cache directory in SQLite: one row per file, shared by every process that uses the directory."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path

__all__ = ["Index", "Record", "is_corrupt"]

SCHEMA_VERSION = 1

BUSY_SECONDS = 10.0
"""How long a transaction waits for another process; each lasts as long as some renames and unlinks."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS files(
  fingerprint TEXT NOT NULL, file TEXT NOT NULL, n INTEGER NOT NULL, n_bytes INTEGER NOT NULL, needs TEXT NOT NULL,
  state INTEGER NOT NULL, exact INTEGER NOT NULL, created REAL NOT NULL, used REAL NOT NULL,
  hits INTEGER NOT NULL, pinned INTEGER NOT NULL, PRIMARY KEY(fingerprint, file)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS states ON files(fingerprint, n) WHERE state;
CREATE TABLE IF NOT EXISTS days(day INTEGER PRIMARY KEY, n_bytes INTEGER NOT NULL);
"""


@dataclass(frozen=True)
class Record:
    """A file in the index. ``n`` is where a segment ends or a state is, ``parent`` the file it hangs on or "".

    ``created`` and ``used`` are epoch seconds; ``hits``, ``used`` and ``pinned`` mean something for states only.
    """

    fingerprint: str
    file: str
    n: int
    n_bytes: int
    parent: str
    state: bool
    exact: bool
    created: float
    used: float
    hits: int = 0
    pinned: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.fingerprint, self.file


_COLUMNS = ", ".join({"parent": "needs"}.get(field.name, field.name) for field in fields(Record))
_INSERT = f"INSERT OR REPLACE INTO files({_COLUMNS}) VALUES({', '.join('?' for _ in fields(Record))})"


def is_corrupt(error: sqlite3.Error) -> bool:
    """Whether ``error`` means that the index is lost, and not that it is busy or that the disk is full."""
    if isinstance(error, sqlite3.OperationalError):
        return any(text in str(error) for text in ("malformed", "no such", "has no column"))
    return isinstance(error, sqlite3.DatabaseError)


class Index:
    """Transactions on the file at ``path``. ``lost`` is set when it began empty, until somebody filled it.

    Safe from any thread. Reading never waits for a writer. OSError if the file cannot be opened; sqlite3.Error from
    transactions, after which a corrupt index was replaced by an empty one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = False
        self._reader, self._writer = _Connection(self), _Connection(self)
        with self._reader.lock:
            self._reader.current()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection to ask."""
        with self._reader as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that excludes every other writer; commits at the end, rolls back on any exception."""
        with self._writer as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        for connection in (self._reader, self._writer):
            with connection.lock:
                connection.close()

    # -- statements --------------------------------------------------------------------------------------------------

    @staticmethod
    def records(connection: sqlite3.Connection) -> list[Record]:
        """Every file of the directory."""
        return [_record(row) for row in connection.execute(f"SELECT {_COLUMNS} FROM files")]

    @staticmethod
    def record(connection: sqlite3.Connection, fingerprint: str, file: str) -> Record | None:
        query = f"SELECT {_COLUMNS} FROM files WHERE fingerprint = ? AND file = ?"
        row = connection.execute(query, (fingerprint, file)).fetchone()
        return None if row is None else _record(row)

    @staticmethod
    def insert(connection: sqlite3.Connection, record: Record) -> None:
        connection.execute(_INSERT, astuple(record))

    @staticmethod
    def delete(connection: sqlite3.Connection, fingerprint: str, file: str) -> None:
        connection.execute("DELETE FROM files WHERE fingerprint = ? AND file = ?", (fingerprint, file))

    @staticmethod
    def written_today(connection: sqlite3.Connection) -> int:
        """Bytes of files made since midnight UTC, by every process."""
        row = connection.execute("SELECT n_bytes FROM days WHERE day = ?", (_today(),)).fetchone()
        return int(row[0]) if row else 0

    @staticmethod
    def add_written(connection: sqlite3.Connection, n_bytes: int) -> None:
        connection.execute("DELETE FROM days WHERE day < ?", (_today() - 30,))
        query = "INSERT INTO days VALUES(?, ?) ON CONFLICT(day) DO UPDATE SET n_bytes = n_bytes + excluded.n_bytes"
        connection.execute(query, (_today(), n_bytes))


class _Connection:
    """One connection to the file that is at the index's path now, even after somebody replaced it."""

    def __init__(self, index: Index) -> None:
        self.index, self.path = index, index.path
        self.lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._inode = 0

    def __enter__(self) -> sqlite3.Connection:
        self.lock.acquire()
        try:
            return self.current()
        except BaseException:
            self.lock.release()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, sqlite3.Error) and is_corrupt(error):
                self._discard()
        finally:
            self.lock.release()

    def current(self) -> sqlite3.Connection:
        """OSError if there is no way to open one."""
        if self._connection is not None and _inode(self.path) == self._inode:
            return self._connection
        self.close()
        for attempt in range(3):
            try:
                self._connection = self._connect()
                break
            except sqlite3.Error as error:
                if attempt == 2:
                    raise OSError(f"{self.path}: {error}") from error
                self._inode = _inode(self.path)
                if is_corrupt(error):
                    self._discard()
                time.sleep(0.05)
        self._inode = _inode(self.path)
        assert self._connection is not None
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _discard(self) -> None:
        self.close()
        if _inode(self.path) == self._inode:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                raise sqlite3.DatabaseError(f"an index of version {version}")
            if version == 0:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
                self.index.lost = True
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute(f"SELECT {_COLUMNS} FROM files LIMIT 1").fetchone()
        except BaseException:
            connection.close()
            raise
        return connection


def _record(row: tuple[str, str, int, int, str, int, int, float, float, int, int]) -> Record:
    fingerprint, file, n, n_bytes, parent, state, exact, created, used, hits, pinned = row
    return Record(fingerprint, file, n, n_bytes, parent, bool(state), bool(exact), created, used, hits, bool(pinned))


def _today() -> int:
    return int(time.time() // 86_400)


def _inode(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0
