"""Rows on the device that no sequence needs: held while cells are free, then moved to RAM or
dropped.

The engine's thread calls everything here; the disk's thread never touches the device.

A segment leaves the device in three steps (`DeviceTier._evict`). First RAM makes room for its rows;
if the victims are worth more, all snapshots that need the segment are evicted instead. Then the
copy to RAM starts, and its block enters the pool. Last, the cells are released, although the copy
may still run: later evaluations wait for it before they write to these cells
(csrc/device/transfer.h). The memory may load such a block at once. Another thread may read it only
after `synchronize`, which `DeviceCopies.fetch_rows_now` and `WriteBack` call.

An eviction may release more than its own segment: when the last snapshot that needs a segment goes,
the pool calls `DeviceTier._release`. Loops over segments therefore test whether the device still
holds each of them, and count free cells again after each eviction.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from pyctl.cache.device_copies import DeviceCopies
from pyctl.cache.device_limits import DeviceLimits
from pyctl.cache.ports import SequenceMemory
from pyctl.cache.positions import clip_reply_spans, ends_within, last_end
from pyctl.cache.ram import RamCache
from pyctl.cache.sequence import Coverage, LiveSequence
from pyctl.cache.snapshot import NOTHING, Segment, Snapshot, needed_by
from pyctl.errors import StateError
from pyctl.prompt import as_tokens

__all__ = ["DeviceCounts", "DeviceTier", "MakeRoom"]

log = logging.getLogger(__name__)

MakeRoom: TypeAlias = Callable[[int, int], bool]
"""Frees so many cells, of which so many may be where held rows lie already; False if they are too
few.
"""


@dataclass
class DeviceCounts:
    """Sums since the start, in rows.

    Attributes:
        kept: Rows that stayed on the device for snapshots.
        returned: Rows that a sequence took over from there.
        to_ram: Rows that were copied to RAM when cells ran short or there was time.
        lost: Rows that were dropped, since RAM had no room that was worth less.
    """

    kept: int = 0
    returned: int = 0
    to_ram: int = 0
    lost: int = 0


class DeviceTier:
    """The rows of the segments of ``cache`` that stay on the device of ``memory`` until others need
    the cells.

    A new tier releases the rows that ``memory`` held before. A memory that cannot hold rows copies
    them to RAM at once. A failed copy costs a snapshot, never a request.

    Attributes:
        counts: Sums of rows for the metrics.
        copies: The copies of these rows in RAM.
        locked: `RamCache.locked` of ``cache``.
    """

    def __init__(
        self, memory: SequenceMemory, cache: RamCache, limits: DeviceLimits = DeviceLimits()
    ) -> None:
        self._piece_bytes = limits.piece_bytes
        self._memory = memory
        self._cache = cache
        self.counts = DeviceCounts()
        self.copies = DeviceCopies(memory, cache.held, limits)
        self.locked = cache.locked
        cache.index.pool.on_drop = self._release
        if cache.enabled:
            memory.cells.release_all()

    @property
    def is_pool(self) -> bool:
        """True if each position of the sequence has one certain cell, which `vacate` frees;
        otherwise any free cell serves, and `shrink` frees some.
        """
        return self._memory.shape.is_pool

    @property
    def n_cells(self) -> int:
        """The number of cells that only these rows take."""
        return self._memory.cells.n_held_cells if self._memory.shape.can_hold else 0

    # -- keeping
    # ----------------------------------------------------------------------------------

    def rows_size(self, first: int, last: int) -> int:
        """Return the bytes of RAM that a new segment of rows [first, last) takes."""
        shape = self._memory.shape
        return shape.sizes.draft_rows(first, last) + (
            0 if shape.can_hold else shape.sizes.rows(first, last)
        )

    def segment(self, seq: LiveSequence, covered: Coverage) -> Segment:
        """Save the rows of ``seq`` that are not ``covered``, and return the deepest new segment.

        There are several new segments if the rows have more than `DeviceLimits.piece_bytes`:
        smaller ones can leave the device one at a time. StateError or MemoryError leave no trace.
        """
        made: list[Segment] = []
        try:
            for start, last in self._pieces(seq, covered.n):
                made.append(self._segment(seq, start, last, made[-1] if made else covered.segment))
        except (StateError, MemoryError):
            for segment in made:
                self._release(segment)
            raise
        return made[-1]

    def _segment(self, seq: LiveSequence, first: int, last: int, parent: Segment | None) -> Segment:
        tokens = as_tokens(seq.tokens[first:last])
        ends = ends_within(seq.batch_ends, first, last)
        reply_spans = clip_reply_spans(seq.reply_spans, first, last)
        rows = self._memory.save_rows(seq.id, first, last, hold=self._memory.shape.can_hold)
        if rows.held is not None:
            self.counts.kept += rows.held.n_cells
        return Segment(
            first,
            tokens,
            rows.block,
            parent,
            ends,
            reply_spans,
            draft_rows=rows.draft,
            held=rows.held,
        )

    def _pieces(self, seq: LiveSequence, first: int) -> Iterator[tuple[int, int]]:
        """Yield the rows of ``seq`` from ``first`` on as ranges [first, last) of at most
        `DeviceLimits.piece_bytes` each, which end at batch ends where possible.

        A memory that cannot hold rows gets one range: all of its rows are in RAM in any case.
        """
        n_bytes = self._memory.shape.sizes.rows(first, seq.n) if self._memory.shape.can_hold else 0
        piece_bytes = self._piece_bytes
        maximum = seq.n
        if n_bytes > piece_bytes:
            maximum = max((seq.n - first) * piece_bytes // n_bytes, 1)
        while seq.n - first > maximum:
            end = last_end(seq.batch_ends, first + maximum)
            last = end if end > first else first + maximum
            yield first, last
            first = last
        yield first, seq.n

    def hold_rows(self, snapshot: Snapshot, seq: LiveSequence) -> None:
        """Hold the rows of ``snapshot`` in the cells where ``seq`` has them, even if RAM has a
        copy. ``seq`` must have all of these rows.
        """
        if not self._memory.shape.can_hold:
            return
        for segment, last in snapshot.chain.items():
            if segment.held is None and not segment.dropped and last == segment.end:
                with contextlib.suppress(StateError):
                    segment.held = self._memory.cells.hold_rows(seq.id, segment.start, last)

    def drop_ram_copies(self, snapshot: Snapshot) -> bool:
        """Drop the copies in RAM of rows that the device holds, of segments that the cache has not
        taken yet; return False if there are none.
        """
        copies = [
            each
            for each in snapshot.chain
            if each.held is not None and not each.alive and each.rows.size
        ]
        for segment in copies:
            segment.rows = NOTHING
        return bool(copies)

    def release_rejected(self, snapshot: Snapshot) -> None:
        """Release the cells that the device holds for a snapshot that the cache did not take."""
        for segment in snapshot.chain:
            if not segment.alive and segment.held is not None:
                self._release(segment)
                if not segment.rows.size:  # they are nowhere now
                    segment.drop()

    def n_ready(self, snapshot: Snapshot, first: int, last: int) -> int:
        """Return how many of rows [first, last) of ``snapshot`` lie in cells that neither a
        sequence nor other held rows have (`DeviceCells.n_exclusive_cells`): a sequence takes no
        further cells for them.
        """
        n_ready = 0
        for segment, upto in snapshot.chain.items():
            start = max(segment.start, first)
            stop = min(upto, last)
            if segment.held is not None and start < stop:
                n_ready += self._memory.cells.n_exclusive_cells(segment.held, start, stop)
        return n_ready

    def make_cells(
        self,
        snapshot: Snapshot,
        first: int,
        last: int,
        others: Collection[Snapshot],
        make_room: MakeRoom,
    ) -> int:
        """Free cells for rows [first, last) of ``snapshot``, which a sequence lacks; return the
        result of `n_ready` for these rows.

        The first attempt spares the snapshots ``others``, but may evict rows of ``snapshot`` that
        RAM also has: these need other cells then. If there is not enough room, the second attempt
        spares only ``snapshot``.
        """
        if self.is_pool:
            with self.locked(*others):
                self.vacate(first, last, snapshot)
            return self.n_ready(snapshot, first, last)
        n_ready = 0
        for staying in (others, (snapshot,)):
            with self.locked(*staying):
                n_ready, is_enough = self._free_cells(snapshot, first, last, make_room)
            if is_enough:
                break
        return n_ready

    def _free_cells(
        self, snapshot: Snapshot, first: int, last: int, make_room: MakeRoom
    ) -> tuple[int, bool]:
        """Call ``make_room`` until it evicts no row of ``snapshot``.

        Each row of ``snapshot`` that was evicted needs one more cell, so the room that was made
        before is too small. Returns `n_ready` for rows [first, last), and whether there is enough
        room.
        """
        n_ready = self.n_ready(snapshot, first, last)
        while make_room(last - first, n_ready):
            n_before = n_ready
            n_ready = self.n_ready(snapshot, first, last)
            if n_ready >= n_before:
                return n_ready, True
        return n_ready, False

    def _release(self, segment: Segment) -> None:
        """Release the cells of ``segment``, if the device holds its rows."""
        if segment.held is not None:
            self._memory.cells.release(segment.held)
            segment.held = None

    # -- giving up
    # ----------------------------------------------------------------------------------

    def shrink(self, maximum: int) -> bool:
        """Reduce these rows to ``maximum`` cells; rows of least worth move to RAM or are dropped.

        Returns False if the cells cannot be freed without dropping rows of locked snapshots that
        only the device has. A cell that two segments hold is free only when both are released, so
        another pass follows as long as a pass has freed some. Where two segments hold each cell
        that is left, no single one frees any: then the one of least worth is evicted first.
        """
        while (n_before := self.n_cells) > maximum:
            for segment in self._cache.held.eviction_order(self._n_freed):
                self._evict(segment)
                if self.n_cells <= maximum:
                    return True
            if self.n_cells == n_before and not self._evict_shared():
                return False
        return True

    def _evict_shared(self) -> bool:
        """Evict the segment of least worth, although others hold its cells; return whether there is
        one that may be evicted.
        """
        for segment in self._cache.held.eviction_order(lambda _: 1):
            self._evict(segment)
            if segment.held is None:
                return True
        return False

    def release_copies(self, maximum: int, staying: Collection[Segment]) -> bool:
        """Reduce these rows to ``maximum`` cells by those that RAM also has, but none of the
        segments ``staying``. Nothing is copied or lost. Return False if there are too few.
        """
        for segment in self._cache.held.eviction_order(self._n_freed):
            if self.n_cells <= maximum:
                break
            if segment.rows.size and segment not in staying:
                self._release(segment)
        return self.n_cells <= maximum

    def vacate(self, first: int, last: int, coming: Snapshot | None = None) -> None:
        """Evict all held rows of a pool from the cells of rows [first, last), except rows of
        ``coming``, which lie in their own cells already.

        The evicted rows move to RAM, or are dropped if RAM has no room for them that is worth less.
        A locked snapshot is not evicted from RAM for them.
        """
        if not self.n_cells:
            return
        needed = coming.chain if coming is not None else {}
        for segment in self._cache.segments():
            if (
                segment.start >= last
                or segment.end <= first
                or needed.get(segment, 0) >= min(segment.end, last)
            ):
                continue
            if segment.held is not None:  # else it has gone with one before
                self._evict(segment)

    def can_shrink(self, maximum: int, likely: float) -> bool:
        """Return whether `shrink` to ``maximum`` cells can do with rows that RAM also has, and rows
        that fewer than ``likely`` prompts are expected to resume on.
        """
        n_over = self.n_cells - maximum
        if n_over <= 0:
            return True
        staying = needed_by(self._cache.index.locks)
        resumes = self._cache.held.resumes
        for segment in self._cache.segments():
            if segment.held is None or not (segment.rows.size or resumes.on(segment) < likely):
                continue
            if segment.rows.size or segment not in staying:
                n_over -= self._n_freed(segment)
        return n_over <= 0

    def to_ram(self, snapshot: Snapshot) -> None:
        """Move all rows of a retained ``snapshot`` from the device to RAM. Raises StateError or
        MemoryError if that fails.
        """
        for segment in snapshot.chain:
            if segment.device_only_bytes:
                self._copy(segment)
            self._release(segment)

    def evict_all(self) -> None:
        """Evict everything from the device, which is about to be freed: to RAM, or away where RAM
        has no room. Copies are complete on return.

        Segments that RAM also has are released first. From then on their rows in RAM do not count
        as copies of rows on the device, which `HeldSegments.pay` drops to make room for the other
        segments.
        """
        for segment in self._cache.segments():
            if segment.rows.size:
                self._release(segment)
        for segment in self._cache.held.only_held():
            if not segment.dropped:
                self._evict(segment)
        self._memory.synchronize()

    def _n_freed(self, segment: Segment) -> int:
        assert segment.held is not None
        return self._memory.cells.n_exclusive_cells(segment.held, segment.start, segment.end)

    def _evict(self, segment: Segment) -> None:
        """Evict a segment from the device: to RAM, or away with all snapshots that need it. Rows
        of a suspended request that cannot be copied now stay.
        """
        if not segment.rows.size:
            try:
                is_in_ram = self._memory.shape.can_hold and self._copy(segment)
            except (StateError, MemoryError) as error:
                log.warning("copy of rows to RAM failed: %s", error)
                is_in_ram = False
            if not is_in_ram:
                if segment in needed_by(self._cache.index.retained):
                    return  # the request would fail, and others that lose less may make room
                self._drop_held(segment)
        self._release(segment)

    def _copy(self, segment: Segment) -> bool:
        """Start to copy the rows of ``segment`` to RAM, evicting others; return False if there is
        no room.
        """
        assert segment.held is not None
        if not self._cache.held.make_room(segment, segment.held.n_bytes):
            return False
        self.counts.to_ram += segment.held.n_cells
        self._cache.index.pool.add_rows(segment, self.copies.fetch(segment))
        return True

    def _drop_held(self, segment: Segment) -> None:
        assert segment.held is not None
        self.counts.lost += segment.held.n_cells
        try:
            self._cache.held.evict_dependents(segment)
        except ValueError:  # pinned, but the machine has no memory for it
            for snapshot in self._cache.snapshots():
                if segment in snapshot.chain:
                    self._cache.drop(snapshot)
