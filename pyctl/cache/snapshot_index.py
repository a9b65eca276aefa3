"""The snapshots of a RAM cache: the place of each, its shared segments, and which of them stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from pyctl.cache.prefix_tree import PrefixTree, TreeNode
from pyctl.cache.segment_pool import SegmentPool
from pyctl.cache.snapshot import Prefix, Segment, Snapshot

__all__ = ["SnapshotIndex"]


class SnapshotIndex:
    """The snapshots that lookups can find, and the facts by which others decide on evictions.

    Attributes:
        by_prefix: The snapshots, the oldest first.
        tree: The snapshots by continuation.
        pool: The segments that the snapshots share, with the count of bytes.
        pinned: The snapshots that a client has pinned.
        retained: The snapshots of suspended sequences, which no lookup finds.
        locks: How often each snapshot is locked now.
        turn: The clock of the policy, which counts requests of all models.
    """

    def __init__(self) -> None:
        self.by_prefix: dict[Prefix, Snapshot] = {}
        self.tree: PrefixTree[Snapshot] = PrefixTree()
        self.pool = SegmentPool()
        self.pinned: set[Snapshot] = set()
        self.retained: list[Snapshot] = []
        self.locks: Counter[Snapshot] = Counter()
        self.turn = 0

    def add(self, snapshot: Snapshot, used: float) -> TreeNode[Snapshot]:
        """Enter ``snapshot``, last used at ``used`` of the policy's clock, whose bytes the pool
        has; return its node.
        """
        self.by_prefix[snapshot.prefix] = snapshot
        return self.tree.add(snapshot, snapshot.n, snapshot.iter_chain(), used, snapshot.hits)

    def remove(self, snapshot: Snapshot) -> None:
        """Remove ``snapshot``, and its bytes unless others need them."""
        self.tree.remove(snapshot)
        del self.by_prefix[snapshot.prefix]
        self.pinned.discard(snapshot)
        self.pool.release(snapshot)

    @contextmanager
    def locked(self, *snapshots: Snapshot) -> Iterator[None]:
        """Evict none of ``snapshots`` within the block. A snapshot may be locked several times, and
        need not be in the cache.
        """
        self.locks.update(snapshots)
        try:
            yield
        finally:
            self.locks.subtract(snapshots)
            for snapshot in snapshots:
                if not self.locks[snapshot]:
                    del self.locks[snapshot]

    def is_evictable(self, snapshot: Snapshot) -> bool:
        """Return whether ``snapshot`` is neither pinned nor locked."""
        return snapshot not in self.pinned and snapshot not in self.locks

    def needing(self, segment: Segment) -> list[Snapshot]:
        """Return the snapshots that need ``segment``."""
        return [node.key for node in self.tree.through(segment)]

    def fixed(self) -> list[Snapshot]:
        """Return the snapshots whose rows stay in RAM, if need be beyond the budget."""
        return [*self.pinned, *self.retained]

    def is_fixed(self, segment: Segment) -> bool:
        """Return whether the rows of ``segment`` stay in RAM."""
        return any(segment in snapshot.chain for snapshot in self.fixed())
