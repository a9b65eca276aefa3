"""The index of a cache directory in SQLite: one row per file, shared by every process that uses the
directory.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from pyctl.disk.file_format import Name, SegmentName, StateName, parse
from pyctl.files.atomic_file import inode, open_private

__all__ = ["Index", "IndexVersion", "Key", "Record", "file_path", "is_corrupt"]

SCHEMA_VERSION = 1

BUSY_SECONDS = 10.0
"""Seconds that a transaction waits for another process; each lasts as long as some renames and
unlinks.
"""

DAYS_KEPT = 30
"""Days of which the written bytes are kept."""

OPEN_ATTEMPTS = 3
"""Attempts to open an index that another process is replacing."""

OPEN_PAUSE = 0.05
"""Seconds between two of them."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS files(
  fingerprint TEXT NOT NULL, file TEXT NOT NULL, n INTEGER NOT NULL, n_bytes INTEGER NOT NULL,
  needs TEXT NOT NULL, state INTEGER NOT NULL, exact INTEGER NOT NULL,
  created REAL NOT NULL, used REAL NOT NULL,
  hits INTEGER NOT NULL, pinned INTEGER NOT NULL, label TEXT NOT NULL DEFAULT '',
  PRIMARY KEY(fingerprint, file)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS states ON files(fingerprint, n) WHERE state;
CREATE TABLE IF NOT EXISTS days(day INTEGER PRIMARY KEY, n_bytes INTEGER NOT NULL);
"""

Key: TypeAlias = tuple[str, Name]
"""A fingerprint and a file's name."""


class IndexVersion(NamedTuple):
    """The version of an index from the view of one process.

    Attributes:
        n_opened: The number of connections that were opened for writing.
        data_version: `PRAGMA data_version` of the last of them.
    """

    n_opened: int
    data_version: int


@dataclass(frozen=True)
class Record:
    """A file in the index. Times are in seconds since the epoch.

    Attributes:
        fingerprint: The fingerprint of the model.
        name: The name of the file.
        n_bytes: The bytes of the file.
        parent: The segment that the file needs, None for none.
        exact: Whether all of it came from batches of a cold run.
        created: When it was written.
        used: When it was used last; for states only.
        hits: How many times it was used; for states only.
        pinned: Whether it is pinned; for states only.
    """

    fingerprint: str
    name: Name
    n_bytes: int
    parent: SegmentName | None
    exact: bool
    created: float
    used: float
    hits: int = 0
    pinned: bool = False

    @property
    def key(self) -> Key:
        """The name of the file among the files of all models."""
        return self.fingerprint, self.name

    @property
    def is_state(self) -> bool:
        """True if the file holds a state, not rows."""
        return isinstance(self.name, StateName)

    @property
    def n(self) -> int:
        """The position where a segment ends or a state is."""
        return self.name.n if isinstance(self.name, StateName) else self.name.end

    @property
    def parent_key(self) -> Key | None:
        """The key of the file that this file continues."""
        return None if self.parent is None else (self.fingerprint, self.parent)


_READ = "fingerprint, file, n_bytes, needs, exact, created, used, hits, pinned"
"""The columns of a `Record`, in the order of its fields."""

_WRITTEN = f"{_READ}, n, state, label"

_PLACEHOLDERS = ", ".join(f":{column}" for column in _WRITTEN.split(", "))

_INSERT = f"INSERT OR REPLACE INTO files({_WRITTEN}) VALUES({_PLACEHOLDERS})"


def is_corrupt(error: sqlite3.Error) -> bool:
    """Return whether ``error`` means that the index is lost, and not that it is busy or that the
    disk is full.
    """
    if isinstance(error, sqlite3.OperationalError):
        return any(text in str(error) for text in ("malformed", "no such", "has no column"))
    return isinstance(error, sqlite3.DatabaseError)


class Index:
    """Transactions on the file at ``path``. ``lost`` is set when it started empty, until it is
    filled.

    Safe from any thread. Reading never waits for a writer. OSError if the file cannot be opened;
    sqlite3.Error from transactions, after which a corrupt index was replaced by an empty one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = False
        self._reader = _Connection(self)
        self._writer = _Connection(self)
        with self._reader.lock:
            self._reader.current()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Hold the connection that reads."""
        with self._reader as connection:
            yield connection

    @contextmanager
    def idle(self) -> Iterator[sqlite3.Connection]:
        """Hold the connection that writes, while no thread of this process is in a transaction."""
        with self._writer as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction that excludes every other writer; commits at the end, rolls back on any
        exception.
        """
        with self._writer as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def version(self, connection: sqlite3.Connection) -> IndexVersion:
        """Return the version of the index, which ``connection``, the one that writes, has now.

        It changes with a commit of another connection, and when the file was replaced, but not with
        the caller's own transactions (https://www.sqlite.org/pragma.html, data_version).
        """
        row = connection.execute("PRAGMA data_version").fetchone()
        return IndexVersion(self._writer.n_opened, int(row[0]))

    def close(self) -> None:
        """Close both connections; nothing works afterwards."""
        for connection in (self._reader, self._writer):
            with connection.lock:
                connection.close()

    # -- statements
    # ----------------------------------------------------------------------------------

    @staticmethod
    def records(connection: sqlite3.Connection) -> list[Record]:
        """Return the records of all files of the directory."""
        return [_record(row) for row in connection.execute(f"SELECT {_READ} FROM files")]

    @staticmethod
    def states(connection: sqlite3.Connection) -> tuple[dict[str, dict[StateName, bool]], int]:
        """Return the states of each fingerprint and whether they are exact, and the bytes of all
        files.
        """
        states: dict[str, dict[StateName, bool]] = {}
        query = "SELECT fingerprint, file, exact FROM files WHERE state"
        for fingerprint, file, exact in connection.execute(query):
            name = _name(file)
            if isinstance(name, StateName):
                states.setdefault(fingerprint, {})[name] = bool(exact)
        return states, Index.n_bytes(connection)

    @staticmethod
    def n_bytes(connection: sqlite3.Connection) -> int:
        """Return the bytes of all files."""
        row = connection.execute("SELECT coalesce(sum(n_bytes), 0) FROM files").fetchone()
        return int(row[0])

    @staticmethod
    def record(connection: sqlite3.Connection, key: Key) -> Record | None:
        """Return the record of a file, None if the index has none."""
        query = f"SELECT {_READ} FROM files WHERE fingerprint = ? AND file = ?"
        row = connection.execute(query, _values(key)).fetchone()
        return None if row is None else _record(row)

    @staticmethod
    def insert(connection: sqlite3.Connection, record: Record, label: str = "") -> None:
        """Enter a file; ``label`` describes its content to users."""
        row = {
            "fingerprint": record.fingerprint,
            "file": str(record.name),
            "n_bytes": record.n_bytes,
            "needs": "" if record.parent is None else str(record.parent),
            "exact": record.exact,
            "created": record.created,
            "used": record.used,
            "hits": record.hits,
            "pinned": record.pinned,
            "n": record.n,
            "state": record.is_state,
            "label": label.encode("utf-8", "replace").decode(),
        }
        connection.execute(_INSERT, row)

    @staticmethod
    def delete(connection: sqlite3.Connection, key: Key) -> None:
        """Forget a file."""
        connection.execute("DELETE FROM files WHERE fingerprint = ? AND file = ?", _values(key))

    @staticmethod
    def touch(connection: sqlite3.Connection, key: Key, used: float) -> None:
        """Count a hit at ``used`` seconds since the epoch."""
        query = "UPDATE files SET hits = hits + 1, used = ? WHERE fingerprint = ? AND file = ?"
        connection.execute(query, (used, *_values(key)))

    @staticmethod
    def pin(connection: sqlite3.Connection, key: Key, pinned: bool) -> None:
        """Keep a file from being evicted, or let it be."""
        connection.execute(
            "UPDATE files SET pinned = ? WHERE fingerprint = ? AND file = ?",
            (pinned, *_values(key)),
        )

    @staticmethod
    def labels(connection: sqlite3.Connection) -> dict[Key, str]:
        """Return the known labels of files."""
        rows = connection.execute("SELECT fingerprint, file, label FROM files WHERE label != ''")
        return {(fingerprint, _name(file)): label for fingerprint, file, label in rows}

    @staticmethod
    def written_today(connection: sqlite3.Connection, now: float | None = None) -> int:
        """Return the bytes of files made since midnight UTC, by every process.

        ``now`` is in seconds since the epoch, None for the system's clock.
        """
        row = connection.execute("SELECT n_bytes FROM days WHERE day = ?", (_day(now),)).fetchone()
        return int(row[0]) if row else 0

    @staticmethod
    def add_written(connection: sqlite3.Connection, n_bytes: int, now: float | None = None) -> None:
        """Count bytes that were written on the day of ``now``, as in `written_today`; days older
        than a month are forgotten.
        """
        day = _day(now)
        connection.execute("DELETE FROM days WHERE day < ?", (day - DAYS_KEPT,))
        add = "n_bytes = n_bytes + excluded.n_bytes"
        query = f"INSERT INTO days VALUES(?, ?) ON CONFLICT(day) DO UPDATE SET {add}"
        connection.execute(query, (day, n_bytes))


class _Connection:
    """A connection to the file that is at the index's path now, even after another process replaced
    it. ``n_opened`` counts the files.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.path = index.path
        self.lock = threading.RLock()
        self.n_opened = 0
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
        """Return the open connection, or a new one if the file was replaced.

        OSError if there is no way to open one.
        """
        if self._connection is None or inode(self.path) != self._inode:
            self.close()
            self._connection = self._open()
            self._inode = inode(self.path)
            self.n_opened += 1
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _open(self) -> sqlite3.Connection:
        """Connect, in place of a corrupt file if need be."""
        for n_left in reversed(range(OPEN_ATTEMPTS)):
            try:
                return self._connect()
            except sqlite3.Error as error:
                if not n_left:
                    raise OSError(f"{self.path}: {error}") from error
                self._inode = inode(self.path)
                if is_corrupt(error):
                    self._discard()
                time.sleep(OPEN_PAUSE)
        raise AssertionError("the last attempt returns or raises")

    def _discard(self) -> None:
        """Remove the file, unless another process has put another one in its place."""
        self.close()
        if inode(self.path) == self._inode:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        self._inode = 0

    def _make_private(self) -> None:
        """Create the file with the mode that SQLite then gives its other files."""
        # An existing file is never opened here: closing a descriptor releases all POSIX locks of
        # the process on the file, SQLite's included (https://www.sqlite.org/howtocorrupt.html,
        # 2.2).
        with suppress(FileExistsError):
            os.close(open_private(self.path, os.O_RDWR | os.O_EXCL))

    def _connect(self) -> sqlite3.Connection:
        """Open the file and return the connection. Raises OSError for a path that is not a regular
        file, and sqlite3.Error for an index of another version or without its columns.

        The path is checked first, since SQLite would wait at a pipe. The journal mode is set before
        the tables are made: it cannot change within a transaction. The last query names every
        column that is written, so an index that lacks one fails here and not at its first use.
        """
        for suffix in ("", "-wal", "-shm", "-journal"):
            path = f"{self.path}{suffix}"
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(os.lstat(path).st_mode):  # SQLite would wait at a pipe
                    raise OSError(errno.EINVAL, "not a regular file", path)
        self._make_private()
        connection = sqlite3.connect(
            self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                raise sqlite3.DatabaseError(f"an index of version {version}")
            if version == 0:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.executescript(
                    f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
                )
                self.index.lost = True
            connection.execute("PRAGMA synchronous = NORMAL")
            _add_labels(connection)
            connection.execute(f"SELECT {_WRITTEN} FROM files LIMIT 1").fetchone()
        except BaseException:
            connection.close()
            raise
        return connection


def _add_labels(connection: sqlite3.Connection) -> None:
    """Add the column of labels, which earlier versions do without. Another process may add it at
    the same time.
    """
    if any(row[1] == "label" for row in connection.execute("PRAGMA table_info(files)")):
        return
    try:
        connection.execute("ALTER TABLE files ADD COLUMN label TEXT NOT NULL DEFAULT ''")
    except sqlite3.OperationalError as error:
        if "duplicate column" not in str(error):  # another process was faster
            raise


def _record(row: tuple[str, str, int, str, int, float, float, int, int]) -> Record:
    """Return the record of a row with the columns `_READ`; DatabaseError for invalid names."""
    fingerprint, file, n_bytes, needs, exact, created, used, hits, pinned = row
    parent = _name(needs) if needs else None
    if isinstance(parent, StateName):
        raise sqlite3.DatabaseError(f"{file} depends on {needs}")
    return Record(
        fingerprint,
        _name(file),
        n_bytes,
        parent,
        exact=bool(exact),
        created=created,
        used=used,
        hits=hits,
        pinned=bool(pinned),
    )


def _name(file: str) -> Name:
    """Raise DatabaseError, after which the index is rebuilt, for an invalid name."""
    name = parse(file)
    if name is None:
        raise sqlite3.DatabaseError(f"an entry called {file}")
    return name


def file_path(directory: Path, key: Key) -> Path:
    """Return the path of the file ``key`` in ``directory``."""
    fingerprint, name = key
    return directory / fingerprint / str(name)


def _values(key: Key) -> tuple[str, str]:
    return key[0], str(key[1])


def _day(now: float | None) -> int:
    """Return the number of a day (UTC) since the epoch; None is today."""
    return int((time.time() if now is None else now) // 86_400)
