"""Memory for saved rows and states: pinned where a device offers that, and used again, since pinning takes long."""

from __future__ import annotations

import numpy as np

from pyctl.cache.segment import Block
from pyctl.native import HostBuffer

__all__ = ["Blocks"]

KEPT_BYTES = 2**30
"""Released pinned memory that is held for the next snapshots, beside the cache's budget."""

SPARES = 2
"""States that a turn of a conversation saves: at its last message and at the generation header."""


class Blocks:
    """Hands out blocks. What nobody uses any more is kept and used again.

    Pinning beside a running device would hold up its kernels, so `spare` does it while nothing runs.
    """

    def __init__(self) -> None:
        self.pinned = HostBuffer(1).pinned
        HostBuffer.keep(KEPT_BYTES)

    def take(self, size: int) -> Block:
        """A block of ``size`` bytes, uninitialised; MemoryError when there is no memory."""
        return np.frombuffer(memoryview(HostBuffer(size)), np.uint8)

    def spare(self, size: int) -> None:
        """Pin memory for the states of the next turn, ``size`` bytes each, unless enough is kept."""
        if self.pinned and size and SPARES * size <= KEPT_BYTES and HostBuffer.kept(size) < SPARES:
            # Released at once, all of them are kept.
            _ = [HostBuffer(size) for _ in range(SPARES)]
