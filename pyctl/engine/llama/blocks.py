"""Memory for saved rows and states. Pinned memory takes a device's driver long to make, so it is made ahead."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from pyctl.cache.segment import Block
from pyctl.native import HostBuffer

__all__ = ["Blocks"]


class Blocks:
    """Hands out blocks; `expect` makes those that will be wanted on a thread of its own while the device computes.

    Without a device that pins memory, nothing is made ahead: plain memory is there at once.
    """

    def __init__(self) -> None:
        self.pinned = HostBuffer(1).pinned
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="pyctl-blocks")
        self._made: dict[int, deque[Future[HostBuffer]]] = defaultdict(deque)

    def expect(self, sizes: Sequence[int]) -> None:
        """Begin to make blocks of ``sizes`` bytes, in this order; give up what was expected before and not taken."""
        if not self.pinned:
            return
        spare, self._made = self._made, defaultdict(deque)
        for size in sizes:
            if spare[size]:
                self._made[size].append(spare[size].popleft())
            else:
                self._made[size].append(self._maker.submit(HostBuffer, size))
        for futures in spare.values():
            for future in futures:
                future.cancel()

    def take(self, size: int) -> Block:
        """A block of ``size`` bytes, uninitialised; MemoryError when there is no memory."""
        made = self._made.get(size)
        buffer = made.popleft().result() if made else HostBuffer(size)
        return np.frombuffer(memoryview(buffer), np.uint8)

    def close(self) -> None:
        """Give up what nobody took."""
        self._maker.shutdown(wait=True, cancel_futures=True)
        self._made.clear()
