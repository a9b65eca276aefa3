"""Looking into the engine and its cache from outside, by way of the thread that owns them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.view import CacheView, view_of
from pyctl.engine.engine import Engine
from pyctl.engine.meter import Meter
from pyctl.engine.views import Scrape
from pyctl.engine.worker import Worker
from pyctl.prompt import Tokens

__all__ = ["CacheAdmin", "EngineAdmin"]


class EngineAdmin:
    """Each call is done between two steps of the engine; the future holds its result. Any thread."""

    def __init__(self, worker: Worker, engine: Engine) -> None:
        self._worker, self._engine = worker, engine
        self._last = Meter()

    def scrape(self) -> Future[Scrape]:
        """The numbers of now; wakes nobody."""
        return self._worker.call(self._scrape)

    def embed(self, tokens: Tokens) -> Future[NDArray[np.float32]]:
        """The embeddings of ``tokens``, shape (1 or n, width); see Backend.embed for the errors."""
        return self._worker.call(lambda: self._engine.backend.embed(tokens), needs_model=True)

    def _scrape(self) -> Scrape:
        engine, keeper = self._engine, self._engine.keeper
        total = replace(engine.meter)
        before, self._last = self._last, total
        recent = Meter(*(getattr(total, each.name) - getattr(before, each.name) for each in fields(Meter)))
        view = view_of(keeper.cache, keeper.totals, keeper.disk)
        return Scrape(total, recent, len(engine.running), len(engine.queue), view)


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
