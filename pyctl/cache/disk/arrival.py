"""A snapshot on its way from the disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pyctl.cache.disk.readers import DiskReads, Reading, finished
from pyctl.cache.snapshot import NOTHING, Segment, Snapshot
from pyctl.errors import StateError

__all__ = ["Arrival"]


class Arrival:
    """A snapshot that is being read. One reader may use ``snapshot``; it is whole only after
    `complete`.

    ``coming`` are the running reads per segment, ``state`` the state's. ``done`` is called once
    when all have succeeded, ``failed`` with the first error; the reader then gets StateError, and
    ``is_lost`` is set. A snapshot ``is_large`` if RAM should not hold all of it: `free_rows` frees
    segments, and the reads of ``later`` ones start in this order.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        coming: Mapping[Segment, DiskReads],
        state: DiskReads,
        *,
        done: Callable[[], None],
        failed: Callable[[Exception], None],
        later: Mapping[Segment, Callable[[], DiskReads]] | None = None,
    ) -> None:
        self.snapshot = snapshot
        self.is_lost = False
        self._coming = dict(coming)
        self._state = state
        self._later = dict(later or {})
        self.is_large = bool(later)
        self._done = done
        self._failed = failed

    def cancel(self) -> None:
        """End the reads that have not started."""
        for reads in (*self._coming.values(), self._state):
            reads.cancel()

    def rows(self, segment: Segment) -> Reading[None]:
        """Wait until the rows of ``segment`` are here, verified."""
        while segment in self._later:
            self._start_next()
        if segment in self._coming:
            yield from self._wait(self._coming[segment])

    def has_begun(self, segment: Segment) -> bool:
        """Whether `rows` has nothing to start."""
        return segment not in self._later

    def free_rows(self, segment: Segment) -> None:
        """The device has the rows of ``segment``, and RAM need not: the next may come in their
        place.
        """
        segment.rows = NOTHING
        if self._later.pop(segment, None) is None and self._later:
            self._start_next()

    def _start_next(self) -> None:
        segment = next(iter(self._later))
        try:
            self._coming[segment] = self._later.pop(segment)()
        except Exception as error:  # such as no memory for it
            raise self._fail(error) from error

    def state(self) -> Reading[None]:
        """Wait until the state is here, verified."""
        yield from self._wait(self._state)

    def complete(self) -> Reading[Snapshot]:
        """The snapshot when all of it is here."""
        while self._later:
            self._start_next()
        for reads in [*self._coming.values(), self._state]:
            yield from self._wait(reads)
        self._done()
        return self.snapshot

    def _wait(self, reads: DiskReads) -> Reading[None]:
        try:
            yield from finished(reads)
        except Exception as error:
            raise self._fail(error) from error

    def _fail(self, error: Exception) -> StateError:
        """Give up the rest after ``error``; what the readers get."""
        self.cancel()
        self.is_lost = True
        self._failed(error)
        return StateError(f"disk cache: {error or type(error).__name__}")
