"""The drive of a simulated machine: calls that fail, and bytes that a power failure takes.

All calls for files below one directory pass here: `Drive.installed` replaces them in `os`, in
`sqlite3` and in the calls of atomic writes. Files are real, on the file system of the directory.

After a power failure a file has its bytes only if it was synced after its last write; else
they are cut, zero or there, by the seed. A name that was made, replaced or removed since the last
sync of its directory is either way, each by itself. The index has lost any number of transactions
of the end, since SQLite syncs its log only now and then.
"""

from __future__ import annotations

import errno
import os
import random
import secrets
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench.simulate.faults import SHORT, Faults
from pyctl.disk.file_format import INDEX
from pyctl.files.atomic_file import CALLS

GRAVES = "graves"
"""The folder of removed files whose removal is not durable yet."""

KEPT_INDEXES = 4
"""States of the index to which a power failure may go back."""

KEEP_INDEX_ONE_OF = 6
"""One of so many transactions leaves such a state."""

_connect = sqlite3.connect


class Process:
    """A process of the machine. The calls of a dead one fail."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.connections: list[sqlite3.Connection] = []

    def end(self) -> None:
        """End the transactions that the process has open, as SQLite does when it is gone. Its other
        files are closed as its calls return.
        """
        self.is_dead = True
        for connection in self.connections:
            with suppress(sqlite3.Error):
                sqlite3.Connection.rollback(connection)
            connection.close()


class Drive:
    """The files below ``root``, whose calls fail as ``faults`` decide.

    Attributes:
        process: The process that runs now; None for the simulation itself, whose calls succeed.
    """

    def __init__(self, root: Path, faults: Faults, rng: random.Random) -> None:
        self.root = root
        self.graves = root.parent / GRAVES
        self.graves.mkdir()
        self.process: Process | None = None
        self._prefix = f"{root}{os.sep}"
        self._faults = faults
        self._rng = rng
        self._unsynced: set[int] = set()  # inodes with bytes that are not durable
        self._durable: dict[str, dict[str, int]] = {}  # the inodes of durable names, by folder
        self._indexes: list[sqlite3.Connection] = []
        self._numbers = count()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let all code of this process make its calls for files here."""
        with ExitStack() as stack:
            for name in _REAL:
                stack.enter_context(patch.object(os, name, getattr(self, f"_{name}")))
            stack.enter_context(patch.object(sqlite3, "connect", self._connect))
            # Names of temp files, whose order decides what a power failure takes, follow the seed.
            stack.enter_context(patch.object(secrets, "token_hex", self._token_hex))
            for name in ("fsync", "replace"):
                stack.callback(object.__setattr__, CALLS, name, getattr(CALLS, name))
                object.__setattr__(CALLS, name, getattr(self, f"_{name}"))
            yield

    def _token_hex(self, n_bytes: int) -> str:
        """Return the next number in place of ``n_bytes`` random ones."""
        return f"{next(self._numbers):0{2 * n_bytes}x}"

    def _check(self, kind: str) -> int:
        """Return 0 or SHORT for a call of the running process. Raises OSError or KilledError."""
        if self.process is None:
            return 0
        if self.process.is_dead:
            raise OSError(errno.EIO, "the process is gone")
        number = self._faults.decide(kind)
        if number > 0:
            raise OSError(number, os.strerror(number))
        return number

    # -- the calls
    # ----------------------------------------------------------------------------------

    def _open(self, path: Any, flags: int, mode: int = 0o777, **others: Any) -> int:
        if not str(path).startswith(self._prefix):
            passed: int = _REAL["open"](path, flags, mode, **others)
            return passed
        creates = bool(flags & os.O_CREAT)
        self._check("create" if creates else "open")
        is_new = creates and not os.path.lexists(path)
        descriptor: int = _REAL["open"](path, flags, mode, **others)
        if is_new:
            self._unsynced.add(os.fstat(descriptor).st_ino)
        return descriptor

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        is_short = self._check("write") == SHORT
        if is_short and len(data) > 1:
            data = data[: self._rng.randrange(1, len(data))]
        self._unsynced.add(os.fstat(descriptor).st_ino)
        n: int = _REAL["pwrite"](descriptor, data, offset)
        return n

    def _pread(self, descriptor: int, n_bytes: int, offset: int) -> bytes:
        self._check("read")  # a header is read at once: a short read of it is a short file
        data: bytes = _REAL["pread"](descriptor, n_bytes, offset)
        return data

    def _preadv(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        is_short = self._check("read") == SHORT
        if is_short and len(buffers[0]) > 1:
            buffers = [buffers[0][: self._rng.randrange(1, len(buffers[0]))]]
        n: int = _REAL["preadv"](descriptor, buffers, offset)
        return n

    def _fsync(self, descriptor: int) -> None:
        self._check("sync")
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            folder = os.readlink(f"/proc/self/fd/{descriptor}")
            self._durable[folder] = _names_in(folder)
            self._clear_graves()
        else:
            self._unsynced.discard(status.st_ino)

    def _replace(self, source: Any, target: Any) -> None:
        if str(target).startswith(self._prefix):
            self._check("rename")
            self._bury(Path(target))
        _REAL["replace"](source, target)

    def _unlink(self, path: Any, **others: Any) -> None:
        if str(path).startswith(self._prefix):
            self._check("remove")
            self._bury(Path(path))
        _REAL["unlink"](path, **others)

    def _connect(self, database: Any, **others: Any) -> sqlite3.Connection:
        if not str(database).startswith(self._prefix) or self.process is None:
            passed: sqlite3.Connection = _connect(database, **others)
            return passed
        self._check("index")
        connection = _connect(database, factory=_Connection, **others)
        assert isinstance(connection, _Connection)
        connection.drive = self
        self.process.connections.append(connection)
        return connection

    def check_statement(self, statement: str) -> None:
        """Let a statement of the index fail, with an OperationalError as SQLite raises it."""
        try:
            self._check("index")
        except OSError as error:
            raise sqlite3.OperationalError(_SQLITE_ERRORS[error.errno or 0]) from None

    def keep_index(self, connection: sqlite3.Connection) -> None:
        """Keep the state of the index after a transaction, sometimes."""
        if self._rng.randrange(KEEP_INDEX_ONE_OF):
            return
        copy = _connect(":memory:")
        connection.backup(copy)
        self._indexes.append(copy)
        for old in self._indexes[:-KEPT_INDEXES]:
            old.close()
        del self._indexes[:-KEPT_INDEXES]

    # -- the power failure
    # ----------------------------------------------------------------------------------

    def lose_power(self) -> None:
        """Reduce the drive to the bytes that a power failure leaves. No process may run."""
        # Sorted: the order of a directory's entries differs from machine to machine.
        paths = sorted(self.root.rglob("*"))
        folders = [self.root, *(path for path in paths if path.is_dir())]
        for folder in folders:
            self._lose_names(str(folder))
        self._lose_index()
        for path in sorted(self.root.rglob("*")):
            if path.is_file() and not path.name.startswith(INDEX):
                self._lose_bytes(path)
        self._unsynced.clear()
        self._clear_graves()
        for folder in folders:
            self._durable[str(folder)] = _names_in(str(folder))

    def _lose_names(self, folder: str) -> None:
        durable = self._durable.get(folder, {})
        now = _names_in(folder)
        for name in sorted({*durable, *now}):
            if name.startswith(INDEX) or durable.get(name) == now.get(name):
                continue
            if self._rng.random() < 0.5:
                continue
            path = Path(folder, name)
            grave = self.graves / str(durable.get(name, 0))
            if name in now:
                path.unlink()
            if name in durable and grave.exists():
                os.link(grave, path)

    def _lose_bytes(self, path: Path) -> None:
        status = path.stat()
        if status.st_ino not in self._unsynced or not status.st_size:
            return
        fate = self._rng.choice(("there", "cut", "zero", "empty"))
        if fate == "cut":
            os.truncate(path, self._rng.randrange(status.st_size))
        elif fate == "zero":
            path.write_bytes(bytes(status.st_size))
        elif fate == "empty":
            os.truncate(path, 0)

    def _lose_index(self) -> None:
        """Take the index back to one of its last states."""
        if not self._indexes or self._rng.random() < 0.3:
            return
        kept = self._rng.choice(self._indexes)
        path = self.root / INDEX
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        with _connect(path) as restored:
            kept.backup(restored)
            restored.execute("PRAGMA journal_mode = WAL")
        restored.close()

    def _bury(self, path: Path) -> None:
        """Keep the bytes of a file whose name goes, as long as that is not durable."""
        with suppress(FileNotFoundError):
            inode = path.lstat().st_ino
            if self._durable.get(str(path.parent), {}).get(path.name) == inode:
                with suppress(FileExistsError):
                    os.link(path, self.graves / str(inode), follow_symlinks=False)

    def _clear_graves(self) -> None:
        for name in os.listdir(self.graves):
            _REAL["unlink"](self.graves / name)


class _Connection(sqlite3.Connection):
    """A connection whose statements are calls of the drive."""

    drive: Drive

    def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        if statement != "ROLLBACK":
            self.drive.check_statement(statement)
        cursor = super().execute(statement, *parameters)
        if statement == "COMMIT":
            self.drive.keep_index(self)
        return cursor


_SQLITE_ERRORS = {
    errno.EIO: "disk I/O error",
    errno.ENOSPC: "database or disk is full",
    errno.EBUSY: "database is locked",
}

_REAL: dict[str, Any] = {
    name: getattr(os, name)
    for name in ("open", "pwrite", "pread", "preadv", "fsync", "replace", "unlink")
}


def _names_in(folder: str) -> dict[str, int]:
    """Return the inodes of the files in ``folder`` by their names."""
    with os.scandir(folder) as entries:
        return {each.name: each.inode() for each in entries if each.is_file(follow_symlinks=False)}
