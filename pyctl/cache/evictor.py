"""Evictions of snapshots from RAM, the lowest worth first."""

from __future__ import annotations

import math
from collections.abc import Callable

from pyctl.cache.budget import Budget
from pyctl.cache.evicted import EvictedPrefixes
from pyctl.cache.eviction import CostAwareEviction
from pyctl.cache.snapshot import Snapshot
from pyctl.cache.snapshot_index import SnapshotIndex

__all__ = ["Evictor"]


class Evictor:
    """The evictions of snapshots of ``index`` in the order of ``policy``.

    Attributes:
        on_evict: The function that gets each snapshot before its eviction, all its rows still
            there, and the seconds that it was expected to save. It may not change the cache.
        n_evicted: Snapshots that were evicted since the start.
        evicted: Their prefixes, which prompts may need again.
    """

    def __init__(
        self, index: SnapshotIndex, budget: Budget, policy: CostAwareEviction[Snapshot]
    ) -> None:
        self.on_evict: Callable[[Snapshot, float], None] = lambda snapshot, worth: None
        self.n_evicted = 0
        self.evicted = EvictedPrefixes()
        self._index = index
        self._budget = budget
        self._policy = policy

    def evict(self, snapshot: Snapshot) -> None:
        """Evict ``snapshot``."""
        self.on_evict(snapshot, self._policy.value(snapshot))
        self._index.remove(snapshot)
        self.n_evicted += 1
        self.evicted.add(snapshot.prefix)

    @property
    def can_free_slot(self) -> bool:
        """True if some snapshot may be evicted."""
        return self._slot_victim() is not None

    def free_slot(self) -> None:
        """Evict the snapshot of lowest worth, whatever its bytes."""
        victim = self._slot_victim()
        if victim is not None:
            self.evict(victim)

    def _slot_victim(self) -> Snapshot | None:
        return self._policy.choose_victim(self._index.is_evictable, per_byte=False)

    def pay(self, n_bytes: int) -> None:
        """Evict snapshots of this cache and of other models' caches, by worth per byte, until
        ``n_bytes`` more fit.
        """
        while (room := self._budget.room(n_bytes)) < 0:
            victim = self._policy.choose_victim(self._index.is_evictable)
            worth = math.inf
            if victim is not None:
                worth = self._policy.value(victim, per_byte=True)
            if self._budget.take_from_others(int(-room), worth):
                continue
            if victim is None:
                return
            self.evict(victim)

    def evict_below(self, worth: float, max_bytes: int) -> None:
        """Evict snapshots of less than ``worth``, seconds per byte, until the cache has at most
        ``max_bytes``.
        """
        while self._index.pool.n_bytes > max_bytes:
            victim = self._policy.choose_victim(self._index.is_evictable)
            if victim is None or self._policy.value(victim, per_byte=True) >= worth:
                return
            self.evict(victim)
