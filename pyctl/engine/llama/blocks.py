"""Memory for saved rows and states: pinned where a device can use that, plain otherwise."""

from __future__ import annotations

import os

import numpy as np

from pyctl.cache.segment import Block
from pyctl.native import HostBuffer

__all__ = ["Blocks"]

SLACK = 2**30
"""What is ready or on its way to disk beside what the cache counts."""

AHEAD = 3 * 2**28
"""Bytes kept ready for the next snapshots: rows of a long stretch and some states."""


class Blocks:
    """Hands out blocks. With ``beside``, a device copies while it computes, and pinned memory is made ready ahead.

    Memory that was pinned once is used again and not given back.
    """

    def __init__(self, beside: bool) -> None:
        self._beside = beside
        self._limit = 0

    def open(self, budget: int | None) -> None:
        """Make memory ready for a cache of ``budget`` bytes; None for as much as half of the machine has."""
        if self._beside and budget != 0:
            limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
            if budget is not None:
                limit = min(limit, budget + SLACK)
            self._limit = limit
            HostBuffer.open(limit, min(AHEAD, limit // 4))

    def take(self, size: int) -> Block:
        """A block of ``size`` bytes, uninitialised; MemoryError when there is no memory. Any thread."""
        return np.frombuffer(memoryview(HostBuffer(size, self._beside)), np.uint8) if size else np.empty(0, np.uint8)

    def want(self, n_bytes: int) -> None:
        """Let ``n_bytes`` be ready soon, in one piece, but no more than half of what there may be."""
        HostBuffer.want(min(n_bytes, self._limit // 2))
