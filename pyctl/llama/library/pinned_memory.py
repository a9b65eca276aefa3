"""Blocks of saved bytes in host memory, pinned where a device copies to it. Thread-safe, one pool
for the process.
"""

from __future__ import annotations

import atexit
import os

import numpy as np

from pyctl.cache.snapshot import Block
from pyctl.llama.library.native import HostBuffer
from pyctl.settings.limit import limit

__all__ = ["allocate", "reserve_pinned"]

SLACK = limit(
    3 * 2**28,
    "memory for snapshots beyond --cache-ram, on a GPU: ready for the next, being copied, or on "
    "the way to disk",
    "snapshots are in memory that is copied more slowly",
    "memory",
    "bytes",
)

AHEAD = 3 * 2**28
"""Bytes pinned ahead for the next snapshots: rows of a long message and some states."""


def reserve_pinned(budget: int | None, initial: int = 0, pending: int = 0) -> bool:
    """Pin memory in the background for a cache of ``budget`` bytes; None for half of the machine's
    memory.

    ``initial`` bytes, at most half, are pinned first, for snapshots loaded at a restart. More is
    pinned when snapshots need it, ``pending`` bytes of it for disk writes, and then reused. False
    if no loaded device library can pin memory; blocks are then pageable.
    """
    if budget == 0:
        return False
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for_cache = half if budget is None else min(half, budget + SLACK)
    maximum = min(half, for_cache + pending)
    ahead = min(AHEAD, maximum // 4)
    if not HostBuffer.open(maximum, ahead, min(initial, for_cache // 2)):
        return False
    atexit.register(HostBuffer.stop)
    return True


def allocate(size: int, *, pinned: bool = True) -> Block:
    """Return an uninitialised block of ``size`` bytes, pinned if there is room. Raises MemoryError.
    Thread-safe.
    """
    if not size:
        return np.empty(0, np.uint8)
    return np.frombuffer(memoryview(HostBuffer(size, pinned)), np.uint8)
