"""A snapshot that is being read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyctl.cache.reads import Reading, Reads, finished
from pyctl.cache.snapshot import NOTHING, Segment, Snapshot
from pyctl.errors import StateError

__all__ = ["PendingSnapshot"]


class PendingSnapshot:
    """A snapshot whose file is being read. It is whole only after `complete`, and has one reader.

    Attributes:
        snapshot: The snapshot, whose segments fill as the reads end.
        is_lost: Whether a read has failed; the reader then gets StateError.
        is_large: Whether RAM should not hold all of it at once. The reads of some segments are then
            deferred, and start one by one as `free_rows` makes room.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        pending_reads: Mapping[Segment, Reads],
        state: Reads,
        *,
        done: Callable[[], None],
        failed: Callable[[Exception], None],
        deferred_reads: Mapping[Segment, Callable[[], Reads]] | None = None,
    ) -> None:
        """Wait for the reads of each segment, ``pending_reads``, and of the ``state``.

        ``deferred_reads`` start later, in their order. ``done`` is called once when all reads have
        succeeded, ``failed`` with the first error.
        """
        self.snapshot = snapshot
        self.is_lost = False
        self.is_large = bool(deferred_reads)
        self._pending_reads = dict(pending_reads)
        self._deferred_reads = dict(deferred_reads or {})
        self._state = state
        self._done = done
        self._failed = failed

    def cancel(self) -> None:
        """End the reads that have not started."""
        for reads in (*self._pending_reads.values(), self._state):
            reads.cancel()

    def rows(self, segment: Segment) -> Reading[None]:
        """Wait until the rows of ``segment`` are in RAM and verified. Deferred reads before it
        start first.
        """
        while segment in self._deferred_reads:
            self._start_next()
        if segment in self._pending_reads:
            yield from self._wait(self._pending_reads[segment])

    def has_begun(self, segment: Segment) -> bool:
        """Return whether the reads of ``segment`` have started."""
        return segment not in self._deferred_reads

    def free_rows(self, segment: Segment) -> None:
        """Drop the rows of ``segment`` from RAM, since the device has them, and start the next
        deferred read in their place.
        """
        segment.rows = NOTHING
        if self._deferred_reads.pop(segment, None) is None and self._deferred_reads:
            self._start_next()

    def _start_next(self) -> None:
        segment = next(iter(self._deferred_reads))
        try:
            self._pending_reads[segment] = self._deferred_reads.pop(segment)()
        except Exception as error:  # such as no memory for it
            raise self._fail(error) from error

    def state(self) -> Reading[None]:
        """Wait until the state is in RAM and verified."""
        yield from self._wait(self._state)

    def complete(self) -> Reading[Snapshot]:
        """Wait for all reads, and return the snapshot."""
        while self._deferred_reads:
            self._start_next()
        for reads in [*self._pending_reads.values(), self._state]:
            yield from self._wait(reads)
        self._done()
        return self.snapshot

    def _wait(self, reads: Reads) -> Reading[None]:
        try:
            yield from finished(reads)
        except Exception as error:
            raise self._fail(error) from error

    def _fail(self, error: Exception) -> StateError:
        """Cancel the other reads after ``error``, and return the StateError for the reader."""
        self.cancel()
        self.is_lost = True
        self._failed(error)
        return StateError(f"disk cache: {str(error) or type(error).__name__}")
