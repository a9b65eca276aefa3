"""A cache directory: contents, pins, removal, and consistency of index and files."""

from __future__ import annotations

import errno
import glob
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pyctl.cache.ports import Entry
from pyctl.disk.file_format import (
    INDEX,
    MAX_NAME_BYTES,
    MODEL,
    OLDER,
    PROMPTS,
    QUARANTINE,
    REPLIES,
    StateName,
)
from pyctl.disk.graph import FileGraph
from pyctl.disk.index import Index, Record
from pyctl.disk.index_mirror import Contents, IndexMirror, read_graph
from pyctl.disk.readers import Readers
from pyctl.disk.transaction import Transaction
from pyctl.disk.verify import VerifiedFiles, is_fingerprint_dir, verify
from pyctl.files.atomic_file import files_in, has_locks, make_private, read_regular, write_atomic

__all__ = ["CacheDirectory", "find_users", "model_in", "record_model_name"]

THREADS = max(2, min(16, os.cpu_count() or 1))
"""Threads that read. One of them may look through a large directory for long."""


class CacheDirectory:
    """All snapshots under ``path``, of every fingerprint; made if it is not there.

    ``budget`` bounds the bytes of all files, None is no limit; ``readers`` read them. ``clock``
    gives the seconds since the epoch, None is the system's. Safe from any thread and
    several processes. OSError if the directory cannot be used. Only `contents` and
    `hide` never wait: for everything else the index is asked. `index_mirror` explains when it is
    read again.
    """

    def __init__(
        self,
        path: Path,
        budget: int | None = None,
        readers: Readers | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Open the directory at ``path``, which is made if there is none, within ``budget`` bytes;
        None for no limit. ``readers`` are the threads that read it, ``clock`` gives Unix seconds.
        Raises OSError if it cannot be used.
        """
        make_private(path)
        if not has_locks(path):
            # SQLite would wait for one, then report that another process has it.
            raise OSError(errno.ENOLCK, "its file system has no locks")
        self.path = path
        self.budget = budget
        self._index = Index(path / INDEX)
        self.clock = clock or time.time
        self._mirror = IndexMirror(path, self.clock)
        self.readers = readers or Readers(THREADS, "disk-read")
        self.refresh()

    def close(self) -> None:
        """Wait a moment for reads that run; nothing works afterwards."""
        self.readers.close()
        self._index.close()

    @property
    def contents(self) -> Contents:
        """The contents at the last look: another object after each change. Does not wait."""
        return self._mirror.contents

    @property
    def n_bytes(self) -> int:
        """Bytes of all files of the directory, every fingerprint."""
        self.refresh()
        return self.contents.n_bytes

    def refresh(self) -> None:
        """Let `contents` show the changes of other processes."""
        with suppress(sqlite3.Error, OSError):
            auxiliary_bytes = self.auxiliary_bytes()
            with self._index.idle() as connection:
                self._catch_up(connection, auxiliary_bytes)

    def hide(self, fingerprint: str, name: StateName) -> None:
        """Hide a damaged state from `contents` until the index is read again; does not wait."""
        self._mirror.hide(fingerprint, name)

    # -- for users
    # ----------------------------------------------------------------------------------

    def pin(self, name: str, pinned: bool) -> bool:
        """Keep the snapshots called ``name`` from eviction, or stop to; return False if there is
        none.

        A name is a Prefix's, in any fingerprint, or ``<fingerprint>/<name>``.
        """
        self.restore_index()
        records = self._named(name)
        with self.changing() as transaction:
            for record in records:
                transaction.pin(record.key, pinned)
        return bool(records)

    def remove(self, name: str) -> bool:
        """Remove the snapshots called ``name`` (as in `pin`), pinned or not; return False if there
        is none.
        """
        self.restore_index()
        records = self._named(name)
        with self.changing() as transaction:
            for record in records:
                transaction.delete(transaction.graph.remove(record.key))
        return bool(records)

    def entries(self) -> list[Entry]:
        """Return every snapshot of the directory, the last used first."""
        self.restore_index()
        with self.reading() as connection:
            graph = read_graph(connection, self.path, self.clock)
            labels = Index.labels(connection)
        entries = [
            _entry(graph.records[key], graph, labels.get(key, ""), n_bytes)
            for key, n_bytes in graph.added().items()
        ]
        return sorted(entries, key=lambda entry: entry.used, reverse=True)

    def prune(self, budget: int, *, dry_run: bool = False) -> int:
        """Remove the least valuable files until ``budget`` bytes or only pins are left; return the
        bytes freed, or with ``dry_run`` how many that would be.
        """
        self.restore_index()
        file_budget = budget - self.auxiliary_bytes()
        if dry_run:
            with self.reading() as connection:
                evicted = read_graph(connection, self.path, self.clock).shrink(file_budget)
            return sum(record.n_bytes for record in evicted)
        with self.changing() as transaction:
            return transaction.shrink(file_budget)

    def recover(self) -> VerifiedFiles:
        """Make index and files agree after a crash or a lost index, by names and headers only,
        within the budget.

        Removes temp files of dead processes, damaged headers and unusable files; adopts whole
        files.
        """
        return self._check(deep=False, fix=True)

    def verify(self, fix: bool = False) -> VerifiedFiles:
        """Compare index and files in both directions and read every byte; with ``fix``, repair
        them.
        """
        return self._check(deep=True, fix=fix)

    # -- for readers and writers
    # ----------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Read the index; OSError if SQLite fails."""
        with _as_os_error(), self._index.reading() as connection:
            yield connection

    @contextmanager
    def changing(self, *, is_shown: bool = True) -> Iterator[Transaction]:
        """Run a transaction on index and files that excludes every other process; OSError for what
        SQLite cannot do.

        Without ``is_shown``, `contents` stays the same object unless a file comes or goes.
        """
        # The outer hold keeps the mirror this thread's until it shows the transaction's changes.
        with _as_os_error(), self._index.idle():
            transaction = None
            try:
                with self._index.writing() as connection:
                    self._catch_up(connection, self.auxiliary_bytes())
                    transaction = Transaction(connection, self._mirror, self.path, self.clock)
                    yield transaction
                    file_bytes = transaction.file_bytes
            except BaseException:
                if transaction is not None:
                    transaction.restore_files()
                self._mirror.invalidate()
                raise
            transaction.remove_files()
            if is_shown or transaction.changes:
                self._mirror.apply(transaction.changes, file_bytes, self.auxiliary_bytes())

    def read_ahead(self) -> None:
        """Read the index for the next transaction, which then holds up others for less long."""
        with _as_os_error(), self._index.idle() as connection:
            self._catch_up(connection, self.auxiliary_bytes())
            self._mirror.load_graph(connection).build_tree()

    def restore_index(self) -> None:
        """Fill the index from the files if it was lost."""
        with self.reading():
            pass  # which opens it, and finds out
        if self._index.lost:
            self.recover()

    def auxiliary_bytes(self) -> int:
        """Return the bytes of recent prompts, replies and quarantined files, which also count
        towards the budget.
        """
        n_bytes = 0
        for folder in self.path.iterdir():
            if is_fingerprint_dir(folder):
                n_bytes += _size(folder / REPLIES) + _size(folder / f"{REPLIES}{OLDER}")
                n_bytes += sum(map(_size, files_in(folder / PROMPTS)))
                for case in files_in(folder / QUARANTINE):
                    n_bytes += sum(map(_size, files_in(case)))
        return n_bytes

    def _catch_up(self, connection: sqlite3.Connection, auxiliary_bytes: int) -> None:
        self._mirror.catch_up(connection, self._index.version(connection), auxiliary_bytes)

    def _check(self, deep: bool, fix: bool) -> VerifiedFiles:
        with _as_os_error():
            run = self.readers.run if deep else None
            report = verify(self.path, self.reading, self._repairing if fix else None, run)
        if fix:
            self._index.lost = False
            if self.budget is not None:
                self.prune(self.budget)
            self.refresh()
        return report

    @contextmanager
    def _repairing(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction that may change any row: everything is read again afterwards."""
        with self.changing(is_shown=False) as transaction:
            yield transaction.connection
            self._mirror.invalidate()

    def _named(self, name: str) -> list[Record]:
        """Return the records of the states called ``name``, as in `pin`."""
        fingerprint, _, short = name.rpartition("/")
        with self.reading() as connection:
            records = Index.records(connection)
        return [
            record
            for record in records
            if _short(record) == short and fingerprint in ("", record.fingerprint)
        ]


def record_model_name(directory: Path, fingerprint: str, name: str) -> None:
    """Keep the display name of the model of ``fingerprint``, for `model_in`. OSError if that cannot
    be.
    """
    write_atomic(directory / fingerprint / MODEL, name.encode(errors="replace"), sync=False)


def model_in(directory: Path, fingerprint: str) -> str:
    """Return the name of the model in the last server with ``fingerprint``; the fingerprint if
    unknown.
    """
    try:
        name = read_regular(directory / fingerprint / MODEL, MAX_NAME_BYTES)
    except OSError:
        return fingerprint
    return name.decode(errors="replace") or fingerprint


def find_users(directory: Path) -> list[str]:
    """Return the ids of other processes of this user that have ``directory`` open, if the system
    shows them (/proc).
    """
    pids = set[str]()
    for link in glob.glob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # one that was closed meanwhile
            if (directory / INDEX).samefile(link):
                pids.add(link.split("/")[2])
    return sorted(pids - {str(os.getpid())})


def _entry(record: Record, graph: FileGraph, label: str, n_bytes: int) -> Entry:
    ancestor = graph.ancestor(record)
    return Entry(
        fingerprint=record.fingerprint,
        name=_short(record),
        n=record.n,
        n_bytes=n_bytes,
        created=record.created,
        used=record.used,
        hits=record.hits,
        pinned=record.pinned,
        exact=record.exact,
        parent=_short(ancestor) if ancestor is not None else "",
        label=label,
        is_older=record.fingerprint in graph.older,
    )


def _short(record: Record) -> str:
    """Return the name of a state's prefix, "" for a segment."""
    return record.name.prefix.name if isinstance(record.name, StateName) else ""


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise OSError for errors of SQLite: to the caller, both mean that the disk cannot do it."""
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(f"the cache's index: {error}") from error
