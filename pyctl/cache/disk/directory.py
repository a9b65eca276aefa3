"""A cache directory: contents, pins, removal, and consistency of index and files."""

from __future__ import annotations

import errno
import glob
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from pyctl.atomic_file import files_in, has_locks, make_private, read_regular, write_atomic
from pyctl.cache.disk.file_format import (
    INDEX,
    MAX_NAME_BYTES,
    MODEL,
    OLDER,
    PROMPTS,
    REPLIES,
    RULES,
    StateName,
    rules_id,
)
from pyctl.cache.disk.graph import FileGraph
from pyctl.cache.disk.index import Index, Key, Record, Version
from pyctl.cache.disk.readers import Readers
from pyctl.cache.disk.segment_files import remove_file
from pyctl.cache.disk.verify import VerifyReport, is_home, verify
from pyctl.cache.ports import Entry

__all__ = ["CacheDirectory", "Contents", "is_older"]


THREADS = max(2, min(16, os.cpu_count() or 1))
"""One of them may look through a large directory for long."""


@dataclass(frozen=True)
class Contents:
    """The contents of a directory at the last look: its bytes, and by fingerprint the states and if
    they are exact.

    Immutable, so that readers never wait.
    """

    n_bytes: int = 0
    states: Mapping[str, Mapping[StateName, bool]] = field(default_factory=dict)
    lengths: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def of(self, fingerprint: str) -> Mapping[StateName, bool]:
        """The stored states of one fingerprint."""
        return self.states.get(fingerprint, _NONE)

    def changed(self, changes: Iterable[tuple[Record, bool]], n_bytes: int) -> Contents:
        """Return contents with files added (True) or removed (False)."""
        states: dict[str, dict[StateName, bool]] = {}
        for record, is_there in changes:
            if not isinstance(record.name, StateName):
                continue
            known = states.setdefault(record.fingerprint, dict(self.of(record.fingerprint)))
            if is_there:
                known[record.name] = record.exact
            else:
                known.pop(record.name, None)
        lengths = {other: frozenset(name.n for name in names) for other, names in states.items()}
        return Contents(n_bytes, {**self.states, **states}, {**self.lengths, **lengths})


_NONE: Mapping[StateName, bool] = MappingProxyType({})


class CacheDirectory:
    """All snapshots under ``path``, of every fingerprint; made if it is not there.

    ``budget`` bounds the bytes of all files, None is no limit. Safe from any thread and several
    processes. OSError if the directory cannot be used. Only `contents` and `forget` never wait: for
    everything else the index is asked.
    """

    def __init__(self, path: Path, budget: int | None = None) -> None:
        make_private(path)
        if not has_locks(
            path
        ):  # SQLite would wait for one, then report that another process has it
            raise OSError(errno.ENOLCK, "its file system has no locks")
        self.path = path
        self.budget = budget
        self.contents = Contents()
        self._looking = threading.Lock()  # a look at the index never replaces what a later one saw
        self._file_bytes = 0
        self._seen: tuple[sqlite3.Connection, int] | None = None
        # What the index holds at that version. Both belong to the thread in a transaction.
        self._graph: FileGraph | None = None
        self._graph_of: Version | None = None
        self._changes: list[tuple[Record, bool]] = []
        self._index = Index(path / INDEX)
        self.readers = Readers(THREADS, "disk-read")
        self.refresh()

    def close(self) -> None:
        """Wait a moment for reads that run; nothing works afterwards."""
        self.readers.close()
        self._index.close()

    @property
    def n_bytes(self) -> int:
        """Bytes of all files of the directory, every fingerprint."""
        self.refresh()
        return self.contents.n_bytes

    def refresh(self) -> None:
        """Let `contents` show the changes of this and other processes."""
        with self._looking:
            try:
                beside = self.bytes_beside()
                with self._index.reading() as connection:
                    seen = connection, Index.change(connection)
                    if seen != self._seen:
                        self._file_bytes, states = Index.states(connection)
                        lengths = {
                            other: frozenset(name.n for name in names)
                            for other, names in states.items()
                        }
                        self.contents = Contents(self._file_bytes + beside, states, lengths)
                        self._seen = seen
            except (sqlite3.Error, OSError):
                return
            if self.contents.n_bytes != self._file_bytes + beside:
                self.contents = replace(self.contents, n_bytes=self._file_bytes + beside)

    def forget(self, fingerprint: str, name: StateName) -> None:
        """Hide a state until the index is read again; does not wait."""
        old = self.contents
        states = {
            other: is_exact for other, is_exact in old.of(fingerprint).items() if other != name
        }
        lengths = frozenset(other.n for other in states)
        self.contents = Contents(
            old.n_bytes, {**old.states, fingerprint: states}, {**old.lengths, fingerprint: lengths}
        )
        self._seen = None  # a look in between is discarded: the next one reads everything

    # -- for people
    # ----------------------------------------------------------------------------------

    def pin(self, name: str, pinned: bool) -> bool:
        """Keep the snapshots called ``name`` from eviction, or stop to; False if there is none.

        A name is a Prefix's, in any fingerprint, or ``<fingerprint>/<name>``.
        """
        self.restore_index()
        found = self._named(name)
        with self.changing() as connection:
            for record in found:
                Index.pin(connection, record.key, pinned)
            self.reread()
        return bool(found)

    def remove(self, name: str) -> bool:
        """Remove the snapshots called ``name`` (as in `pin`), pinned or not; False if there is
        none.
        """
        self.restore_index()
        found = self._named(name)
        with self.changing() as connection:
            graph = self.graph(connection)
            for record in found:
                self.delete(connection, graph.remove(record.key))
        return bool(found)

    def entries(self) -> list[Entry]:
        """Every snapshot of the directory, the last used first."""
        self.restore_index()
        with self.reading() as connection:
            graph = self._graph_from(connection)
            labels = Index.labels(connection)
        sizes = sorted(graph.added().items(), key=lambda size: -graph.records[size[0]].used)
        return [
            _entry(graph.records[key], graph, labels.get(key, ""), n_bytes)
            for key, n_bytes in sizes
        ]

    def prune(self, budget: int, *, dry_run: bool = False) -> int:
        """Remove the least valuable files until ``budget`` bytes or only pins are left; returns
        bytes freed, or with ``dry_run`` how many that would be.
        """
        self.restore_index()
        if dry_run:
            with self.reading() as connection:
                going = self._graph_from(connection).shrink(budget - self.bytes_beside())
            return sum(record.n_bytes for record in going)
        with self.changing() as connection:
            return self.shrink(connection, budget)

    def recover(self) -> VerifyReport:
        """Make index and files agree after a crash or a lost index, by names and headers only,
        within the budget.

        Removes temp files of dead processes, damaged headers and unusable files; adopts whole
        files.
        """
        return self._check(deep=False, fix=True)

    def verify(self, fix: bool = False) -> VerifyReport:
        """Compare index and files in both directions and read every byte; with ``fix``, repair
        them.
        """
        return self._check(deep=True, fix=fix)

    # -- for a store
    # ----------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The index, to read; OSError if SQLite fails."""
        with _as_os_error(), self._index.reading() as connection:
            yield connection

    @contextmanager
    def changing(self, look: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction on index and files that excludes every other process; OSError for what
        SQLite cannot do.

        Without ``look``, because no file comes or goes, `contents` learns of it with the next one
        that does.
        """
        changes: list[tuple[Record, bool]] = []
        try:
            with _as_os_error(), self._index.writing() as connection:
                before = self._index.version(connection)
                if before != self._graph_of:
                    self._graph = None
                with self._index.reading() as reader:
                    is_known = self._seen == (reader, Index.change(reader))
                self._changes = changes
                yield connection
                self._graph_of = after = *before[:2], before[2] + 1
        except BaseException:
            self._graph = None
            raise
        if look and not (is_known and self._note(changes, after)):
            self.refresh()

    def graph(self, connection: sqlite3.Connection) -> FileGraph:
        """All files, within a transaction; who changes it changes the index and the files alike, or
        calls `reread`.
        """
        if self._graph is None:
            self._graph = self._graph_from(connection)
        return self._graph

    def _graph_from(self, connection: sqlite3.Connection) -> FileGraph:
        records = Index.records(connection)
        homes = {record.fingerprint for record in records}
        return FileGraph(records, frozenset(home for home in homes if is_older(self.path / home)))

    def look_ahead(self) -> None:
        """Read the index for the next transaction before it holds up others."""
        with _as_os_error(), self._index.between() as connection:
            version = self._index.version(connection)
            if self._graph is None or version != self._graph_of:
                self._graph = self._graph_from(connection)
                self._graph_of = version
                self._graph.prepare()

    def reread(self) -> None:
        """Within a transaction: let the next one look at all of the index."""
        self._graph = None

    def insert(self, connection: sqlite3.Connection, record: Record, label: str = "") -> None:
        """Enter a file."""
        Index.insert(connection, record, label)
        self._changes.append((record, True))

    def delete(self, connection: sqlite3.Connection, records: Iterable[Record]) -> None:
        """Remove files and their entries."""
        for record in records:
            Index.delete(connection, record.key)
            remove_file(self.file(record.key))
            self._changes.append((record, False))

    def touch(self, key: Key) -> None:
        """Count a hit of a state, now."""
        with self.changing() as connection:
            Index.touch(connection, key)
            if self._graph is not None:
                self._graph.touch(key, time.time())

    def _note(self, changes: list[tuple[Record, bool]], after: Version) -> bool:
        """Change `contents`, which was true before a transaction, as that has changed the index;
        False if there was another one since.
        """
        with self._looking:
            try:
                beside = self.bytes_beside()
                with _as_os_error(), self._index.reading() as reader:
                    seen = (reader, Index.change(reader))
                    n_bytes = Index.n_bytes(reader)
                with _as_os_error(), self._index.between() as connection:
                    if self._index.version(connection) != after:
                        return False
            except OSError:
                return False
            self._file_bytes = n_bytes
            self.contents = self.contents.changed(changes, n_bytes + beside)
            self._seen = seen
        return True

    def shrink(self, connection: sqlite3.Connection, budget: int) -> int:
        """Remove the least valuable files until no more than ``budget`` bytes are left; returns
        bytes freed.
        """
        beside = self.bytes_beside()
        if Index.n_bytes(connection) + beside <= budget:
            return 0
        going = self.graph(connection).shrink(budget - beside)
        self.delete(connection, going)
        return sum(record.n_bytes for record in going)

    def file(self, key: Key) -> Path:
        """Where the file ``key`` is."""
        return self.path / key[0] / str(key[1])

    def restore_index(self) -> None:
        """Fill the index from the files if it was lost."""
        with self.reading():
            pass
        if self._index.lost:
            self.recover()

    def bytes_beside(self) -> int:
        """Bytes of recent prompts and replies, which also count towards the budget."""
        n_bytes = 0
        for home in _homes(self.path):
            n_bytes += _size(home / REPLIES) + _size(home / f"{REPLIES}{OLDER}")
            n_bytes += sum(map(_size, files_in(home / PROMPTS)))
        return n_bytes

    def _check(self, deep: bool, fix: bool) -> VerifyReport:
        with _as_os_error():
            report = verify(self.path, self._index, self.readers.run if deep else None, fix)
        if fix:
            self._index.lost = False
            if self.budget is not None:
                self.prune(self.budget)
            self.refresh()
        return report

    def _named(self, name: str) -> list[Record]:
        fingerprint, _, short = name.rpartition("/")
        with self.reading() as connection:
            records = Index.records(connection)
        return [r for r in records if _short(r) == short and fingerprint in ("", r.fingerprint)]


def note_model(directory: Path, fingerprint: str, name: str) -> None:
    """Keep what people call the model of ``fingerprint``, for `model_in`. OSError if that cannot
    be.
    """
    write_atomic(directory / fingerprint / MODEL, name.encode(errors="replace"), sync=False)


def model_in(directory: Path, fingerprint: str) -> str:
    """The name of the model in the last server with ``fingerprint``; the fingerprint if unknown."""
    try:
        return (
            read_regular(directory / fingerprint / MODEL, MAX_NAME_BYTES).decode(errors="replace")
            or fingerprint
        )
    except OSError:
        return fingerprint


def users_of(directory: Path) -> list[str]:
    """The ids of other processes of this user that have ``directory`` open, if the system shows
    them (/proc).
    """
    found = set[str]()
    for each in glob.glob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # one that was closed meanwhile
            if (directory / INDEX).samefile(each):
                found.add(each.split("/")[2])
    return sorted(found - {str(os.getpid())})


def is_older(home: Path) -> bool:
    """Whether the files in ``home`` were made under other rules of batch ends than this
    program's.
    """
    try:
        return read_regular(home / RULES, MAX_NAME_BYTES) != rules_id().encode()
    except OSError:
        return True


def _entry(record: Record, graph: FileGraph, label: str, n_bytes: int) -> Entry:
    r = record
    ancestor = graph.ancestor(record)
    parent = _short(ancestor) if ancestor is not None else ""
    facts = (
        r.created,
        r.used,
        r.hits,
        r.pinned,
        r.exact,
        parent,
        label,
        r.fingerprint in graph.older,
    )
    return Entry(r.fingerprint, _short(r), r.n, n_bytes, *facts)


def _short(record: Record) -> str:
    return record.name.prefix.name if isinstance(record.name, StateName) else ""


def _homes(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if is_home(path)]


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


@contextmanager
def _as_os_error() -> Iterator[None]:
    """What SQLite cannot do is, for the caller, what the disk cannot do."""
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(f"the cache's index: {error}") from error
