"""Dependencies between the files of a directory, and the order of their eviction."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import cached_property

from pyctl.cache.eviction import CostAwareEviction
from pyctl.cache.prefix_tree import PrefixTree
from pyctl.disk.file_format import SegmentName
from pyctl.disk.index import Key, Record

__all__ = ["FileGraph"]


class FileGraph:
    """All files of a directory, every fingerprint. Removing here removes nothing on disk: the
    caller does.

    A segment stays while a state needs it, directly or through a child. Files of the fingerprints
    ``older`` are of no further use. ``clock`` gives seconds since the epoch, as records have them.
    """

    def __init__(
        self,
        records: Iterable[Record],
        older: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.older = older
        self._clock = clock
        self.records = {record.key: record for record in records}
        self.n_bytes = sum(record.n_bytes for record in self.records.values())
        self._children: defaultdict[Key, set[Key]] = defaultdict(set)
        for record in self.records.values():
            if record.parent_key is not None:
                self._children[record.parent_key].add(record.key)

    def add(self, record: Record) -> None:
        """Put in a file, in the place of one of its name."""
        old = self.records.get(record.key)
        if old is not None:
            self._take_out(old)
        self.records[record.key] = record
        self.n_bytes += record.n_bytes
        if record.parent_key is not None:
            self._children[record.parent_key].add(record.key)
        if record.is_state and "_tree" in self.__dict__:
            self._tree.add(
                record.key, record.n, self._find_segments(record).items(), record.used, record.hits
            )

    def build_tree(self) -> None:
        """Build the tree of states now, which the first choice would otherwise build."""
        _ = self._tree

    def touch(self, key: Key, used: float) -> None:
        """Note that a state was used, at ``used`` seconds since the epoch."""
        if (record := self.records.get(key)) is not None:
            self.records[key] = replace(record, hits=record.hits + 1, used=used)
            if "_tree" in self.__dict__:
                self._tree.touch(key, used)

    def invalid_keys(self) -> set[Key]:
        """Return the files that nothing can use: states whose chain lacks a file, and segments that
        no other state needs.
        """
        needed: set[Key] = set()
        for record in self.records.values():
            if not record.is_state:
                continue  # a segment is of use only through a state
            chain: list[Key] = []
            key: Key | None = record.key
            while key is not None and key in self.records and key not in needed:
                chain.append(key)
                key = self.records[key].parent_key
            # The chain is complete if it ends at a first segment, which has no parent, or meets a
            # complete chain. Otherwise ``key`` names a file that is missing.
            if key is None or key in needed:
                needed.update(chain)
        return self.records.keys() - needed

    def chain(self, key: Key) -> list[Key]:
        """Return the segments that the file ``key`` depends on, nearest first."""
        keys: list[Key] = []
        record = self.records.get(key)
        while record is not None and record.parent_key is not None:
            keys.append(record.parent_key)
            record = self.records.get(record.parent_key)
        return keys

    def remove(self, key: Key) -> list[Record]:
        """Remove a file with its dependents and the segments that nothing else needs."""
        removed: list[Record] = []
        waiting = [key]
        while waiting:
            at = waiting.pop()
            waiting += self._children.pop(at, ())
            record = self.records.get(at)
            if record is None:
                continue
            removed.append(record)
            self._take_out(record)
            if record.parent_key is not None and not self._children.get(record.parent_key):
                waiting.append(record.parent_key)
        return removed

    def _take_out(self, record: Record) -> None:
        del self.records[record.key]
        self.n_bytes -= record.n_bytes
        if record.is_state and "_tree" in self.__dict__:
            self._tree.remove(record.key)
        if record.parent_key is not None:
            self._children.get(record.parent_key, set()).discard(record.key)

    def shrink(self, budget: int, protected: Collection[Key] = ()) -> list[Record]:
        """Remove files until there are ``budget`` bytes or nothing else may go, and return their
        records.

        Files of older rules go first, then the states of the lowest value. A removed state is put
        back if it fits with the rest after all. A segment in ``protected`` does not keep the states
        that need it.
        """

        def is_evictable(key: Key) -> bool:
            return not self.records[key].pinned and key not in protected

        going: list[Record] = []
        for older in [
            key for key, record in self.records.items() if key[0] in self.older and record.is_state
        ]:
            if self.n_bytes > budget and older in self.records and is_evictable(older):
                going += self.remove(older)
        gone: dict[Key, Record] = {}
        while (
            self.n_bytes > budget and (key := self._policy.choose_victim(is_evictable)) is not None
        ):
            gone |= {record.key: record for record in self.remove(key)}
        self._put_back(gone, budget)
        return [*going, *gone.values()]

    def _put_back(self, gone: dict[Key, Record], budget: int) -> None:
        """Put in again the states that fit with all that they need, the last that had ``gone``
        first.
        """
        states = [key for key, record in reversed(gone.items()) if record.is_state]
        n_before = 0
        while n_before != len(gone):  # a returned file may be all that another one lacked
            n_before = len(gone)
            for key in states:
                missing = list[Record]()
                ancestor = gone.get(key)
                while ancestor is not None:
                    missing.append(ancestor)
                    ancestor = (
                        gone.get(ancestor.parent_key) if ancestor.parent_key is not None else None
                    )
                if missing and self.n_bytes + sum(record.n_bytes for record in missing) <= budget:
                    for record in reversed(missing):
                        self.add(gone.pop(record.key))

    def added(self) -> dict[Key, int]:
        """Return the bytes of each state with the segments of its chain that no shallower or older
        state has; they add up.
        """
        n_added: dict[Key, int] = {}
        counted: set[Key] = set()
        for state in sorted(
            (r for r in self.records.values() if r.is_state), key=lambda r: (r.n, r.created)
        ):
            own = {
                key for key in (state.key, *self.chain(state.key)) if key in self.records
            } - counted
            n_added[state.key] = sum(self.records[key].n_bytes for key in own)
            counted |= own
        return n_added

    def ancestor(self, record: Record) -> Record | None:
        """Return the deepest shallower state on the chain of the state ``record``, None if there is
        none.
        """
        parent = self._tree[record.key].parent
        return self.records[parent.key] if parent is not None else None

    @cached_property
    def _tree(self) -> PrefixTree[Key]:
        tree: PrefixTree[Key] = PrefixTree()
        for record in self.records.values():
            if record.is_state:
                tree.add(
                    record.key,
                    record.n,
                    self._find_segments(record).items(),
                    record.used,
                    record.hits,
                )
        return tree

    @cached_property
    def _policy(self) -> CostAwareEviction[Key]:
        return CostAwareEviction(self._tree, self._freed, self._clock)

    def _find_segments(self, record: Record) -> dict[Key, int]:
        """Return the segments of a state, the deepest first, each with the position up to which it
        counts.
        """
        reach = {}
        n = record.n
        for key in self.chain(record.key):
            reach[key] = n
            n = key[1].start if isinstance(key[1], SegmentName) else 0
        return reach or {
            record.key: n
        }  # without a parent: verify removes it, but eviction may be earlier

    def _freed(self, key: Key) -> int:
        """Return the bytes that become free with a state: its file's, and the files' of segments
        that only it needs.
        """
        freed = self.records[key].n_bytes
        for segment in self.chain(key):
            if len(self._children[segment]) > 1 or segment not in self.records:
                break
            freed += self.records[segment].n_bytes
        return freed
