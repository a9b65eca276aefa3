"""The bytes of a snapshot in memory: those in RAM, or those that the device holds."""

from __future__ import annotations

from collections.abc import Collection

from pyctl.cache.reads import Reading
from pyctl.cache.snapshot import Rows, Segment, Snapshot, State
from pyctl.engine.canary.skipped import SkippedError

__all__ = ["MemorySource"]


class MemorySource:
    """The `SnapshotSource` of a ``snapshot`` of the cache: of rows in RAM, or of ``held`` segments
    those on the device.

    The snapshot may be dropped while it is read: then `rows` raises SkippedError.
    """

    def __init__(self, snapshot: Snapshot, held: Collection[Segment] = ()) -> None:
        self.snapshot = snapshot
        self._held = held

    def rows(self, segment: Segment) -> Reading[Rows]:
        """Return the rows of ``segment``. Raises SkippedError if they were dropped."""
        yield from ()
        if segment.dropped:
            raise SkippedError("gone")
        if segment in self._held:
            return segment.parts
        return Rows(segment.rows, segment.draft_rows)

    def state(self) -> Reading[State]:
        """Return the state."""
        yield from ()
        return self.snapshot.state
