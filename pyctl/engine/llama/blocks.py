"""Memory for saved rows and states: pinned where a device can use that, plain otherwise."""

from __future__ import annotations

import atexit
import os

import numpy as np

from pyctl.cache.segment import Block
from pyctl.native import HostBuffer

__all__ = ["open_pinned", "take_block"]

SLACK = 2**30
"""What is ready or on its way to disk beside what the cache counts."""

AHEAD = 3 * 2**28
"""Bytes kept ready for the next snapshots: rows of a long stretch and some states."""


def open_pinned(budget: int | None, soon: int = 0) -> bool:
    """Make pinned memory ready, in the background, for a cache of ``budget`` bytes; None for half of the machine's.

    ``soon`` bytes of it, at most half, are made ready once, more than the usual. Memory that was pinned is used again
    and not given back. False, and plain memory from then on, where no device library is loaded that can pin any.
    """
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    if budget is not None:
        limit = min(limit, budget + SLACK)
    if budget == 0 or not HostBuffer.open(limit, min(AHEAD, limit // 4)):
        return False
    HostBuffer.want(min(soon, limit // 2))
    atexit.register(HostBuffer.stop)
    return True


def take_block(size: int, *, pinned: bool = True) -> Block:
    """A block of ``size`` bytes, uninitialised; pinned if there is room. MemoryError without memory. Any thread."""
    return np.frombuffer(memoryview(HostBuffer(size, pinned)), np.uint8) if size else np.empty(0, np.uint8)
