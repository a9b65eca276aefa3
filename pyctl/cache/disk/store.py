"""The snapshots on disk: written once, verified on every read, within a budget that all processes
share.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from pyctl.atomic_file import make_private, write_atomic
from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.disk.chain import StoredFile, open_chain
from pyctl.cache.disk.directory import CacheDirectory, is_older
from pyctl.cache.disk.file_format import (
    RULES,
    SIZES,
    CorruptFileError,
    Name,
    SegmentName,
    StateName,
    check_fingerprint,
    parse,
    rules_id,
    sizes_text,
)
from pyctl.cache.disk.readers import (
    RESTORE_SECONDS,
    DiskReads,
    StalledReadError,
)
from pyctl.cache.disk.writer import StoreWriter
from pyctl.cache.pending_snapshot import PendingSnapshot
from pyctl.cache.reads import Reading, finish, finished
from pyctl.cache.snapshot import Block, Prefix, PromptMatch, Segment, Snapshot
from pyctl.errors import NotWrittenError, StateError
from pyctl.prompt import Tokens, common_prefix

__all__ = ["DiskStore"]

log = logging.getLogger(__name__)

SHARE_BESIDE = 64
"""Recent prompts and replies may each have this part of the budget: they are small next to the
snapshots.
"""


def _now(function: Callable[[], None]) -> None:
    function()


class _Stopwatch:
    """How long some reads took until the last of them returned."""

    def __init__(self, futures: Iterable[Future[None]]) -> None:
        self._began = self._ended = time.monotonic()
        for future in futures:
            future.add_done_callback(self._stop)

    @property
    def seconds(self) -> float:
        return self._ended - self._began

    def _stop(self, _: Future[None]) -> None:
        self._ended = time.monotonic()


class DiskStore:
    """Snapshots of one ``fingerprint`` in a cache directory, which other fingerprints and processes
    may share.

    ``budget`` bounds the bytes of all files of the directory, ``daily_bytes`` the bytes written in
    a day (UTC) by all processes; None is no limit. ``space`` allocates memory for blocks that are
    read; blocks of other sizes than ``sizes`` are damaged. ``note_read`` gets the bytes and the
    seconds of each restore. Thread-safe; a lookup or a read never waits for a write: `contains` and
    `lengths` are by the last look at `directory`. ``run_soon`` removes damaged files, now or later.
    OSError if the directory cannot be used. The caller has the directory recover once, on any
    thread; reads and writes work meanwhile.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        budget: int | None,
        *,
        min_tokens: int = 512,
        daily_bytes: int | None = None,
        sizes: BlockSizes | None = None,
        space: Callable[[int], Block] = lambda size: np.empty(size, np.uint8),
    ) -> None:
        self.fingerprint = check_fingerprint(fingerprint)
        self.directory = CacheDirectory(path, budget)
        self.home = path / fingerprint
        if self.home.is_symlink():
            raise OSError(errno.ELOOP, "a link, which may lead to others' files", str(self.home))
        make_private(self.home)
        self.min_tokens = min_tokens
        self.damaged = 0
        self.run_soon = _now
        self.note_read: Callable[[int, float], None] = lambda n_bytes, seconds: None
        self._space = space
        self._handed: WeakValueDictionary[SegmentName, Segment] = WeakValueDictionary()
        self.files = StoreWriter(self.directory, fingerprint, daily_bytes=daily_bytes)
        self._is_stalled = False
        self.sizes = sizes
        with suppress(
            OSError
        ):  # then its files count as older ones, which only affects the order of eviction
            if is_older(self.home):
                write_atomic(self.home / RULES, rules_id().encode(), sync=False)
        if sizes is not None:
            with suppress(OSError):  # for `verify`, which has no model
                write_atomic(self.home / SIZES, sizes_text(sizes).encode(), sync=False)

    def close(self) -> None:
        """Wait for running operations; nothing works afterwards."""
        self.directory.close()

    # -- lookup
    # ----------------------------------------------------------------------------------

    def lengths(self) -> frozenset[int]:
        """The positions at which some state of this fingerprint is stored."""
        return self.directory.contents.lengths.get(self.fingerprint, frozenset())

    def contains(self, prefix: Prefix) -> bool:
        """Whether a state for ``prefix`` is stored; it may still turn out to be damaged."""
        return StateName.of(prefix) in self.directory.contents.of(self.fingerprint)

    def find(self, prompt: PromptMatch, limit: int) -> list[Prefix]:
        """The stored prefixes of ``prompt`` of at most ``limit`` tokens, the deepest first."""
        maximum = min(limit, int(prompt.tokens.size))
        lengths = sorted(n for n in self.lengths() if 0 < n <= maximum)
        return prompt.among(self.directory.contents.of(self.fingerprint), lengths)[::-1]

    def should_store(self, snapshot: Snapshot, *, is_last: bool = False) -> bool:
        """Whether ``snapshot`` is long enough, or the last one, and not stored yet, or only one
        that is not exact.
        """
        is_exact = self.directory.contents.of(self.fingerprint).get(StateName.of(snapshot.prefix))
        return (is_last or snapshot.n >= self.min_tokens) and (
            is_exact is None or (snapshot.exact and not is_exact)
        )

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
        that need it, and `damaged` counts it. A disk that hangs is also a miss, and gets no further
        read before it has answered. Segments of earlier snapshots from here are shared, so call
        this on the thread that drops snapshots.
        """
        state = StateName.of(prefix)
        if self.is_stalled or not self.contains(prefix) or tokens.size < prefix.n:
            return None
        deadline = time.monotonic() + RESTORE_SECONDS
        try:
            looking = self.directory.readers.start([partial(self._look, state)])
            yield from finished(DiskReads(looking, self.directory.readers, deadline))
            top, chain, stored = looking[0].result()
            if common_prefix(stored, tokens) < prefix.n:
                return None
            return self._fetch(top, chain, deadline, base, max_bytes)
        except Exception as error:
            self._failed(state, error)
            return None

    def read(self, prefix: Prefix, tokens: Tokens) -> Snapshot | None:
        """The snapshot of ``prefix`` once all of it is here; otherwise as `open`."""
        pending = finish(self.open(prefix, tokens))
        try:
            return finish(pending.complete()) if pending is not None else None
        except StateError:
            return None

    def refuse(self, prefix: Prefix) -> None:
        """Lose a state that was read but is of no use to the model."""
        state = StateName.of(prefix)
        self._failed(state, CorruptFileError(str(state), "refused by the model"))

    @property
    def is_stalled(self) -> bool:
        """Whether an abandoned read has not returned yet."""
        if self._is_stalled and not self.directory.readers.is_busy:
            self._is_stalled = False
            log.warning("disk cache: reads work again")
        return self._is_stalled

    def _look(self, state: StateName) -> tuple[StoredFile, list[StoredFile], Tokens]:
        """The headers of a state and of its chain, and the tokens of all: by one reader, which
        waits for no other.
        """
        return open_chain(self.home, state, self.sizes, lambda jobs: list(map(_now, jobs)))

    def _fetch(
        self,
        top: StoredFile,
        chain: list[StoredFile],
        deadline: float,
        base: Snapshot | None,
        max_bytes: int | None,
    ) -> PendingSnapshot:
        def read(jobs: list[Callable[[], None]]) -> DiskReads:
            return DiskReads(self.directory.readers.start(jobs), self.directory.readers, deadline)

        def read_rows(found: StoredFile, segment: Segment) -> DiskReads:
            return read(found.fill(segment, self._space, self.sizes))

        left = math.inf if max_bytes is None else max_bytes
        later: dict[Segment, Callable[[], DiskReads]] = {}
        segments: dict[SegmentName, Segment] = {}
        coming: dict[Segment, DiskReads] = {}
        segment: Segment | None = None
        for found in chain:
            # Rows of exact batches are the same wherever they come from; others belong to their own
            # state.
            if base is not None and found.last <= base.n and found.last in found.ends:
                segment = base.segment_at(found.last)
                continue
            base = None
            held = self._handed.get(found.name)
            if held is None or held.dropped:
                held = found.segment(segment)
                left -= found.large_bytes
                if left >= 0 or not coming:
                    coming[held] = read_rows(found, held)
                else:
                    later[held] = partial(read_rows, found, held)
            segment = segments[found.name] = held
        assert segment is not None
        state = top.header.name
        assert isinstance(state, StateName)
        coming_state = read(top.make_space(self._space, self.sizes))
        snapshot = Snapshot(state.prefix, segment, top.state(), top.header.exact)
        watch = _Stopwatch(
            future for reads in (*coming.values(), coming_state) for future in reads.futures
        )
        n_bytes = snapshot.state.n_bytes + sum(link.n_bytes for link in coming)

        def done() -> None:
            self._handed.update(segments)
            if not later:
                self.note_read(n_bytes, watch.seconds)

        failed = partial(self._failed, state)
        return PendingSnapshot(
            snapshot, coming, coming_state, done=done, failed=failed, deferred_reads=later
        )

    def _failed(self, state: StateName, error: Exception) -> None:
        """Note why a read failed; a lack of memory or descriptors is no fault of the files."""
        if isinstance(error, StalledReadError):
            if not self._is_stalled:
                log.warning("disk cache: reads hang, evaluating instead until they work again")
            self._is_stalled = True
            return
        vanished = isinstance(error, FileNotFoundError)
        file = str(state)
        if isinstance(error, CorruptFileError):
            file = error.file
        elif isinstance(error, FileNotFoundError):
            file = Path(error.filename).name
        elif isinstance(error, (OSError, MemoryError)):
            return
        else:
            log.error("cannot read %s", state, exc_info=error)
        name = parse(file)
        assert name is not None
        self.directory.forget(self.fingerprint, state)
        self.run_soon(lambda: self._remove_damaged(name, vanished))

    # -- change
    # ----------------------------------------------------------------------------------

    def write(self, snapshot: Snapshot, label: str = "", *, spilled: bool = False) -> int:
        """Store ``snapshot``, as `StoreWriter.write` does; 0 also if there is no room for it."""
        writing = self.files.write(snapshot, label, spilled=spilled)
        try:
            while True:
                next(writing)
        except StopIteration as end:
            return int(end.value)
        except NotWrittenError:
            return 0

    def touch(self, prefix: Prefix) -> None:
        """Count a hit, now; may wait for other writers."""
        try:
            self.directory.touch(self.files.key(StateName.of(prefix)))
        except OSError:
            return  # the use of a file, and no file: not worth an error

    # -- other files
    # ----------------------------------------------------------------------------------

    def limit_beside(self, n_bytes: int) -> int:
        """How many of ``n_bytes`` a file that is no snapshot may take."""
        budget = self.directory.budget
        return n_bytes if budget is None else min(n_bytes, budget // SHARE_BESIDE)

    def _remove_damaged(self, name: Name, vanished: bool = False) -> None:
        """Remove a damaged file; one that was only evicted meanwhile, or that is back, is not
        damage.
        """
        try:
            with self.directory.changing() as connection:
                if vanished and self.files.has(name):
                    return
                dependents = self.directory.graph(connection).remove(self.files.key(name))
                if dependents:
                    self.directory.delete(connection, dependents)
                    self.damaged += 1
        except OSError:
            self.damaged += 1
