"""Snapshots at the very ends of prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator

from pyctl.cache.budget import Budget
from pyctl.cache.segment_pool import SegmentPool
from pyctl.cache.snapshot import Prefix, Segment, Snapshot
from pyctl.settings.limit import limit

__all__ = ["MAX_ENDS", "PromptEnds"]

MAX_ENDS = limit(8, "prompt ends", "the least recently used are evicted", "memory")


class PromptEnds:
    """The snapshots at the very ends of prompts, each with a state and the output there, for equal
    prompts and longer raw ones.

    Conversations continue elsewhere. So these pay before all others of ``budget``, the least
    recently used first, but none that is locked.
    """

    def __init__(self, pool: SegmentPool, locks: Container[Snapshot], budget: Budget) -> None:
        """``pool`` counts their bytes, ``locks`` has the snapshots that may not be evicted now."""
        self._pool = pool
        self._locks = locks
        self._budget = budget
        self._ends: OrderedDict[Prefix, Snapshot] = OrderedDict()

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._ends.values())

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def _n_slots(self) -> float:
        """The maximum number of prompt ends: the slots that other snapshots leave."""
        return min(self._budget.n_free_slots, MAX_ENDS)

    @property
    def n_bytes(self) -> int:
        """The bytes of their states: the minimum that becomes free when all of them are evicted."""
        return sum(end.state.own_bytes for end in self)

    def touch(self, snapshot: Snapshot) -> None:
        """Make ``snapshot`` the most recently used, if it is here."""
        if self._ends.get(snapshot.prefix) is snapshot:
            self._ends.move_to_end(snapshot.prefix)

    def through(self, segment: Segment) -> list[Snapshot]:
        """Return the prompt ends that need ``segment``."""
        return [end for end in self if segment in end.chain]

    def may_add(self, n_bytes: int, *, is_wanted: bool) -> bool:
        """Return whether a prompt end that adds ``n_bytes`` can stay. Unless it ``is_wanted``, it
        evicts only other prompt ends.
        """
        if self._n_slots <= 0:
            return False
        return is_wanted or self._budget.room(n_bytes) + self.n_bytes >= 0

    def add(self, snapshot: Snapshot, *, is_wanted: bool) -> bool:
        """Add ``snapshot``, which the caller has locked, in place of an older one of its prompt;
        return False if there is no room for it.

        Raises ValueError if it builds on rows that were dropped.
        """
        if not self._pool.is_whole(snapshot):
            raise ValueError("the snapshot builds on rows that were dropped")
        self._pool.add_reference(snapshot)
        older = self._ends.get(snapshot.prefix)
        if older is not None:
            self.drop(older)
        self._ends[snapshot.prefix] = snapshot
        if is_wanted:
            self._budget.make_room()
        else:
            self.pay(0)
        if self._budget.room() < 0 or len(self) > self._n_slots:
            self.drop(snapshot)
            return False
        return True

    def drop(self, snapshot: Snapshot) -> None:
        """Drop ``snapshot``, if it is here."""
        if self._ends.get(snapshot.prefix) is snapshot:
            del self._ends[snapshot.prefix]
            self._pool.release(snapshot)

    def pay(self, n_bytes: int) -> None:
        """Drop unlocked prompt ends, the oldest first, until ``n_bytes`` more fit and no slot is
        exceeded.
        """
        self.shrink(self._pool.n_bytes + self._budget.room(n_bytes))

    def shrink(self, max_bytes: float) -> None:
        """Drop unlocked prompt ends, the oldest first, until all snapshots of the cache together
        have at most ``max_bytes`` and no slot is exceeded.
        """
        for end in list(self):
            if self._pool.n_bytes <= max_bytes and len(self) <= self._n_slots:
                return
            if end not in self._locks:
                self.drop(end)

    def drop_descendants(self, snapshot: Snapshot) -> None:
        """Drop the ends of all prompts that start with the tokens of ``snapshot``."""
        for end in list(self):
            if end.chain.get(snapshot.segment, 0) >= snapshot.n:
                self.drop(end)

    def clear(self) -> None:
        """Drop all prompt ends."""
        for end in list(self):
            self.drop(end)
