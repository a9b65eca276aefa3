"""A candidate whose snapshot is being read from disk: its rows are loaded while the next arrive."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyctl.cache.candidates import Candidate
from pyctl.cache.device_tier import DeviceTier
from pyctl.cache.ports import SequenceMemory, Store
from pyctl.cache.ram import RamCache
from pyctl.cache.reads import Reading
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import Segment
from pyctl.errors import StateError

if TYPE_CHECKING:
    from pyctl.cache.pending_snapshot import PendingSnapshot

__all__ = ["ArrivingCandidate"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ArrivingCandidate(Candidate):
    """A candidate at the end of a snapshot that is being read from disk.

    Its segments are not in the cache until `enter`; the device may hold them before that. A large
    snapshot is never in RAM as a whole: the rows that the sequence has move to the device, and free
    RAM for the next reads.

    Attributes:
        arrival: The snapshot that is being read.
        disk: The store that it comes from.
        cache: The cache that it enters.
        device: The tier that holds its rows.
    """

    arrival: PendingSnapshot
    disk: Store
    cache: RamCache
    device: DeviceTier

    def load(self, live: LiveSequence, memory: SequenceMemory) -> Reading[None]:
        """Append the rows segment by segment as they arrive, and load the state."""
        arrival = self.arrival
        snapshot = arrival.snapshot
        if arrival.is_large:
            yield from self._pass_live_rows(live, memory)
        n = self.n_kept
        while n < snapshot.n:
            segment = snapshot.segment_at(n + 1)
            yield from arrival.rows(segment)
            last = snapshot.chain[segment]
            memory.restore(live.id, n, snapshot.spans(n, last))
            if arrival.is_large:
                self._move_to_device(segment, last, live, memory)
            n = last
        yield from arrival.state()
        memory.restore(live.id, snapshot.n, (), snapshot.state)

    def enter(self, live: LiveSequence) -> Reading[bool]:
        """Put the complete snapshot into RAM; return False if there is no room, or if a read of it
        failed.

        Rows that find no room stay only on the device, where ``live`` has them.
        """
        self.disk.count_hit(self.arrival.snapshot)
        try:
            snapshot = yield from self.arrival.complete()
        except StateError as error:  # rows that the live sequence had already
            log.warning("cannot load all of a snapshot from disk: %s", error)
            return False
        if any(segment.dropped for segment in snapshot.chain):
            return False  # a snapshot that shared them was dropped meanwhile
        self.device.hold_rows(snapshot, live)
        try:
            if self.cache.add(snapshot):
                return True
            return self.device.drop_ram_copies(snapshot) and self.cache.add(snapshot)
        finally:
            self.device.release_rejected(snapshot)

    def discard(self, cache: RamCache) -> None:
        """Drop the snapshot on disk, whose bytes do not fit the model, unless they never came or
        rows that it shares with a dropped snapshot may be the cause.
        """
        snapshot = self.arrival.snapshot
        if not self.arrival.is_lost and not any(segment.dropped for segment in snapshot.chain):
            self.disk.discard(snapshot)

    def close(self) -> None:
        """End the reads that have not started, and let the device release rows that are not in
        RAM.
        """
        self.arrival.cancel()
        self.device.release_rejected(self.arrival.snapshot)

    def _pass_live_rows(self, live: LiveSequence, memory: SequenceMemory) -> Reading[None]:
        """Let the device hold the rows that ``live`` keeps: a segment whose read has not begun need
        not be read.
        """
        for segment, last in self.arrival.snapshot.chain.items():
            if last > self.n_kept:
                continue
            if self.arrival.has_begun(segment):
                yield from self.arrival.rows(segment)
            self._move_to_device(segment, last, live, memory)

    def _move_to_device(
        self, segment: Segment, last: int, live: LiveSequence, memory: SequenceMemory
    ) -> None:
        """Let the device hold the rows of ``segment``, which ``live`` has up to ``last``, instead
        of RAM.
        """
        if last == segment.end and segment.held is None and not segment.alive:
            segment.held = memory.cells.hold_rows(live.id, segment.start, last)
            self.arrival.free_rows(segment)
