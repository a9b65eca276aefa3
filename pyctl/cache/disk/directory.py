"""A cache directory as a whole: what it holds, pins, removal, and keeping index and files in agreement."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyctl.cache.disk.file_format import INDEX, StateName, parse
from pyctl.cache.disk.graph import FileGraph
from pyctl.cache.disk.index import Index, Record
from pyctl.cache.disk.segment_files import remove_file
from pyctl.cache.disk.verify import VerifyReport, verify
from pyctl.cache.snapshot import Prefix

__all__ = ["THREADS", "CacheDirectory", "Entry", "as_os_error"]

THREADS = min(16, os.cpu_count() or 1)


@dataclass(frozen=True)
class Entry:
    """A snapshot on disk. ``n_bytes`` is its state and the segment it ends in; times are epoch seconds.

    ``name`` is that of the Prefix, ``parent`` the name of the deepest shallower snapshot on its chain, "" for none.
    """

    fingerprint: str
    name: str
    n: int
    n_bytes: int
    created: float
    used: float
    hits: int
    pinned: bool
    exact: bool
    parent: str


class CacheDirectory:
    """All snapshots under ``directory``, of every fingerprint; made if it is not there.

    ``budget`` bounds the bytes of all files, None is no limit. Safe from any thread and several processes. OSError if
    the directory cannot be used.
    """

    def __init__(self, directory: Path, budget: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.budget = budget
        self._index = Index(directory / INDEX)
        self._readers = ThreadPoolExecutor(THREADS, "disk-read")

    def close(self) -> None:
        """Wait for what is running; nothing works afterwards."""
        self._readers.shutdown()
        self._index.close()

    @property
    def n_bytes(self) -> int:
        """Bytes of all files of the directory, every fingerprint."""
        try:
            with self._index.reading() as connection:
                return int(connection.execute("SELECT coalesce(sum(n_bytes), 0) FROM files").fetchone()[0])
        except (sqlite3.Error, OSError):
            return 0

    def pin(self, name: str, pinned: bool) -> bool:
        """Keep the snapshots called ``name`` from eviction, or stop to; False if there is none.

        A name is that of a Prefix, in any fingerprint, or ``<fingerprint>/<name>``.
        """
        self._restore_index()
        keys = [record.key for record in self._named(name)]
        for key in keys:
            self._change("UPDATE files SET pinned = ? WHERE fingerprint = ? AND file = ?", pinned, *key)
        return bool(keys)

    def remove(self, name: str) -> bool:
        """Remove the snapshots called ``name`` (as in `pin`), pinned or not; False if there is none."""
        self._restore_index()
        found = self._named(name)
        with as_os_error(), self._index.writing() as connection:
            graph = FileGraph(Index.records(connection))
            for record in found:
                self._delete(connection, graph.remove(record.key))
        return bool(found)

    def entries(self) -> list[Entry]:
        """Every snapshot of the directory, the last used first."""
        self._restore_index()
        graph = self._graph()
        states = [record for record in graph.records.values() if record.state]
        return [_entry(record, graph) for record in sorted(states, key=lambda record: -record.used)]

    def prune(self, budget: int) -> int:
        """Remove what is worth least until ``budget`` bytes or only pinned snapshots are left; returns bytes freed."""
        self._restore_index()
        with as_os_error(), self._index.writing() as connection:
            graph = FileGraph(Index.records(connection))
            before = graph.n_bytes
            while graph.n_bytes > budget and (key := graph.victim(time.time())) is not None:
                self._delete(connection, graph.remove(key))
        return before - graph.n_bytes

    def recover(self) -> VerifyReport:
        """Make index and files agree after a crash or a lost index, by names and headers only, within the budget.

        Removes temp files of dead processes, damaged headers and what nobody can use; adopts whole files.
        """
        return self._check(deep=False, fix=True)

    def verify(self, fix: bool = False) -> VerifyReport:
        """Compare index and files in both directions and read every byte; with ``fix``, put right what is wrong."""
        return self._check(deep=True, fix=fix)

    def _check(self, deep: bool, fix: bool) -> VerifyReport:
        with as_os_error():
            report = verify(self.directory, self._index, self._run if deep else None, fix)
        if fix:
            self._index.lost = False
            if self.budget is not None:
                self.prune(self.budget)
        return report

    def _restore_index(self) -> None:
        with as_os_error(), self._index.reading():
            pass
        if self._index.lost:
            self.recover()

    def _graph(self) -> FileGraph:
        with as_os_error(), self._index.reading() as connection:
            return FileGraph(Index.records(connection))

    def _named(self, name: str) -> list[Record]:
        fingerprint, _, short = name.rpartition("/")
        states = [record for record in self._graph().records.values() if record.state]
        return [r for r in states if _short(r.file) == short and fingerprint in ("", r.fingerprint)]

    def _change(self, query: str, *values: object) -> None:
        try:
            with self._index.writing() as connection:
                connection.execute(query, values)
        except (sqlite3.Error, OSError):
            return  # the use of a file, and no file: not worth an error

    def _delete(self, connection: sqlite3.Connection, records: Iterable[Record]) -> None:
        for record in records:
            Index.delete(connection, *record.key)
            remove_file(self.directory / record.fingerprint / record.file)

    def _run(self, jobs: Iterable[Callable[[], None]]) -> None:
        waiting = [self._readers.submit(job) for job in jobs]
        errors = [error for future in waiting if (error := future.exception()) is not None]
        if errors:
            raise errors[0]


def _entry(record: Record, graph: FileGraph) -> Entry:
    n_bytes = record.n_bytes + graph.records[record.fingerprint, record.parent].n_bytes
    below = graph.ancestor(record)
    parent = _short(below.file) if below is not None else ""
    r = record
    return Entry(r.fingerprint, _short(r.file), r.n, n_bytes, r.created, r.used, r.hits, r.pinned, r.exact, parent)


def _short(file: str) -> str:
    name = parse(file)
    return Prefix(name.digest, name.n).name if isinstance(name, StateName) else ""


@contextmanager
def as_os_error() -> Iterator[None]:
    """What SQLite cannot do is, for the caller, what the disk cannot do."""
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(f"the cache's index: {error}") from error
