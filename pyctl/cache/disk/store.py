"""The snapshots on disk: written once, verified on every read, within a budget that all processes share."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from pyctl.atomic_file import make_private, sync_directory, temp_path, write_atomic
from pyctl.cache.disk.chain import (
    Checksums,
    PendingSnapshot,
    SegmentFile,
    StoredFile,
    check_chain,
    name_chain,
    open_chain,
)
from pyctl.cache.disk.directory import THREADS, CacheDirectory
from pyctl.cache.disk.file_format import (
    MAX_TOKENS,
    SIZES,
    CorruptFileError,
    Header,
    Name,
    PartKind,
    SegmentName,
    Sizes,
    StateName,
    check_fingerprint,
    parse,
)
from pyctl.cache.disk.index import Index, Key, Record
from pyctl.cache.disk.readers import RESTORE_SECONDS, Readers, Reading, Reads, StalledReadError, finish, finished
from pyctl.cache.disk.segment_files import parts_of, remove_file, write_file
from pyctl.cache.snapshot import DRAFT, RECURRENT, Block, Prefix, Segment, Snapshot
from pyctl.errors import StateError
from pyctl.prompt import Tokens, common_prefix

__all__ = ["DiskStore"]

log = logging.getLogger(__name__)

SHARE_BESIDE = 64
"""Recent prompts and replies may each have this part of the budget: they are nothing beside the snapshots."""


def _cancel(futures: Iterable[Future[None]]) -> None:
    for future in futures:
        future.cancel()


def _now(function: Callable[[], None]) -> None:
    function()


class DiskStore:
    """Snapshots of one ``fingerprint`` in a cache directory, which other fingerprints and processes may share.

    ``budget`` bounds the bytes of all files of the directory, ``daily_bytes`` what is written in a day (UTC) by all
    processes; None is no limit. ``space`` gives memory for what is read, which has the ``sizes`` of the model's blocks
    or is damaged. Safe from any thread; a lookup or a read never waits for a write: `contains` and `lengths` tell what
    `directory` held when it was last looked at. What is found damaged is removed by ``run_soon``, which may put it off.
    OSError if the directory cannot be used. The caller has the directory recover once, on whatever thread; reads and
    writes work meanwhile.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        budget: int | None,
        *,
        min_tokens: int = 512,
        daily_bytes: int | None = None,
        sizes: Sizes | None = None,
        space: Callable[[int], Block] = lambda size: np.empty(size, np.uint8),
    ) -> None:
        self.fingerprint = check_fingerprint(fingerprint)
        self.directory = CacheDirectory(path, budget)
        self.home = path / fingerprint
        make_private(self.home)
        self.min_tokens = min_tokens
        self.daily_bytes = daily_bytes
        self.damaged = 0
        self.run_soon = _now
        self._space = space
        self._checksums = Checksums()
        self._handed: WeakValueDictionary[SegmentName, Segment] = WeakValueDictionary()
        self._writers = ThreadPoolExecutor(max(1, THREADS // 2), "disk-write")
        self._lookups = Readers(2, "disk-look")  # which wait for readers
        self._hangs = False
        self._sizes = sizes
        if sizes is not None:
            with suppress(OSError):  # for whoever verifies without the model
                write_atomic(self.home / SIZES, str(sizes).encode(), sync=False)

    def close(self) -> None:
        """Wait for what is running; nothing works afterwards."""
        self._writers.shutdown()
        self._lookups.close()
        self.directory.close()

    # -- lookup ------------------------------------------------------------------------------------------------------

    def lengths(self) -> frozenset[int]:
        """The positions at which some state of this fingerprint is stored."""
        return self.directory.contents.lengths.get(self.fingerprint, frozenset())

    def contains(self, prefix: Prefix) -> bool:
        """Whether a state for ``prefix`` is stored; it may still turn out to be damaged."""
        return StateName.of(prefix) in self.directory.contents.of(self.fingerprint)

    def wants(self, snapshot: Snapshot) -> bool:
        """Whether ``snapshot`` is long enough and not stored yet, or only one that is not exact."""
        is_exact = self.directory.contents.of(self.fingerprint).get(StateName.of(snapshot.prefix))
        return snapshot.n >= self.min_tokens and (is_exact is None or (snapshot.exact and not is_exact))

    def open(self, prefix: Prefix, tokens: Tokens) -> Reading[PendingSnapshot | None]:
        """The snapshot of ``prefix``, the first tokens of ``tokens``, on its way here; None on a miss.

        Damage is a miss, now or when it arrives: the broken file goes with everything that hangs on it, and `damaged`
        counts it. A disk that hangs is a miss, too, and is not asked again before it has answered. The rows of segments
        that an earlier snapshot from here still holds are shared, so run this on the thread that gives snapshots up.
        """
        state = StateName.of(prefix)
        if self.hangs or not self.contains(prefix) or tokens.size < prefix.n:
            return None
        deadline = time.monotonic() + RESTORE_SECONDS
        try:
            looking = self._lookups.start([partial(self._look, state)])
            yield from finished(Reads(looking, self.directory.readers, deadline))
            top, chain, stored = looking[0].result()
            return self._fetch(top, chain, deadline) if common_prefix(stored, tokens) >= prefix.n else None
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
    def hangs(self) -> bool:
        """Whether a read was given up that has not returned yet."""
        if self._hangs and not (self.directory.readers.is_busy or self._lookups.is_busy):
            self._hangs = False
            log.warning("the prefix cache on disk can be read again")
        return self._hangs

    def _look(self, state: StateName) -> tuple[StoredFile, list[StoredFile], Tokens]:
        """The headers of a state and of its chain, and the tokens of all."""
        top, chain = open_chain(self.home, state, self._sizes)
        self.directory.readers.run(job for found in chain for job in found.jobs(PartKind.TOKENS, PartKind.ENDS))
        return top, chain, check_chain(chain, state)

    def _fetch(self, top: StoredFile, chain: list[StoredFile], deadline: float) -> PendingSnapshot:
        readers = self.directory.readers
        segments: dict[SegmentName, Segment] = {}
        coming: dict[Segment, list[Future[None]]] = {}
        segment: Segment | None = None
        for found in chain:
            held = self._handed.get(found.name)
            if held is None or held.dropped:
                jobs = found.make_space(self._space, self._sizes)
                held = found.segment(segment)
                coming[held] = readers.start(jobs)
            segment = segments[found.name] = held
        assert segment is not None
        state = top.header.name
        assert isinstance(state, StateName)
        coming_state = readers.start(top.make_space(self._space, self._sizes))
        futures = [future for reads in [*coming.values(), coming_state] for future in reads]
        return PendingSnapshot(
            Snapshot(state.prefix, segment, top.state(), top.header.exact),
            {held: Reads(reads, readers, deadline) for held, reads in coming.items()},
            Reads(coming_state, readers, deadline),
            done=lambda: self._handed.update(segments),
            failed=partial(self._failed, state),
            cancel=partial(_cancel, futures),
        )

    def _failed(self, state: StateName, error: Exception) -> None:
        """Note why a read failed; being short of memory or descriptors says nothing about the files."""
        if isinstance(error, StalledReadError):
            if not self._hangs:
                log.warning("the prefix cache on disk hangs; until it answers, prompts are evaluated instead")
            self._hangs = True
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
            log.error("%s cannot be read", state, exc_info=error)
        name = parse(file)
        assert name is not None
        self.directory.forget(self.fingerprint, state)
        self.run_soon(lambda: self._lose(name, vanished))

    # -- change ------------------------------------------------------------------------------------------------------

    def write(self, snapshot: Snapshot, label: str = "") -> int:
        """Store ``snapshot`` and return how many bytes that took; for one writing thread per store.

        ``label`` says to people what it holds. 0 when it is too short, here already, was given up by the cache in RAM
        before this began, or does not fit the budget of the directory or of the day. OSError when the disk does not
        take it; nothing is left behind then.
        """
        if snapshot.n < self.min_tokens or snapshot.segment.end > MAX_TOKENS:
            return 0
        self.directory.restore_index()
        self.directory.look_ahead()
        links = name_chain(snapshot, self._checksums)
        if any(segment.dropped for segment in snapshot.chain) or snapshot.state.parts.keys() - {RECURRENT, DRAFT}:
            return 0
        for _ in range(3):
            written = self._write(snapshot, links, label)
            if written is not None:
                return written
        return 0

    def _write(self, snapshot: Snapshot, links: list[SegmentFile], label: str) -> int | None:
        """As `write`; None if segments that were there when it began are gone at the end."""
        state = StateName.of(snapshot.prefix)
        with self.directory.reading() as connection:
            present = {link.name for link in links if Index.record(connection, self._key(link.name))}
            twin = Index.record(connection, self._key(state))
            today = Index.written_today(connection)
        if self._satisfies(twin, snapshot.exact):
            return 0
        missing = [link for link in links if link.name not in present or not self._has(link.name)]
        raw = snapshot.state.n_bytes + sum(int(b.nbytes) for link in missing for b in link.blocks.values())
        if self.daily_bytes is not None and today + raw > self.daily_bytes:
            return 0
        temps: dict[Path, Record] = {}
        with ExitStack() as held:
            for link in missing:
                path = held.enter_context(temp_path(self.home))
                temps[path] = self._write_temp(path, link.name, link.parent, False, link.blocks)
            path, blocks = held.enter_context(temp_path(self.home)), {PartKind.STATE: snapshot.state.recurrent}
            if snapshot.state.draft.size:
                blocks[PartKind.DRAFT_STATE] = snapshot.state.draft
            temps[path] = self._write_temp(path, state, links[-1].name, snapshot.exact, blocks)
            done = self._publish(temps, [self._key(link.name) for link in links], label)
        if done:
            sync_directory(self.home)
        return done

    def _write_temp(
        self, path: Path, name: Name, parent: SegmentName | None, exact: bool, blocks: dict[PartKind, Block]
    ) -> Record:
        now = time.time()
        blocks = {what: np.ascontiguousarray(block) for what, block in blocks.items()}
        header = Header(self.fingerprint, name, parent, exact, now, parts_of(blocks))
        write_file(path, header, blocks, self._writers)
        return Record(self.fingerprint, name, header.offsets[-1], parent, exact, now, now)

    def _publish(self, temps: dict[Path, Record], chain: list[Key], label: str) -> int | None:
        """Make room, rename and enter, all in one transaction."""
        state_path, state = next((path, record) for path, record in temps.items() if record.is_state)
        renamed: list[Path] = []
        try:
            with self.directory.changing() as connection:
                graph = self.directory.graph(connection)
                known = graph.records
                twin = known.get(state.key)
                if self._satisfies(twin, state.exact):
                    return 0
                fresh = {p: new for p, new in temps.items() if new.key not in known or not self._has(new.name)}
                if twin is not None:
                    fresh[state_path] = replace(state, hits=twin.hits, pinned=twin.pinned)
                arriving = {record.key for record in fresh.values()}
                if any(not (key in arriving or (key in known and self._has(key[1]))) for key in chain):
                    return None
                written = sum(record.n_bytes for record in fresh.values())
                if not self._allows(connection, written):
                    return 0
                for record in fresh.values():
                    graph.add(record)
                going: list[Record] = []
                if self.directory.budget is not None:
                    room = self.directory.budget - self.directory.bytes_beside()
                    going = graph.shrink(room, {state.key})
                    if graph.n_bytes > room:
                        self.directory.reread()
                        return 0
                if twin is not None:
                    for key in graph.unsound():
                        going += graph.remove(key)
                self.directory.delete(connection, going)
                for path, record in fresh.items():
                    target = self.directory.file(record.key)
                    os.replace(path, target)
                    renamed.append(target)
                    self.directory.insert(connection, record, label if record.is_state else "")
                Index.add_written(connection, written)
        except BaseException:
            for path in renamed:
                remove_file(path)
            raise
        return written

    def touch(self, prefix: Prefix) -> None:
        """Count a hit, now; may wait for other writers."""
        try:
            self.directory.touch(self._key(StateName.of(prefix)))
        except OSError:
            return  # the use of a file, and no file: not worth an error

    # -- what lies beside --------------------------------------------------------------------------------------------

    def limit_beside(self, n_bytes: int) -> int:
        """How many of ``n_bytes`` a file beside the snapshots may take."""
        budget = self.directory.budget
        return n_bytes if budget is None else min(n_bytes, budget // SHARE_BESIDE)

    def spend(self, n_bytes: int) -> bool:
        """Make room for bytes written beside the snapshots and count them; False if the day has none for them."""
        freed = 0
        with self.directory.changing(look=False) as connection:
            if not self._allows(connection, n_bytes):
                return False
            if self.directory.budget is not None:
                freed = self.directory.shrink(connection, self.directory.budget - n_bytes)
            Index.add_written(connection, n_bytes)
        if freed:
            self.directory.refresh()
        return True

    # -- index -------------------------------------------------------------------------------------------------------

    def _key(self, name: Name) -> Key:
        return self.fingerprint, name

    def _has(self, name: Name) -> bool:
        return (self.home / str(name)).is_file()

    def _allows(self, connection: sqlite3.Connection, n_bytes: int) -> bool:
        return self.daily_bytes is None or Index.written_today(connection) + n_bytes <= self.daily_bytes

    def _satisfies(self, record: Record | None, exact: bool) -> bool:
        """Whether there is no need for a state as ``exact`` as that, because ``record`` is there."""
        return record is not None and (record.exact or not exact) and self._has(record.name)

    def _lose(self, name: Name, vanished: bool = False) -> None:
        """Remove a damaged file; one that was only evicted meanwhile, or that is back, is not damage."""
        try:
            with self.directory.changing() as connection:
                if vanished and self._has(name):
                    return
                dependents = self.directory.graph(connection).remove(self._key(name))
                if dependents:
                    self.directory.delete(connection, dependents)
                    self.damaged += 1
        except OSError:
            self.damaged += 1
