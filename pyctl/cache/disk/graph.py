"""What the files of a directory hang on, and which of them to lose first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import TypeAlias

from pyctl.cache.disk.file_format import SegmentName, parse
from pyctl.cache.disk.index import Record

__all__ = ["FileGraph", "Key"]

Key: TypeAlias = tuple[str, str]
"""A fingerprint and a file's name."""

FRESH_SECONDS = 60.0
"""Added to the age of a state, so that those used a moment ago are not told apart by it."""


class FileGraph:
    """All files of a directory, every fingerprint. Removing here removes nothing on disk: the caller does.

    A segment stays while a state needs it, directly or through a child.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = {record.key: record for record in records}
        self.n_bytes = sum(record.n_bytes for record in self.records.values())
        self._children: defaultdict[Key, set[Key]] = defaultdict(set)
        for record in self.records.values():
            if record.parent:
                self._children[_parent_key(record)].add(record.key)

    def unsound(self) -> set[Key]:
        """Files that nobody can use: on an incomplete chain, or segments without a state."""
        sound: set[Key] = set()
        broken: set[Key] = set()
        for record in self.records.values():
            chain = [record.key]
            while chain[-1] in self.records and chain[-1] not in sound and self.records[chain[-1]].parent:
                chain.append(_parent_key(self.records[chain[-1]]))
            (sound if chain[-1] in self.records and chain[-1] not in broken else broken).update(chain)
        needed: set[Key] = set()
        for record in self.records.values():
            if record.state and record.key in sound:
                needed.update([record.key, *self.chain(record.key)])
        return self.records.keys() - needed

    def chain(self, key: Key) -> list[Key]:
        """The segments that the file ``key`` hangs on, the nearest first."""
        found = []
        while (record := self.records.get(key)) is not None and record.parent:
            key = _parent_key(record)
            found.append(key)
        return found

    def remove(self, key: Key) -> list[Record]:
        """Take out a file with everything that hangs on it and the segments that nobody needs then."""
        removed: list[Record] = []
        waiting = [key]
        while waiting:
            at = waiting.pop()
            waiting += self._children.pop(at, ())
            record = self.records.pop(at, None)
            if record is None:
                continue
            removed.append(record)
            self.n_bytes -= record.n_bytes
            if record.parent:
                neighbours = self._children.get(_parent_key(record), set())
                neighbours.discard(record.key)
                if not neighbours:
                    waiting.append(_parent_key(record))
        return removed

    def victim(self, now: float, protected: Collection[Key] = ()) -> Key | None:
        """The state whose loss costs least: tokens to evaluate again per byte freed and per second since its use.

        None when all are pinned or protected; a segment in ``protected`` keeps no state from going.
        """
        at = self._states()
        choice = [r for r in self.records.values() if r.state and not r.pinned and r.key not in protected]
        return min(choice, key=lambda record: self._worth(record, at, now)).key if choice else None

    def ancestor(self, record: Record, at: dict[Key, list[Record]] | None = None) -> Record | None:
        """The deepest shallower state on the chain of the state ``record``, None if there is none."""
        at = self._states() if at is None else at
        last = record.n
        for key in self.chain(record.key):
            under = [state for state in at.get(key, ()) if state.n < record.n and state.n <= last]
            if under:
                return max(under, key=lambda state: state.n)
            name = parse(key[1])
            last = name.start if isinstance(name, SegmentName) else 0
        return None

    def _states(self) -> dict[Key, list[Record]]:
        at: defaultdict[Key, list[Record]] = defaultdict(list)
        for record in self.records.values():
            if record.state:
                at[_parent_key(record)].append(record)
        return at

    def _worth(self, record: Record, at: dict[Key, list[Record]], now: float) -> float:
        freed = record.n_bytes
        for key in self.chain(record.key):
            if len(self._children[key]) > 1 or key not in self.records:
                break
            freed += self.records[key].n_bytes
        below = self.ancestor(record, at)
        lost = record.n - (below.n if below is not None else 0)
        return lost / max(freed, 1) / (max(now - record.used, 0.0) + FRESH_SECONDS)


def _parent_key(record: Record) -> Key:
    return record.fingerprint, record.parent
