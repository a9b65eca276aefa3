"""A transaction on a cache directory: files and their rows in the index change together."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pyctl.disk.graph import FileGraph
from pyctl.disk.index import Index, Key, Record, file_path
from pyctl.disk.index_mirror import FileChange, IndexMirror
from pyctl.disk.segment_files import remove_file
from pyctl.files.atomic_file import temp_name

__all__ = ["Transaction"]


class Transaction:
    """Changes of the directory at ``path``, which are one change to all other processes.

    Made by `CacheDirectory.changing`. A caller that changes `graph` also changes the index and the
    files, or calls `discard_graph`. ``connection`` is for the statements of `Index` that concern no
    file.

    Files that it removes get temp names first, and go after the commit: a transaction that fails
    gives them their names back. Their names have to be free before the commit, since another
    process may write a file of the same name after it. Of a process that is killed in between,
    recovery removes the temp files and the rows.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        mirror: IndexMirror,
        path: Path,
        clock: Callable[[], float],
    ) -> None:
        """Start without changes; ``clock`` gives seconds since the epoch."""
        self.connection = connection
        self.changes: list[FileChange] = []
        self._mirror = mirror
        self._path = path
        self._removed: dict[Path, Path] = {}
        """The files to remove at the commit: temp name, own name."""
        self._clock = clock

    @property
    def graph(self) -> FileGraph:
        """All files of the directory, of every fingerprint."""
        return self._mirror.load_graph(self.connection)

    def discard_graph(self) -> None:
        """Have the graph read again: it has changes that the index has not got, or lacks some."""
        self._mirror.graph = None

    @property
    def file_bytes(self) -> int:
        """Bytes of all files of snapshots, after the changes so far."""
        graph = self._mirror.graph
        return graph.n_bytes if graph is not None else Index.n_bytes(self.connection)

    def insert(self, record: Record, label: str = "") -> None:
        """Add a file, which has its name already, to the index; ``label`` describes it to users."""
        Index.insert(self.connection, record, label)
        self.changes.append((record, True))

    def delete(self, records: Iterable[Record]) -> None:
        """Remove files, which the graph has dropped already, and their rows of the index. Raises
        OSError if a file cannot be removed.
        """
        for record in records:
            Index.delete(self.connection, record.key)
            self._set_aside(file_path(self._path, record.key))
            self.changes.append((record, False))

    def _set_aside(self, path: Path) -> None:
        if path.parent.is_symlink() or path.is_symlink() or not path.is_file():
            remove_file(path)  # nothing to give a name back to
            return
        temp = path.with_name(temp_name())
        os.rename(path, temp)
        self._removed[temp] = path

    def remove_files(self) -> None:
        """Remove the deleted files from the drive, after the commit."""
        for temp in self._removed:
            remove_file(temp)
        self._removed.clear()

    def restore_files(self) -> None:
        """Give the deleted files their names back, after a rollback."""
        for temp, path in self._removed.items():
            with suppress(OSError):  # a refused file stays a miss until the next recovery
                os.rename(temp, path)
        self._removed.clear()

    def shrink(self, file_budget: int) -> int:
        """Remove the least valuable files until ``file_budget`` bytes of snapshots or only pinned
        ones are left; return the bytes freed.
        """
        if self.file_bytes <= file_budget:
            return 0
        evicted = self.graph.shrink(file_budget)
        self.delete(evicted)
        return sum(record.n_bytes for record in evicted)

    def touch(self, key: Key) -> None:
        """Count a hit of a state, now."""
        now = self._clock()
        Index.touch(self.connection, key, now)
        if self._mirror.graph is not None:
            self._mirror.graph.touch(key, now)

    def pin(self, key: Key, pinned: bool) -> None:
        """Keep a file from being evicted, or let it be."""
        Index.pin(self.connection, key, pinned)
        self.discard_graph()
