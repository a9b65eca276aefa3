"""Copies in RAM of rows that the device holds, made ahead of evictions and for the disk.

The engine's thread calls everything here. A copy runs during later evaluations, so another thread
may read a block only after `SequenceMemory.synchronize`, which `DeviceCopies.fetch_rows_now` calls.

Blocks that wait for the disk are not counted by the cache: `DeviceLimits.max_unwritten` limits
them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

from pyctl.cache.device_limits import DeviceLimits
from pyctl.cache.held_segments import HeldSegments
from pyctl.cache.ports import SequenceMemory
from pyctl.cache.snapshot import Block, Segment, Snapshot
from pyctl.errors import StateError

__all__ = ["DeviceCopies"]

log = logging.getLogger(__name__)

SPARE_STATES = 4
SPARE_PART = 4
"""Rows that wait leave room for this number of states, or this part of the bytes that may wait, if
less: without memory that is ready a state takes a hundred milliseconds to be saved instead of six
(bench/results/gpu-long.md).
"""


class DeviceCopies:
    """The copies in RAM of the rows of ``held``, which the device of ``memory`` holds.

    Attributes:
        limits: The limit of the bytes that may wait for the disk.
    """

    def __init__(
        self, memory: SequenceMemory, held: HeldSegments, limits: DeviceLimits = DeviceLimits()
    ) -> None:
        self.limits = limits
        self._memory = memory
        self._held = held
        self._pool = held.pool
        self._budget = held.budget
        # A block that was copied for the disk also serves the cache, as long as it is alive.
        self._fetched: weakref.WeakKeyDictionary[Segment, weakref.ref[Block]] = (
            weakref.WeakKeyDictionary()
        )

    def copy_within_headroom(self, *segments: Segment) -> None:
        """Start to copy rows that the disk will need, as far as RAM has room to spare for them."""
        for segment in segments:
            if segment.device_only_bytes and not segment.file.is_there:
                try:
                    self._copy_if_room(segment)
                except (StateError, MemoryError) as error:
                    log.warning("cannot copy rows to RAM: %s", error)

    @property
    def _max_unwritten(self) -> int:
        """The maximum of bytes that may wait for the disk, on top of the cache."""
        return self.limits.max_unwritten(self._budget.limit)

    @property
    def _headroom(self) -> int:
        """The bytes on top of the cache that copied rows leave free for states."""
        return min(
            SPARE_STATES * self._memory.state_size(0),
            self._max_unwritten // SPARE_PART,
        )

    @property
    def max_read(self) -> int | None:
        """The maximum of bytes in RAM of a snapshot that is read from disk, before the device has
        its rows; None for no limit.
        """
        is_bounded = self._memory.shape.can_hold and self._budget.limit is not None
        return self._max_unwritten if is_bounded else None

    def is_backlog_full(self, n_more: int = 0) -> bool:
        """Return whether more bytes wait for the disk than may.

        These are the bytes of complete blocks that the cache does not count, and ``n_more`` further
        bytes.
        """
        blocks = self._memory.block_bytes()
        maximum = self._max_unwritten
        return blocks.used - blocks.in_flight - self._pool.n_bytes + n_more > maximum

    def copy_one(self) -> bool:
        """Start to copy the rows of one segment to RAM, if RAM has room to spare: of those that
        only the device has, the ones on which the most prompts are expected to resume. Return False
        if nothing was copied.
        """
        for segment in self._held.only_held() if self._memory.shape.can_hold else ():
            try:
                if self._copy_if_room(segment):
                    return True
            except (StateError, MemoryError) as error:
                log.warning("cannot copy rows to RAM: %s", error)
                return False
        return False

    def exceeds_backlog(self, snapshot: Snapshot) -> bool:
        """Return whether the rows of ``snapshot`` that are neither in RAM nor on disk have more
        bytes than may wait for the disk on top of the cache.
        """
        n_bytes = sum(each.device_only_bytes for each in snapshot.chain if not each.file.is_there)
        return n_bytes > self._max_unwritten - self._headroom

    def fetch_rows(self, segments: Sequence[Segment]) -> list[Block]:
        """Return the rows of ``segments`` as blocks in RAM, complete after `synchronize`. Raises
        MemoryError if too many bytes would wait for the disk.
        """
        n_bytes = sum(each.device_only_bytes for each in segments)
        if n_bytes and self.is_backlog_full(n_bytes + self._headroom):
            raise MemoryError("RAM has no room for rows that wait for the disk")
        return [
            each.rows if each.rows.size or each.held is None else self.fetch(each)
            for each in segments
        ]

    def fetch_rows_now(self, segments: Sequence[Segment]) -> list[Block]:
        """Return the rows of ``segments`` as blocks in RAM that are complete; MemoryError as in
        `fetch_rows`.
        """
        rows = self.fetch_rows(segments)
        self._memory.synchronize()
        return rows

    def _copy_if_room(self, segment: Segment) -> bool:
        """Start to copy the rows of ``segment`` to RAM; return False if RAM has no room to spare
        for them.
        """
        if not self._held.make_room(segment, segment.device_only_bytes, only_if_free=True):
            return False
        self._pool.add_rows(segment, self.fetch(segment))
        return True

    def fetch(self, segment: Segment) -> Block:
        """Start to copy the rows of ``segment``, which the device holds; return their block."""
        known = self._fetched.get(segment)
        block = known() if known is not None else None
        if block is None:
            assert segment.held is not None
            block = self._memory.cells.fetch(segment.held, segment.start, segment.end)
            self._fetched[segment] = weakref.ref(block)
        return block
