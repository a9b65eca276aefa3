"""The cache of one model as the others see it: its bytes, and evictions on its own thread."""

from __future__ import annotations

from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout

from pyctl.engine.engine import Engine
from pyctl.engine.worker import Worker

__all__ = ["EvictableEngineCache"]

WAIT_SECONDS = 0.25
"""Longest wait for the engine of an unloaded model, which answers at once unless it is being loaded."""


class EvictableEngineCache:
    """The cache of ``engine``, which ``worker`` runs, in a `RamBudget`. Thread-safe."""

    def __init__(self, worker: Worker, engine: Engine) -> None:
        self._worker, self._engine = worker, engine

    @property
    def n_bytes(self) -> int:
        """Bytes of the cache."""
        return self._engine.prefix_cache.cache.pool.n_bytes

    @property
    def n_fixed(self) -> int:
        """Bytes that it cannot evict at once."""
        pool, pinned = self._engine.prefix_cache.cache.pool, tuple(self._engine.prefix_cache.cache.pinned)
        return pool.n_needed(pinned) if self._worker.is_sleeping else pool.n_bytes

    def evict_bytes(self, n_bytes: int, worth: float) -> bool:
        """Evict below ``worth``, seconds per byte, on the engine's thread; wait only if the model is unloaded."""
        rests = self._worker.is_sleeping
        done = self._worker.call(lambda: self._engine.prefix_cache.evict_bytes(n_bytes, worth))
        if not rests:
            return False
        try:
            return done.result(WAIT_SECONDS)
        except (FutureTimeout, CancelledError):
            return False
