"""The contents of a directory's index in memory, and the check whether they are still current.

Two things are kept between transactions, so that neither a lookup nor a write reads the whole
index: `Contents`, the stored states by fingerprint, for lookups on any thread, and the `FileGraph`,
all files with their dependencies, for writers.

SQLite gives each connection a number, `PRAGMA data_version`, that changes when another connection
has committed. All changes of this process go through one connection, and the thread that makes one
applies it here before it lets go of that connection. So only two events make the mirror wrong: a
commit of another process, which changes the number, and a new connection, because the file was
replaced. `IndexVersion` has both, and `IndexMirror.catch_up` compares it: at the start of each
transaction, when no other process can commit, and once a second in between.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from pyctl.disk.file_format import MAX_NAME_BYTES, RULES, StateName, rules_id
from pyctl.disk.graph import FileGraph
from pyctl.disk.index import Index, IndexVersion, Record
from pyctl.files.atomic_file import read_regular

__all__ = ["Contents", "FileChange", "IndexMirror", "is_older", "read_graph"]

FileChange: TypeAlias = tuple[Record, bool]
"""A file that was added (True) or removed (False)."""

_NO_STATES: Mapping[StateName, bool] = MappingProxyType({})


@dataclass(frozen=True)
class Contents:
    """The contents of a directory at the last look, immutable, so that no reader waits.

    Attributes:
        file_bytes: The bytes of snapshots.
        auxiliary_bytes: The bytes of prompts and replies.
        states: The stored states of each fingerprint, and whether they are exact.
        lengths: The positions of these states.
    """

    file_bytes: int = 0
    auxiliary_bytes: int = 0
    states: Mapping[str, Mapping[StateName, bool]] = field(default_factory=dict)
    lengths: Mapping[str, frozenset[int]] = field(default_factory=dict)

    @classmethod
    def from_states(
        cls, states: Mapping[str, Mapping[StateName, bool]], file_bytes: int, auxiliary_bytes: int
    ) -> Contents:
        """Return contents with these ``states``."""
        return cls(file_bytes, auxiliary_bytes, states, _lengths(states))

    @property
    def n_bytes(self) -> int:
        """Bytes of all files."""
        return self.file_bytes + self.auxiliary_bytes

    def states_of(self, fingerprint: str) -> Mapping[StateName, bool]:
        """Return the stored states of one fingerprint."""
        return self.states.get(fingerprint, _NO_STATES)

    def changed(self, changes: Iterable[FileChange]) -> Contents:
        """Return contents after ``changes``, with the same bytes."""
        states: dict[str, dict[StateName, bool]] = {}
        for record, is_added in changes:
            if not isinstance(record.name, StateName):
                continue
            if record.fingerprint not in states:
                states[record.fingerprint] = dict(self.states_of(record.fingerprint))
            if is_added:
                states[record.fingerprint][record.name] = record.exact
            else:
                states[record.fingerprint].pop(record.name, None)
        return self._replace_states(states)

    def without(self, fingerprint: str, name: StateName) -> Contents:
        """Return contents that do not list one state."""
        states = dict(self.states_of(fingerprint))
        states.pop(name, None)
        return self._replace_states({fingerprint: states})

    def _replace_states(self, states: Mapping[str, Mapping[StateName, bool]]) -> Contents:
        """Return contents with other ``states`` of some fingerprints."""
        return replace(
            self,
            states={**self.states, **states},
            lengths={**self.lengths, **_lengths(states)},
        )


class IndexMirror:
    """The contents and the graph of the index of the directory at ``path``.

    The thread that holds the writing connection calls everything, except `hide`, and `contents`,
    which any thread may read. ``graph`` is None until it is needed, and right whenever it is there.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Start without contents; ``clock`` gives seconds since the epoch."""
        self.contents = Contents()
        self.graph: FileGraph | None = None
        self._path = path
        self._clock = clock
        self._version: IndexVersion | None = None  # None: read everything again
        self._contents_lock = threading.Lock()  # held for a moment only

    def catch_up(
        self, connection: sqlite3.Connection, version: IndexVersion, auxiliary_bytes: int
    ) -> None:
        """Read the index again if its ``version`` has changed since the last look."""
        if version != self._version:
            self.graph = None
            states, file_bytes = Index.states(connection)
            contents = Contents.from_states(states, file_bytes, auxiliary_bytes)
            with self._contents_lock:
                self.contents = contents
                self._version = version
        elif auxiliary_bytes != self.contents.auxiliary_bytes:
            with self._contents_lock:
                self.contents = replace(self.contents, auxiliary_bytes=auxiliary_bytes)

    def load_graph(self, connection: sqlite3.Connection) -> FileGraph:
        """Return the graph, which is read if it is not there."""
        if self.graph is None:
            self.graph = read_graph(connection, self._path, self._clock)
        return self.graph

    def apply(self, changes: Iterable[FileChange], file_bytes: int, auxiliary_bytes: int) -> None:
        """Show the ``changes`` of a transaction of this process; `contents` is another object then.

        The graph has them already: `Transaction` changes it together with the index.
        """
        with self._contents_lock:
            self.contents = replace(
                self.contents.changed(changes),
                file_bytes=file_bytes,
                auxiliary_bytes=auxiliary_bytes,
            )

    def invalidate(self) -> None:
        """Read everything again at the next look."""
        self.graph = None
        self._version = None

    def hide(self, fingerprint: str, name: StateName) -> None:
        """Hide a state until the next look, which reads everything; any thread."""
        with self._contents_lock:
            self.contents = self.contents.without(fingerprint, name)
            self._version = None


def read_graph(connection: sqlite3.Connection, path: Path, clock: Callable[[], float]) -> FileGraph:
    """Return the graph of all files in the index of the directory at ``path``, whose clock is
    ``clock``.
    """
    records = Index.records(connection)
    fingerprints = {record.fingerprint for record in records}
    older = frozenset(fingerprint for fingerprint in fingerprints if is_older(path / fingerprint))
    return FileGraph(records, older, clock)


def is_older(fingerprint_dir: Path) -> bool:
    """Return whether the files of a fingerprint were made under other rules of batch ends than this
    program's.
    """
    try:
        return read_regular(fingerprint_dir / RULES, MAX_NAME_BYTES) != rules_id().encode()
    except OSError:
        return True


def _lengths(states: Mapping[str, Mapping[StateName, bool]]) -> dict[str, frozenset[int]]:
    return {each: frozenset(name.n for name in names) for each, names in states.items()}
