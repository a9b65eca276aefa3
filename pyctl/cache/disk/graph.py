"""What the files of a directory hang on, and which of them to lose first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from pyctl.cache.disk.file_format import SegmentName
from pyctl.cache.disk.index import Key, Record

__all__ = ["FileGraph"]

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
            if record.parent_key is not None:
                self._children[record.parent_key].add(record.key)

    def unsound(self) -> set[Key]:
        """Files that nobody can use: on an incomplete chain, or segments without a state."""
        sound: set[Key] = set()
        broken: set[Key] = set()
        for record in self.records.values():
            chain = [record.key]
            while chain[-1] in self.records and chain[-1] not in sound:
                parent = self.records[chain[-1]].parent_key
                if parent is None:
                    break
                chain.append(parent)
            (sound if chain[-1] in self.records and chain[-1] not in broken else broken).update(chain)
        needed: set[Key] = set()
        for record in self.records.values():
            if record.is_state and record.key in sound:
                needed.update([record.key, *self.chain(record.key)])
        return self.records.keys() - needed

    def chain(self, key: Key) -> list[Key]:
        """The segments that the file ``key`` hangs on, the nearest first."""
        found: list[Key] = []
        record = self.records.get(key)
        while record is not None and record.parent_key is not None:
            found.append(record.parent_key)
            record = self.records.get(record.parent_key)
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
            if record.parent_key is not None:
                siblings = self._children.get(record.parent_key, set())
                siblings.discard(record.key)
                if not siblings:
                    waiting.append(record.parent_key)
        return removed

    def shrink(self, budget: int, now: float, protected: Collection[Key] = ()) -> list[Record]:
        """Take out what is worth least until ``budget`` bytes or only pinned and protected states are left."""
        going: list[Record] = []
        while self.n_bytes > budget and (key := self.victim(now, protected)) is not None:
            going += self.remove(key)
        return going

    def victim(self, now: float, protected: Collection[Key] = ()) -> Key | None:
        """The state whose loss costs least: tokens to evaluate again per byte freed and per second since its use.

        None when all are pinned or protected; a segment in ``protected`` keeps no state from going.
        """
        at = self._states()
        choice = [r for r in self.records.values() if r.is_state and not r.pinned and r.key not in protected]
        return min(choice, key=lambda record: self._worth(record, at, now)).key if choice else None

    def ancestor(self, record: Record, at: dict[Key, list[Record]] | None = None) -> Record | None:
        """The deepest shallower state on the chain of the state ``record``, None if there is none."""
        at = self._states() if at is None else at
        last = record.n
        for key in self.chain(record.key):
            under = [state for state in at.get(key, ()) if state.n < record.n and state.n <= last]
            if under:
                return max(under, key=lambda state: state.n)
            last = key[1].start if isinstance(key[1], SegmentName) else 0
        return None

    def _states(self) -> dict[Key, list[Record]]:
        at: defaultdict[Key, list[Record]] = defaultdict(list)
        for record in self.records.values():
            if record.is_state and record.parent_key is not None:
                at[record.parent_key].append(record)
        return at

    def _worth(self, record: Record, at: dict[Key, list[Record]], now: float) -> float:
        freed = record.n_bytes
        for key in self.chain(record.key):
            if len(self._children[key]) > 1 or key not in self.records:
                break
            freed += self.records[key].n_bytes
        ancestor = self.ancestor(record, at)
        lost = record.n - (ancestor.n if ancestor is not None else 0)
        return lost / max(freed, 1) / (max(now - record.used, 0.0) + FRESH_SECONDS)
