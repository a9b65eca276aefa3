"""What the engine shows of itself: values that other threads may keep."""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.cache.view import CacheView
from pyctl.engine.meter import Meter
from pyctl.engine.request import Request

__all__ = ["Scrape", "SlotFile", "SlotView"]


@dataclass(frozen=True)
class Scrape:
    """What was done since the start, and ``recent``ly, since the scrape before; who is served and who waits now."""

    total: Meter
    recent: Meter
    n_processing: int
    n_waiting: int
    cache: CacheView


@dataclass(frozen=True)
class SlotView:
    """One sequence. ``task`` counts the requests and is -1 before the first, whose ``request`` is None.

    ``n_tokens`` are in the sequence, of which ``prompt`` arrived and ``reply`` was generated. The other counts are of
    the request that is served now, 0 for none: prompt tokens restored and evaluated, and tokens predicted.
    """

    id: int
    n_ctx: int
    busy: bool
    task: int = -1
    request: Request | None = None
    n_tokens: int = 0
    n_cached: int = 0
    n_evaluated: int = 0
    n_predicted: int = 0
    prompt: tuple[int, ...] = ()
    reply: tuple[int, ...] = ()


@dataclass(frozen=True)
class SlotFile:
    """A sequence was saved or restored: tokens, bytes of the file, milliseconds."""

    n_tokens: int
    n_bytes: int
    ms: float
