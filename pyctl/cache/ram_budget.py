"""A budget of bytes that the RAM caches of several models share."""

from __future__ import annotations

import threading
from typing import Protocol

__all__ = ["EvictableCache", "RamBudget"]


class EvictableCache(Protocol):
    """A cache as the others of its budget use it, from their threads."""

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes in RAM now."""

    @property
    def n_fixed(self) -> int:
        """Bytes that it cannot evict: all of them while its model is loaded, else the pinned
        snapshots'.
        """

    def evict_bytes(self, n_bytes: int, value: float) -> bool:
        """Evict snapshots below ``value``, seconds per byte, until ``n_bytes`` are free; return
        whether any was evicted.

        Waits for the engine of an unloaded model, which is idle. The engine of a loaded model may
        wait for this caller, so it evicts later, and the result is False.
        """


class RamBudget:
    """A budget of ``n_bytes`` for the snapshots of several caches together, None for no limit.
    Thread-safe.

    Requests of all models are the units of one clock, ``turn``, so that worth compares across
    models. A cache that needs room evicts the least worth per byte over its own snapshots and
    unloaded models'.
    """

    def __init__(self, n_bytes: int | None) -> None:
        self.n_bytes = n_bytes
        self.turn = 0
        self._lock = threading.Lock()
        self._caches: dict[object, EvictableCache] = {}

    def add(self, cache: object, evictable: EvictableCache) -> None:
        """Count ``cache``, which ``evictable`` evicts from."""
        with self._lock:
            self._caches[cache] = evictable

    def remove(self, cache: object) -> None:
        """Count ``cache`` no longer."""
        with self._lock:
            self._caches.pop(cache, None)

    def next_turn(self) -> int:
        """Count another request of any model, and return the clock."""
        with self._lock:
            self.turn += 1
            return self.turn

    def used_by_others(self, cache: object) -> int:
        """Return the bytes of all caches but ``cache``."""
        return sum(other.n_bytes for other in self._others(cache))

    def fixed_by_others(self, cache: object) -> int:
        """Return the bytes that the other caches cannot evict now."""
        return sum(other.n_fixed for other in self._others(cache))

    def take(self, cache: object, n_bytes: int, value: float) -> bool:
        """Evict ``n_bytes`` of snapshots below ``value``, seconds per byte, from the largest other
        cache that has any; return whether any was evicted.
        """
        others = sorted(self._others(cache), key=lambda other: -other.n_bytes)
        return any(other.evict_bytes(n_bytes, value) for other in others if other.n_bytes)

    def _others(self, cache: object) -> list[EvictableCache]:
        with self._lock:
            return [evictable for each, evictable in self._caches.items() if each is not cache]
