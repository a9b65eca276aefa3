"""The cache of one engine in the RAM budget of several."""

from __future__ import annotations

from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial

from pyctl.engine.engine import Engine
from pyctl.engine.worker import Worker

__all__ = ["EvictableEngineCache"]

WAIT_SECONDS = 0.25
"""Longest wait for the engine of an unloaded model, which answers at once unless it is being
loaded.
"""


class EvictableEngineCache:
    """The cache of ``engine``, which ``worker`` runs, in a `RamBudget`. Thread-safe."""

    def __init__(self, worker: Worker, engine: Engine) -> None:
        self._worker = worker
        self._cache = engine.prefix_cache

    @property
    def n_bytes(self) -> int:
        """Bytes of the cache."""
        return self._cache.cache.index.pool.n_bytes

    @property
    def n_fixed(self) -> int:
        """Bytes that it cannot evict at once: all while the model is loaded."""
        pool = self._cache.cache.index.pool
        pinned = tuple(self._cache.cache.index.pinned)
        return pool.n_needed(pinned) if self._worker.is_sleeping else pool.n_bytes

    def evict_bytes(self, n_bytes: int, value: float) -> bool:
        """Evict below ``value``, seconds per byte, on the engine's thread; wait only if the model
        is unloaded.
        """
        is_sleeping = self._worker.is_sleeping
        done = self._worker.call(partial(self._evict_bytes, n_bytes, value))
        if not is_sleeping:
            return False
        try:
            return done.result(WAIT_SECONDS)
        except (FutureTimeout, CancelledError):
            return False

    def _evict_bytes(self, n_bytes: int, value: float) -> bool:
        """Evict as `RamCache.evict_bytes` does, and have those written that belong on disk."""
        has_evicted = self._cache.cache.evict_bytes(n_bytes, value)
        if has_evicted:
            self._cache.write_back.flush_copies()
        return has_evicted
