"""The budget of a RAM cache: its bytes and slots, and who pays when more are needed."""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from typing import Protocol

from pyctl.cache.ram_budget import RamBudget
from pyctl.cache.segment_pool import SegmentPool

__all__ = ["Budget", "Payer"]


class Payer(Protocol):
    """A group of bytes that may be evicted."""

    def pay(self, n_bytes: int) -> None:
        """Evict until the budget has room for ``n_bytes`` more, or nothing more may be evicted."""


class Budget:
    """The room for ``snapshots``, whose bytes ``pool`` counts, and who pays for more.

    Attributes:
        limit: The maximum of bytes, None for no limit, 0 for no cache.
        n_slots: The maximum number of snapshots, 0 for as many as there is room for.
        shared: The budget of this cache together with the caches of other models.
        payers: The payers: the first pays first.
    """

    def __init__(
        self,
        pool: SegmentPool,
        snapshots: Sized,
        limit: int | None,
        n_slots: int,
        shared: RamBudget,
        owner: object,
    ) -> None:
        """``owner`` is the name of this cache in ``shared``."""
        self.limit = limit
        self.n_slots = n_slots
        self.shared = shared
        self.payers: Sequence[Payer] = ()
        self._pool = pool
        self._snapshots = snapshots
        self._owner = owner

    @property
    def n_free_slots(self) -> float:
        """The number of further snapshots that may come before one is evicted, whatever their
        bytes; infinite without `n_slots`.
        """
        return (self.n_slots or math.inf) - len(self._snapshots)

    def room(self, n_bytes: int = 0) -> float:
        """Return the bytes that would be left after ``n_bytes`` more, negative if the limit is
        exceeded.
        """
        if self.limit is None:
            return math.inf
        others = self.shared.used_by_others(self._owner)
        return self.limit - self._pool.n_bytes - others - n_bytes

    def make_room(self, n_bytes: int = 0) -> None:
        """Make room for ``n_bytes``, as far as anything may be evicted."""
        for payer in self.payers:
            payer.pay(n_bytes)

    @property
    def fixed_by_others(self) -> int:
        """The bytes that the caches of other models cannot evict now."""
        return self.shared.fixed_by_others(self._owner)

    def take_from_others(self, n_bytes: int, worth: float) -> bool:
        """Evict ``n_bytes`` of snapshots below ``worth``, seconds per byte, from another model's
        cache; return whether any was evicted.
        """
        return self.shared.take(self._owner, n_bytes, worth)
