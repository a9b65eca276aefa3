"""The snapshots on disk: written once, verified on every read, within a budget that all processes share."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

from pyctl.atomic_file import sync_directory
from pyctl.cache.disk.chain import (
    Checksums,
    PendingSnapshot,
    SegmentFile,
    StoredFile,
    check_tokens,
    name_chain,
    open_chain,
)
from pyctl.cache.disk.directory import THREADS, CacheDirectory, as_os_error
from pyctl.cache.disk.file_format import CorruptFileError, Header, PartKind, StateName, check_fingerprint, parse
from pyctl.cache.disk.graph import FileGraph, Key
from pyctl.cache.disk.index import Index, Record
from pyctl.cache.disk.segment_files import parts_of, remove_file, write_temp
from pyctl.cache.snapshot import Block, Prefix, Segment, Snapshot
from pyctl.errors import StateError
from pyctl.prompt import Tokens, common_prefix

__all__ = ["DiskStore"]


class DiskStore(CacheDirectory):
    """Snapshots of one ``fingerprint`` under ``directory``, which other fingerprints and processes may share.

    ``budget`` bounds the bytes of all files of the directory, ``daily_bytes`` what is written in a day (UTC) by all
    processes; None is no limit. ``space`` gives memory for what is read. Safe from any thread; a read never waits for a
    write. OSError if the directory cannot be used. The caller runs `recover` once, on whatever thread; reads and writes
    work meanwhile.
    """

    def __init__(
        self,
        directory: Path,
        fingerprint: str,
        budget: int | None,
        *,
        min_tokens: int = 512,
        daily_bytes: int | None = None,
        space: Callable[[int], Block] = lambda size: np.empty(size, np.uint8),
    ) -> None:
        self.fingerprint = check_fingerprint(fingerprint)
        super().__init__(directory, budget)
        self.min_tokens = min_tokens
        self.daily_bytes = daily_bytes
        self.damaged = 0
        self._space = space
        self._home = directory / fingerprint
        self._home.mkdir(exist_ok=True)
        self._checksums = Checksums()
        self._handed: WeakValueDictionary[str, Segment] = WeakValueDictionary()
        self._writers = ThreadPoolExecutor(max(1, THREADS // 2), "disk-write")

    def close(self) -> None:
        """Wait for what is running; nothing works afterwards."""
        self._writers.shutdown()
        super().close()

    # -- lookup ------------------------------------------------------------------------------------------------------

    def lengths(self) -> set[int]:
        """The positions at which some state of this fingerprint is stored."""
        query = "SELECT DISTINCT n FROM files WHERE state AND fingerprint = ?"
        try:
            with self._index.reading() as connection:
                return {int(n) for (n,) in connection.execute(query, (self.fingerprint,))}
        except (sqlite3.Error, OSError):
            return set()

    def contains(self, prefix: Prefix) -> bool:
        """Whether a state for ``prefix`` is stored; it may still turn out to be damaged."""
        return self._record(_file(prefix)) is not None

    def open(self, prefix: Prefix, tokens: Tokens) -> PendingSnapshot | None:
        """The snapshot of ``prefix``, the first tokens of ``tokens``, on its way here; None on a miss.

        Damage is a miss, now or when it arrives: the broken file goes with everything that hangs on it, and `damaged`
        counts it. The rows of segments that an earlier snapshot from here still holds are shared, so call this on the
        thread that gives snapshots up.
        """
        state = StateName(prefix.n, prefix.digest)
        if self._record(str(state)) is None or tokens.size < prefix.n:
            return None
        try:
            return self._open(prefix, state, tokens)
        except (OSError, MemoryError, CorruptFileError) as error:
            self._failed(error)
        return None

    def read(self, prefix: Prefix, tokens: Tokens) -> Snapshot | None:
        """The snapshot of ``prefix`` once all of it is here; otherwise as `open`."""
        arrival = self.open(prefix, tokens)
        try:
            return arrival.complete() if arrival is not None else None
        except StateError:
            return None

    def _open(self, prefix: Prefix, state: StateName, tokens: Tokens) -> PendingSnapshot | None:
        top, chain = open_chain(self._home, state)
        self._run(job for found in chain for job in found.jobs(PartKind.TOKENS, PartKind.ENDS))
        if common_prefix(check_tokens(chain, state), tokens) < prefix.n:
            return None
        segments: dict[str, Segment] = {}
        coming: dict[Segment, list[Future[None]]] = {}
        segment: Segment | None = None
        for found in chain:
            held = self._held(found)
            if held is None:
                found.outs[PartKind.ROWS] = self._space(found.size_of(PartKind.ROWS))
                held = found.segment(segment)
                coming[held] = [self._readers.submit(job) for job in found.jobs(PartKind.ROWS)]
            segment = segments[found.path.name] = held
        assert segment is not None
        top.outs[PartKind.STATE] = self._space(top.size_of(PartKind.STATE))
        return PendingSnapshot(
            Snapshot(prefix, segment, top.outs[PartKind.STATE], top.header.exact),
            coming,
            [self._readers.submit(job) for job in top.jobs(PartKind.STATE)],
            done=lambda: self._handed.update(segments),
            failed=self._failed,
        )

    def _failed(self, error: BaseException) -> None:
        """Note why a read failed; being short of memory or descriptors says nothing about the files."""
        if isinstance(error, CorruptFileError):
            self._lose(error.file)
        elif isinstance(error, FileNotFoundError):
            self._lose(Path(error.filename).name, vanished=True)
        elif not isinstance(error, (OSError, MemoryError)):
            raise error

    def _held(self, found: StoredFile) -> Segment | None:
        segment = self._handed.get(found.path.name)
        return segment if segment is not None and not segment.dropped else None

    # -- change ------------------------------------------------------------------------------------------------------

    def write(self, snapshot: Snapshot) -> int:
        """Store ``snapshot`` and return how many bytes that took; for one writing thread per store.

        0 when it is too short, here already, was given up by the cache in RAM before this began, or does not fit the
        budget of the directory or of the day. OSError when the disk does not take it; nothing is left behind then.
        """
        if snapshot.n < self.min_tokens:
            return 0
        self._restore_index()
        links = name_chain(snapshot, self._checksums)
        if any(segment.dropped for segment in snapshot.chain):
            return 0
        for _ in range(3):
            written = self._write(snapshot, links)
            if written is not None:
                return written
        return 0

    def _write(self, snapshot: Snapshot, links: list[SegmentFile]) -> int | None:
        """As `write`; None if segments that were there when it began are gone at the end."""
        with as_os_error(), self._index.reading() as connection:
            names = [str(link.name) for link in links]
            present = {file for file in names if Index.record(connection, self.fingerprint, file) and self._has(file)}
            twin = Index.record(connection, self.fingerprint, _file(snapshot.prefix))
            today = Index.written_today(connection)
        if self._satisfies(twin, snapshot.exact):
            return 0
        missing = [link for link in links if str(link.name) not in present]
        raw = int(snapshot.state.nbytes) + sum(int(b.nbytes) for link in missing for b in link.blocks.values())
        if self.daily_bytes is not None and today + raw > self.daily_bytes:
            return 0
        temps: dict[Path, Record] = {}
        try:
            for link in missing:
                self._write_temp(temps, link.name.end, str(link.name), link.parent, False, link.blocks)
            blocks = {PartKind.STATE: np.ascontiguousarray(snapshot.state)}
            file, parent = _file(snapshot.prefix), str(links[-1].name)
            self._write_temp(temps, snapshot.n, file, parent, snapshot.exact, blocks)
            done = self._publish(temps, [(self.fingerprint, str(link.name)) for link in links])
        finally:
            for path in temps:
                path.unlink(missing_ok=True)
        if done:
            sync_directory(self._home)
        return done

    def _write_temp(
        self, temps: dict[Path, Record], n: int, file: str, parent: str, exact: bool, blocks: dict[PartKind, Block]
    ) -> None:
        name = parse(file)
        assert name is not None
        header = Header(self.fingerprint, name, parent, exact, time.time(), parts_of(blocks))
        path = write_temp(self._home, header, blocks, self._writers)
        size, is_state, now = header.offsets[-1], isinstance(name, StateName), header.created
        temps[path] = Record(self.fingerprint, file, n, size, parent, is_state, exact, now, now)

    def _publish(self, temps: dict[Path, Record], chain: list[Key]) -> int | None:
        """Make room, rename and enter, all in one transaction."""
        state = next(record for record in temps.values() if record.state)
        renamed: list[Path] = []
        try:
            with as_os_error(), self._index.writing() as connection:
                records = {record.key: record for record in Index.records(connection)}
                twin = records.get(state.key)
                if self._satisfies(twin, state.exact):
                    return 0
                fresh = {p: new for p, new in temps.items() if new.key not in records or not self._has(new.file)}
                if twin is not None:
                    path = next(path for path, new in temps.items() if new.state)
                    fresh[path] = replace(state, hits=twin.hits, pinned=twin.pinned)
                records.update({record.key: record for record in fresh.values()})
                arriving = {record.key for record in fresh.values()}
                if any(key not in records or not (key in arriving or self._has(key[1])) for key in chain):
                    return None
                written = sum(record.n_bytes for record in fresh.values())
                if self.daily_bytes is not None and Index.written_today(connection) + written > self.daily_bytes:
                    return 0
                graph = FileGraph(records.values())
                going = _shrink(graph, self.budget, {state.key})
                if going is None:
                    return 0
                if twin is not None:
                    going += [graph.records[key] for key in graph.unsound()]
                self._delete(connection, going)
                for path, record in fresh.items():
                    os.replace(path, self._home / record.file)
                    renamed.append(self._home / record.file)
                    Index.insert(connection, record)
                Index.add_written(connection, written)
        except BaseException:
            for path in renamed:
                remove_file(path)
            raise
        return written

    def touch(self, prefix: Prefix) -> None:
        """Count a hit, now; may wait for other writers."""
        query = "UPDATE files SET hits = hits + 1, used = ? WHERE fingerprint = ? AND file = ?"
        self._change(query, time.time(), self.fingerprint, _file(prefix))

    # -- index -------------------------------------------------------------------------------------------------------

    def _record(self, file: str) -> Record | None:
        try:
            with self._index.reading() as connection:
                return Index.record(connection, self.fingerprint, file)
        except (sqlite3.Error, OSError):
            return None

    def _has(self, file: str) -> bool:
        return (self._home / file).is_file()

    def _satisfies(self, record: Record | None, exact: bool) -> bool:
        """Whether there is no need for a state as ``exact`` as that, because ``record`` is there."""
        return record is not None and (record.exact or not exact) and self._has(record.file)

    def _lose(self, file: str, vanished: bool = False) -> None:
        """Remove a damaged file; one that was only evicted meanwhile, or that is back, is not damage."""
        try:
            with self._index.writing() as connection:
                if vanished and self._has(file):
                    return
                graph = FileGraph(Index.records(connection))
                key = self.fingerprint, file
                dependents = graph.remove(key)
                if dependents:
                    self._delete(connection, dependents)
                    self.damaged += 1
        except (sqlite3.Error, OSError):
            self.damaged += 1


def _shrink(graph: FileGraph, budget: int | None, protected: set[Key]) -> list[Record] | None:
    """What has to go so that ``graph`` fit; None if that is not enough."""
    going: list[Record] = []
    while budget is not None and graph.n_bytes > budget:
        key = graph.victim(time.time(), protected)
        if key is None:
            return None
        going += graph.remove(key)
    return going


def _file(prefix: Prefix) -> str:
    return str(StateName(prefix.n, prefix.digest))
