"""Looking into the cache and changing it from outside, by way of the thread that owns it."""

from __future__ import annotations

from concurrent.futures import Future

from pyctl.cache.view import CacheView, view_of
from pyctl.engine.engine import Engine
from pyctl.engine.worker import Worker

__all__ = ["CacheAdmin"]


class CacheAdmin:
    """Each call is done between two steps of the engine; the future holds its result. Any thread."""

    def __init__(self, worker: Worker, engine: Engine) -> None:
        self._worker, self._engine = worker, engine

    def view(self) -> Future[CacheView]:
        """What the cache holds."""
        return self._worker.call(self._view)

    def _view(self) -> CacheView:
        keeper = self._engine.keeper
        return view_of(keeper.cache, keeper.totals, keeper.disk)

    def pin(self, name: str, pinned: bool) -> Future[bool]:
        """Pin or unpin a snapshot by its id; False if there is none."""
        return self._worker.call(lambda: self._engine.keeper.cache.pin(name, pinned))

    def clear(self) -> Future[int]:
        """Drop every snapshot that is not pinned; how many went. Live sequences stay."""
        return self._worker.call(self._engine.keeper.cache.clear)
