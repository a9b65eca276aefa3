"""Held rows on the device: kept while cells are free, then moved to RAM or dropped."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from pyctl.cache.ports import MAX_UNWRITTEN_BYTES, SequenceMemory
from pyctl.cache.positions import clip_reply_spans, ends_within, last_end
from pyctl.cache.ram import RamCache
from pyctl.cache.sequence import Coverage, LiveSequence
from pyctl.cache.snapshot import NOTHING, Block, Segment, Snapshot, needed_by
from pyctl.errors import StateError
from pyctl.prompt import as_tokens
from pyctl.settings.limit import limit

__all__ = ["DeviceCounts", "DeviceTier", "MakeRoom", "max_unwritten"]

log = logging.getLogger(__name__)

MakeRoom: TypeAlias = Callable[[int, int], bool]
"""Frees so many cells, of which so many may be where held rows lie already; False if they are too
few.
"""

UNWRITTEN_PART = 2
"""Rows of the device that wait to be written may take RAM on top of the cache: its budget over
this.
"""


SPARE_STATES = 4
SPARE_PART = 4
"""Rows that wait leave room for so many states, or this part of what may wait, whichever is less:
without memory that is ready a state takes a hundred milliseconds to be saved instead of six
(bench/results/gpu-long.md).
"""


PIECE_BYTES = limit(
    2**28,
    "rows copied from the device in one segment",
    "longer segments are split",
    "memory",
    "bytes",
)


def max_unwritten(budget: int | None) -> int:
    """Bytes on top of a cache of ``budget`` that may wait for the disk."""
    return max(MAX_UNWRITTEN_BYTES, (budget or 0) // UNWRITTEN_PART)


@dataclass
class DeviceCounts:
    """Sums since the start, in rows: ``kept`` on the device for snapshots, ``returned`` to a
    sequence from there, ``to_ram`` when cells ran short or there was time, and ``lost`` since RAM
    had no room that was worth less.
    """

    kept: int = 0
    returned: int = 0
    to_ram: int = 0
    lost: int = 0


class DeviceTier:
    """Keeps rows of the segments of ``cache`` on the device of ``memory``, until others need the
    cells.

    What ``memory`` held before goes. One that cannot hold rows copies them to RAM at once. What
    fails here is a snapshot less.
    """

    def __init__(self, memory: SequenceMemory, cache: RamCache) -> None:
        self._memory = memory
        self._cache = cache
        self.counts = DeviceCounts()
        self.locked = cache.locked
        self._fetched: weakref.WeakKeyDictionary[Segment, weakref.ref[Block]] = (
            weakref.WeakKeyDictionary()
        )
        cache.pool.on_drop = self._release
        if cache.enabled:
            memory.release_all()

    @property
    def is_pool(self) -> bool:
        """Whether what needs a cell needs a certain one: `vacate` is for this, `shrink` for all
        others.
        """
        return self._memory.shape.is_pool

    @property
    def n_cells(self) -> int:
        """Cells that nothing but these rows takes."""
        return self._memory.n_held if self._memory.shape.can_hold else 0

    # -- keeping
    # ----------------------------------------------------------------------------------

    def rows_size(self, first: int, last: int) -> int:
        """Bytes of RAM that a new segment of rows [first, last) takes."""
        shape = self._memory.shape
        return shape.sizes.draft_rows(first, last) + (
            0 if shape.can_hold else shape.sizes.rows(first, last)
        )

    def segment(self, seq: LiveSequence, covered: Coverage) -> Segment:
        """The rows of ``seq`` that are not ``covered``: the deepest segment, if they are more than
        should leave the device at once. StateError or MemoryError leave no trace.
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
        ends = ends_within(seq.ends, first, last)
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
        """The rows of ``seq`` from ``first`` on in parts of PIECE_BYTES at most, which end at batch
        ends if they can.

        Rows that cannot be held are in RAM in any case.
        """
        n_bytes = self._memory.shape.sizes.rows(first, seq.n) if self._memory.shape.can_hold else 0
        maximum = (
            seq.n if n_bytes <= PIECE_BYTES else max((seq.n - first) * PIECE_BYTES // n_bytes, 1)
        )
        while seq.n - first > maximum:
            end = last_end(seq.ends, first + maximum)
            last = end if end > first else first + maximum
            yield first, last
            first = last
        yield first, seq.n

    def hold(self, snapshot: Snapshot, seq: LiveSequence) -> None:
        """Let rows of ``snapshot``, all of which ``seq`` holds, stay where it has them, even if RAM
        has a copy.
        """
        for segment, last in snapshot.chain.items() if self._memory.shape.can_hold else ():
            if segment.held is None and not segment.dropped and last == segment.end:
                with contextlib.suppress(StateError):
                    segment.held = self._memory.hold(seq.id, segment.start, last)

    def drop_ram_copies(self, snapshot: Snapshot) -> bool:
        """Give up copies in RAM of rows that the device holds, of segments that the cache has not
        taken yet; False if there are none.
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
        """Let go what the device holds for a snapshot that the cache did not take."""
        for segment in snapshot.chain:
            if not segment.alive and segment.held is not None:
                self._release(segment)
                if not segment.rows.size:  # they are nowhere now
                    segment.drop()

    def n_ready(self, snapshot: Snapshot, first: int, last: int) -> int:
        """How many rows [first, last) of ``snapshot`` lie in their own cells, and need no further
        ones.
        """
        n_ready = 0
        for segment, upto in snapshot.chain.items():
            start = max(segment.start, first)
            stop = min(upto, last)
            if segment.held is not None and start < stop:
                n_ready += self._memory.n_own(segment.held, start, stop)
        return n_ready

    def make_cells(
        self,
        snapshot: Snapshot,
        first: int,
        last: int,
        others: Collection[Snapshot],
        make_room: MakeRoom,
    ) -> int:
        """Have cells for rows [first, last) of ``snapshot``, which a sequence lacks; return how
        many lie on the device in their own.

        Those that RAM also has may be evicted for it, and need other cells then. ``others`` are
        evicted only if there is not enough room with them.
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
        """Make room for the rows, again whenever that has evicted some of them; return how many
        remain, and whether the room is enough.
        """
        n_ready = self.n_ready(snapshot, first, last)
        while make_room(last - first, n_ready):
            n_before = n_ready
            n_ready = self.n_ready(snapshot, first, last)
            if n_ready >= n_before:
                return n_ready, True
        return n_ready, False

    def _release(self, segment: Segment) -> None:
        """Let its rows go from the device."""
        if segment.held is not None:
            self._memory.release(segment.held)
            segment.held = None

    # -- giving up
    # ----------------------------------------------------------------------------------

    def shrink(self, maximum: int) -> bool:
        """Reduce these rows to ``maximum`` cells; rows of least worth move to RAM or are dropped.

        False if that would take rows that only the device has of locked snapshots.
        """
        while (n_before := self.n_cells) > maximum:
            for segment in self._cache.device_eviction_order(self._n_freed):
                self._evict(segment)
                if self.n_cells <= maximum:
                    return True
            if self.n_cells == n_before:
                return False
        return True

    def vacate(self, first: int, last: int, coming: Snapshot | None = None) -> None:
        """In a pool, have nothing held where rows [first, last) go but those that are ``coming``
        and lie there already.

        What is in the way goes to RAM, or away if that has no room for it that is worth less;
        locked snapshots make no room.
        """
        if not self.n_cells:
            return
        wanted = coming.chain if coming is not None else {}
        for segment in self._cache.segments():
            if (
                segment.start >= last
                or segment.end <= first
                or wanted.get(segment, 0) >= min(segment.end, last)
            ):
                continue
            if segment.held is not None:  # else it has gone with one before
                self._evict(segment)

    def can_shrink(self, maximum: int, likely: float) -> bool:
        """Whether `shrink` takes only rows that RAM also has, or that fewer prompts than ``likely``
        will need.
        """
        n_over = self.n_cells - maximum
        if n_over <= 0:
            return True
        staying = needed_by(self._cache.locks)
        expected = self._cache.likely()
        for segment in self._cache.segments():
            if segment.held is None or not (
                segment.rows.size or expected.get(segment, math.inf) < likely
            ):
                continue
            if segment.rows.size or segment not in staying:
                n_over -= self._n_freed(segment)
        return n_over <= 0

    def to_ram(self, snapshot: Snapshot) -> None:
        """Have all rows of a retained ``snapshot`` in RAM and nowhere else; StateError or
        MemoryError if that fails.
        """
        for segment in snapshot.chain:
            if segment.only_held_bytes:
                self._copy(segment)
            self._release(segment)

    def copy_spare(self, *segments: Segment) -> None:
        """Start to copy rows that the disk will need, as far as RAM has room to spare for them."""
        for segment in segments:
            if segment.only_held_bytes and not segment.file.is_there:
                try:
                    self._copy_if_spare(segment)
                except (StateError, MemoryError) as error:
                    log.warning("cannot copy rows to RAM: %s", error)

    @property
    def _spare(self) -> int:
        """Bytes on top of the cache that rows leave to states."""
        return min(
            SPARE_STATES * self._memory.state_size(0),
            max_unwritten(self._cache.budget) // SPARE_PART,
        )

    @property
    def max_read(self) -> int | None:
        """Bytes of a snapshot from disk that may be in RAM at a time before the device has them;
        None: no bound.
        """
        is_bounded = self._memory.shape.can_hold and self._cache.budget is not None
        return max_unwritten(self._cache.budget) if is_bounded else None

    def is_behind(self, n_more: int = 0) -> bool:
        """Whether more bytes than may wait for the disk are neither counted by the cache nor on
        their way.
        """
        blocks = self._memory.block_bytes()
        maximum = max_unwritten(self._cache.budget)
        return blocks.used - blocks.in_flight - self._cache.n_bytes + n_more > maximum

    def copy_one(self) -> bool:
        """Copy the likeliest rows that RAM has not got and has room to spare for; False if there
        are none.
        """
        for segment in self._cache.only_held() if self._memory.shape.can_hold else ():
            try:
                if self._copy_if_spare(segment):
                    return True
            except (StateError, MemoryError) as error:
                log.warning("cannot copy rows to RAM: %s", error)
                return False
        return False

    def is_large(self, snapshot: Snapshot) -> bool:
        """Whether RAM and the disk lack more rows of it than may wait for the disk on top of the
        cache.
        """
        n_bytes = sum(each.only_held_bytes for each in snapshot.chain if not each.file.is_there)
        return n_bytes > max_unwritten(self._cache.budget) - self._spare

    def rows_of(self, segments: Sequence[Segment]) -> list[Block]:
        """Copies of their rows as bytes, there after `synchronize`; MemoryError if too much would
        wait for the disk.
        """
        n_bytes = sum(each.only_held_bytes for each in segments)
        if n_bytes and self.is_behind(n_bytes + self._spare):
            raise MemoryError("RAM has no room for rows that wait for the disk")
        return [
            each.rows if each.rows.size or each.held is None else self._fetch(each)
            for each in segments
        ]

    def rows_now(self, segments: Sequence[Segment]) -> list[Block]:
        """Return the block once its bytes are there."""
        rows = self.rows_of(segments)
        self._memory.synchronize()
        return rows

    def evict_all(self) -> None:
        """Take everything from the device, which is about to be freed; what RAM has no room for is
        evicted.
        """
        for segment in self._cache.segments():
            if segment.rows.size:
                self._release(segment)
        for segment in self._cache.only_held():
            if not segment.dropped:
                self._evict(segment)
        self._memory.synchronize()

    def _n_freed(self, segment: Segment) -> int:
        assert segment.held is not None
        return self._memory.n_own(segment.held, segment.start, segment.end)

    def _evict(self, segment: Segment) -> None:
        """Take a segment from the device: to RAM, or away with whatever needs it."""
        if not segment.rows.size:
            try:
                kept = self._memory.shape.can_hold and self._copy(segment)
            except (StateError, MemoryError) as error:
                log.warning("copy of rows to RAM failed: %s", error)
                kept = False
            if not kept:
                self._drop_held(segment)
        self._release(segment)

    def _copy_if_spare(self, segment: Segment) -> bool:
        """Start to copy rows to RAM; False if it has no room to spare for them."""
        if not self._cache.make_room_for_rows(segment, segment.only_held_bytes, only_if_free=True):
            return False
        self._cache.pool.add_rows(segment, self._fetch(segment))
        return True

    def _copy(self, segment: Segment) -> bool:
        """Copy rows to RAM; False if there is no room for them."""
        assert segment.held is not None
        if not self._cache.make_room_for_rows(segment, segment.held.n_bytes):
            return False
        self.counts.to_ram += segment.held.n_cells
        self._cache.pool.add_rows(segment, self._fetch(segment))
        return True

    def _fetch(self, segment: Segment) -> Block:
        known = self._fetched.get(segment)
        block = known() if known is not None else None
        if block is None:
            assert segment.held is not None
            block = self._memory.fetch(segment.held, segment.start, segment.end)
            self._fetched[segment] = weakref.ref(block)
        return block

    def _drop_held(self, segment: Segment) -> None:
        assert segment.held is not None
        self.counts.lost += segment.held.n_cells
        try:
            self._cache.evict_dependents(segment)
        except ValueError:  # pinned, but the machine has no memory for it
            for snapshot in self._cache.snapshots():
                if segment in snapshot.chain:
                    self._cache.drop(snapshot)
