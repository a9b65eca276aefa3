"""Interim snapshots: they go to disk while their prompt is evaluated, for the case that the process
is killed meanwhile.

A snapshot becomes due by time and by tokens. The time keeps short prompts off the disk. The part of
the prompt bounds the states that a long prompt writes, which may have a hundred megabytes each; its
rows are written once in any case. One snapshot is written at a time, so a slow disk gets fewer.
Each replaces the one before on disk, which no other prompt has used.

The disk counts the bytes as it does for evicted snapshots: within --kv-cache-daily-writes and
--kv-cache-budget, and never in the place of a snapshot of more worth.
"""

from __future__ import annotations

from collections.abc import Callable

from pyctl.cache.lookup import CachePlan
from pyctl.cache.ports import Store
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import Prefix
from pyctl.cache.write_back import WriteBack

__all__ = ["INTERIM_PART", "InterimSnapshots"]

INTERIM_PART = 16
"""At most one interim snapshot for each such part of a prompt: a kill costs 6 % of its evaluation,
and tokens evaluated during the write.
"""


class InterimSnapshots:
    """The interim snapshots of the prompt of ``plan``, which is evaluated from ``start`` on.

    The prefill takes a snapshot at a batch end where `is_due`, then calls `write`. There are none
    without a ``disk``, nor if its ``interim_seconds`` are 0. ``clock`` gives monotonic seconds.
    """

    def __init__(
        self,
        cache: RamCache,
        write_back: WriteBack,
        disk: Store | None,
        plan: CachePlan,
        *,
        start: int,
        clock: Callable[[], float],
    ) -> None:
        """Start at token ``start`` to measure the part that is not on disk; ``clock`` gives
        seconds.
        """
        self._cache = cache
        self._write_back = write_back
        self._disk = disk
        self._plan = plan
        self._clock = clock
        self._seconds = disk.interim_seconds if disk is not None else 0.0
        self._min_tokens = int(plan.match.tokens.size) // INTERIM_PART
        self._last_n = start
        self._last_at = clock()
        self._queued: Prefix | None = None  # the last one, which may be on disk by now
        self._stored: Prefix | None = None  # the last one that is known to be on disk

    def is_due(self, n: int) -> bool:
        """Return whether the first ``n`` tokens, which are evaluated, should go to disk."""
        if self._disk is None or not self._seconds:
            return False
        if n - self._last_n < self._min_tokens:
            return False
        if self._clock() - self._last_at < self._seconds:
            return False
        return self._queued is None or not self._disk.is_queued(self._queued)

    def write(self, n: int) -> None:
        """Write the snapshot of the first ``n`` tokens to disk, if RAM has taken it."""
        snapshot = self._cache.get(self._plan.match.prefix(n))
        if snapshot is None:
            return  # RAM has no room for it, or it would not be exact: the next may be
        self._settle()
        self._last_n = n
        self._last_at = self._clock()
        if self._write_back.write_interim(snapshot):
            self._queued = snapshot.prefix

    def _settle(self) -> None:
        """Take account of the last write, which has ended."""
        assert self._disk is not None
        if self._queued is None:
            return
        if self._disk.contains(self._queued):
            if self._stored is not None and self._stored.n not in self._plan.persist:
                self._disk.supersede(self._stored)
            self._stored = self._queued
        else:
            self._seconds *= 2  # the disk is full or slow, or has no bytes left for the day
        self._queued = None
