"""A snapshot on disk that is read again, one part at a time, with every checksum."""

from __future__ import annotations

from collections.abc import Callable

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.reads import Reading, finished
from pyctl.cache.snapshot import NOTHING, Block, Rows, Segment, Snapshot, State
from pyctl.disk.chain import StoredFile
from pyctl.disk.file_format import PartKind, StateName
from pyctl.disk.readers import RESTORE_SECONDS, DiskReads, Job, Readers

__all__ = ["StoredSource"]


class StoredSource:
    """The `SnapshotSource` of a snapshot on disk.

    A restore shares segments that RAM has. A check must not: the bytes of the files count. So the
    segments of ``snapshot`` are new ones that stay without rows, and the caller owns the blocks
    that `rows` and `state` return.
    """

    def __init__(
        self,
        top: StoredFile,
        chain: list[StoredFile],
        readers: Readers,
        space: Callable[[int], Block],
        sizes: BlockSizes | None,
    ) -> None:
        """Take the headers of a state and of its ``chain``, the first segment first. ``space``
        allocates blocks, shape (size,); ``sizes`` are the model's.
        """
        self._top = top
        self._readers = readers
        self._space = space
        self._sizes = sizes
        self._files: dict[Segment, StoredFile] = {}
        segment: Segment | None = None
        for stored in chain:
            segment = stored.segment(segment)
            self._files[segment] = stored
        name = top.header.name
        assert segment is not None
        assert isinstance(name, StateName)
        self.snapshot = Snapshot(name.prefix, segment, State(), top.header.exact)

    def rows(self, segment: Segment) -> Reading[Rows]:
        """Read the rows of ``segment``."""
        stored = self._files[segment]
        yield from self._finished(stored.make_space(self._space, self._sizes))
        rows = stored.outs.pop(PartKind.ROWS)
        draft_rows = stored.outs.pop(PartKind.DRAFT_ROWS, NOTHING)
        return Rows(rows, draft_rows)

    def state(self) -> Reading[State]:
        """Read the state."""
        yield from self._finished(self._top.make_space(self._space, self._sizes))
        return self._top.state()

    def _finished(self, jobs: list[Job]) -> Reading[None]:
        """Run ``jobs`` on the threads that read."""
        deadline = self._readers.clock() + RESTORE_SECONDS
        reads = DiskReads(self._readers.start(jobs), self._readers, deadline)
        try:
            yield from finished(reads)
        finally:
            reads.cancel()
