"""Reading snapshots from a cache directory: every byte is verified, and damage is a miss."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from pyctl.cache.pending_snapshot import PendingSnapshot
from pyctl.cache.reads import Reading, finished
from pyctl.cache.snapshot import Block, Prefix, Segment, Snapshot
from pyctl.disk.chain import StoredFile, open_chain
from pyctl.disk.file_format import CorruptFileError, Name, SegmentName, StateName, parse
from pyctl.disk.model_folder import ModelFolder
from pyctl.disk.readers import RESTORE_SECONDS, DiskReads, Job, StalledReadError
from pyctl.disk.stored_source import StoredSource
from pyctl.prompt import Tokens, common_prefix

__all__ = ["StoreReader"]

log = logging.getLogger(__name__)


class StoreReader:
    """The reads of snapshots of the model of ``folder``, on the thread that drops snapshots.

    ``space`` allocates memory for blocks, shape (size,). `open` never waits for the drive: threads
    of the directory do. ``record_read`` gets the bytes and the seconds of each restore, and
    ``run_soon`` the removals of damaged files, to be called now or later; ``n_damaged`` counts
    these files.
    """

    def __init__(
        self,
        folder: ModelFolder,
        space: Callable[[int], Block] = lambda size: np.empty(size, np.uint8),
    ) -> None:
        self.folder = folder
        self.record_read: Callable[[int, float], None] = lambda n_bytes, seconds: None
        self.run_soon: Callable[[Callable[[], None]], None] = lambda function: function()
        self.n_damaged = 0
        self.space = space
        self._readers = folder.directory.readers
        self._shared: WeakValueDictionary[SegmentName, Segment] = WeakValueDictionary()
        self._has_stalled = False

    @property
    def is_stalled(self) -> bool:
        """True if an abandoned read has not returned yet."""
        if self._has_stalled and not self._readers.is_busy:
            self._has_stalled = False
            log.warning("disk cache: reads work again")
        return self._has_stalled

    def open(
        self,
        prefix: Prefix,
        tokens: Tokens,
        base: Snapshot | None = None,
        max_bytes: int | None = None,
    ) -> Reading[PendingSnapshot | None]:
        """Start to read the snapshot of ``prefix``, the first tokens of ``tokens``; None on a miss.

        Rows in ``base``, a snapshot of the same tokens that stays in memory meanwhile, are not
        read. Beyond ``max_bytes``, later parts are read as `PendingSnapshot.free_rows` frees
        earlier ones.

        Damage is a miss, at once or when it is found: the damaged file is removed with all files
        that need it. A disk that hangs is also a miss, and gets no further read before it has
        answered. Segments of earlier snapshots from here are shared, as long as RAM has them.
        """
        state = StateName.from_prefix(prefix)
        if self.is_stalled or not self.folder.contains(prefix) or tokens.size < prefix.n:
            return None
        deadline = self._readers.clock() + RESTORE_SECONDS
        try:
            opening = self._readers.start([partial(self._open_chain, state)])
            yield from finished(DiskReads(opening, self._readers, deadline))
            top, chain, stored_tokens = opening[0].result()
            if common_prefix(stored_tokens, tokens) < prefix.n:
                return None  # the digests are equal, the tokens are not
            return self._start_reads(top, _Chain(chain, base), deadline, max_bytes)
        except Exception as error:
            self._handle_failure(state, error)
            return None

    def source(self, prefix: Prefix) -> Reading[StoredSource | None]:
        """Open the snapshot of ``prefix`` to read its files again; return None on a miss.

        Raises CorruptFileError, StalledReadError or OSError: damaged files stay, for the caller to
        quarantine.
        """
        if self.is_stalled or not self.folder.contains(prefix):
            return None
        deadline = self._readers.clock() + RESTORE_SECONDS
        opening = self._readers.start([partial(self._open_chain, StateName.from_prefix(prefix))])
        try:
            yield from finished(DiskReads(opening, self._readers, deadline))
        except FileNotFoundError:
            return None
        top, chain, _ = opening[0].result()
        return StoredSource(top, chain, self._readers, self.space, self.folder.sizes)

    def discard(self, prefix: Prefix) -> None:
        """Remove a state that was read but is of no use to the model."""
        state = StateName.from_prefix(prefix)
        self._handle_failure(state, CorruptFileError(str(state), "refused by the model"))

    def _open_chain(self, state: StateName) -> tuple[StoredFile, list[StoredFile], Tokens]:
        """Return the headers of a state and of its chain, and the tokens of all: one reader reads
        them, which waits for no other.
        """

        def run(jobs: Iterable[Job]) -> None:
            for job in jobs:
                job()

        return open_chain(self.folder.path, state, self.folder.sizes, run)

    def _start_reads(
        self, top: StoredFile, chain: _Chain, deadline: float, max_bytes: int | None
    ) -> PendingSnapshot:
        """Start to read the state ``top`` and the rows of ``chain``, the shallowest segment first.

        Reads beyond ``max_bytes`` are deferred, but never all of them.
        """

        def read(jobs: list[Job]) -> DiskReads:
            return DiskReads(self._readers.start(jobs), self._readers, deadline)

        def read_rows(stored: StoredFile, segment: Segment) -> DiskReads:
            return read(stored.fill(segment, self.space, self.folder.sizes))

        n_bytes = 0
        pending: dict[Segment, DiskReads] = {}
        deferred: dict[Segment, Callable[[], DiskReads]] = {}
        segments: dict[SegmentName, Segment] = {}
        segment = chain.covered
        for stored in chain.files:
            shared = self._shared.get(stored.name)
            if shared is not None and shared.alive:
                segment = shared
            else:
                segment = stored.segment(segment)
                n_bytes += stored.large_bytes
                if max_bytes is None or n_bytes <= max_bytes or not pending:
                    pending[segment] = read_rows(stored, segment)
                else:
                    deferred[segment] = partial(read_rows, stored, segment)
            segments[stored.name] = segment
        assert segment is not None
        state = top.header.name
        assert isinstance(state, StateName)
        state_reads = read(top.make_space(self.space, self.folder.sizes))
        snapshot = Snapshot(state.prefix, segment, top.state(), top.header.exact)
        all_reads = (*pending.values(), state_reads)
        watch = _Stopwatch(future for reads in all_reads for future in reads.futures)
        n_read = snapshot.state.n_bytes + sum(each.n_bytes for each in pending)

        def done() -> None:
            self._shared.update(segments)
            if not deferred:  # which waited for others in between
                self.record_read(n_read, watch.seconds)

        return PendingSnapshot(
            snapshot,
            pending,
            state_reads,
            done=done,
            failed=partial(self._handle_failure, state),
            deferred_reads=deferred,
        )

    def _handle_failure(self, state: StateName, error: Exception) -> None:
        """Find out why a read of ``state`` failed, and have a damaged file removed."""
        if isinstance(error, StalledReadError):
            if not self._has_stalled:
                log.warning("disk cache: reads hang, evaluating instead until they work again")
            self._has_stalled = True
            return
        is_missing = isinstance(error, FileNotFoundError)
        file = str(state)
        if isinstance(error, CorruptFileError):
            file = error.file
        elif isinstance(error, FileNotFoundError):
            file = Path(error.filename).name
        elif isinstance(error, (OSError, MemoryError)):
            return  # a lack of memory or descriptors, or a drive that is away: no fault of the file
        else:
            log.error("cannot read %s", state, exc_info=error)
        name = parse(file)
        assert name is not None
        self.folder.directory.hide(self.folder.fingerprint, state)
        self.run_soon(partial(self._remove_damaged, name, is_missing))

    def _remove_damaged(self, name: Name, is_missing: bool) -> None:
        """Remove a damaged file with all that need it. One that was only evicted meanwhile, or that
        is back, is not damage.
        """
        try:
            with self.folder.directory.changing() as transaction:
                if is_missing and self.folder.has_file(name):
                    return
                removed = transaction.graph.remove(self.folder.key(name))
                if removed:
                    transaction.delete(removed)
                    self.n_damaged += 1
        except OSError:
            self.n_damaged += 1


class _Chain:
    """The part of a chain that has to be read.

    Rows of exact batches are the same wherever they come from; others belong to their own state.

    Attributes:
        files: The files to read, the first one first.
        covered: The segment before them that ``base`` covers, None if there is none.
    """

    def __init__(self, chain: list[StoredFile], base: Snapshot | None) -> None:
        self.files = chain
        self.covered: Segment | None = None
        if base is None:
            return
        n_covered = 0
        for stored in chain:
            if stored.last > base.n or stored.last not in stored.batch_ends:
                break
            n_covered += 1
            self.covered = base.segment_at(stored.last)
        self.files = chain[n_covered:]


class _Stopwatch:
    """The seconds of some reads, until the last of them returned."""

    def __init__(self, futures: Iterable[Future[None]]) -> None:
        self._began = time.monotonic()
        self._ended = self._began
        for future in futures:
            future.add_done_callback(self._stop)

    @property
    def seconds(self) -> float:
        return self._ended - self._began

    def _stop(self, _: Future[None]) -> None:
        self._ended = time.monotonic()
