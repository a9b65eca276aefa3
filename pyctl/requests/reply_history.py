"""Entries that the newest replies leave for later requests, which name a reply by its id."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

__all__ = ["HistoryEntry", "ReplyHistory"]


class HistoryEntry(Protocol):
    """An entry of a `ReplyHistory`."""

    @property
    def owner(self) -> bytes:
        """The client, who alone may find it."""
        ...

    @property
    def n_bytes(self) -> int:
        """The approximate bytes that it takes in memory."""
        ...


E = TypeVar("E", bound=HistoryEntry)


class ReplyHistory(Generic[E]):
    """Entries by the id of a reply, at most ``max_entries`` and ``max_bytes`` in all. Those that
    were added or found last stay. Thread-safe.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # guards the members below
        self._entries: OrderedDict[str, E] = OrderedDict()
        self._n_bytes = 0
        self._n_forgotten = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def n_bytes(self) -> int:
        """The approximate bytes of all entries."""
        return self._n_bytes

    @property
    def n_forgotten(self) -> int:
        """The number of entries since the start that were dropped when there was no more room."""
        return self._n_forgotten

    def find(self, reply_id: str, owner: bytes) -> E | None:
        """Return the entry of ``reply_id``; None if there is none, or if it belongs to another
        client.
        """
        with self._lock:
            entry = self._entries.get(reply_id)
            if entry is None or entry.owner != owner:
                return None
            self._entries.move_to_end(reply_id)
            return entry

    def add(self, reply_id: str, entry: E, *, replaced: str = "") -> None:
        """Add the ``entry`` of ``reply_id``; it takes the place of the entry of ``replaced``, empty
        for none. An entry that alone is too large is dropped at once.
        """
        with self._lock:
            self._drop(replaced)
            self._drop(reply_id)
            self._entries[reply_id] = entry
            self._n_bytes += entry.n_bytes
            while self._entries and self._is_full:
                self._drop(next(iter(self._entries)))
                self._n_forgotten += 1

    @property
    def _is_full(self) -> bool:
        return len(self._entries) > self._max_entries or self._n_bytes > self._max_bytes

    def _drop(self, reply_id: str) -> None:
        entry = self._entries.pop(reply_id, None)
        if entry is not None:
            self._n_bytes -= entry.n_bytes
