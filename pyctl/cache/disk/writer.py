"""Writing snapshots into a cache directory: only missing files, within the budget and the daily
write budget.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from pyctl.atomic_file import sync_directory, temp_path
from pyctl.cache.disk.chain import ChainNames, blocks_of
from pyctl.cache.disk.directory import CacheDirectory
from pyctl.cache.disk.file_format import MAX_TOKENS, Header, Name, PartKind, SegmentName, StateName
from pyctl.cache.disk.index import Index, Key, Record
from pyctl.cache.disk.segment_files import parts_of, remove_file, write_file
from pyctl.cache.ports import Writing
from pyctl.cache.snapshot import DRAFT, RECURRENT, Block, Segment, Snapshot
from pyctl.errors import NotWrittenError
from pyctl.limit import limit

__all__ = ["OpenWrite", "StoreWriter"]

log = logging.getLogger(__name__)

SPILLED_PER_DAY = limit(
    4,
    "evicted snapshots that one process writes within a day, in multiples of --kv-cache-budget",
    "they are dropped",
    "disk",
)

SPILL_SHARE = 2
"""Spilling stops for the day when this fraction (1/N) of --kv-cache-daily-writes is used up: the
rest is for prefixes that a restart needs.
"""


@dataclass(eq=False)
class OpenWrite:
    """A snapshot of which a part is written, to temp files that go with ``temps``; for the thread
    that writes.
    """

    snapshot: Snapshot
    label: str
    names: ChainNames
    is_spilled: bool = False
    records: dict[Path, Record] = field(default_factory=dict)
    temps: ExitStack = field(default_factory=ExitStack)


class StoreWriter:
    """Writes snapshots of one ``fingerprint`` into ``directory``; ``daily_bytes`` as `DiskStore`
    has it.
    """

    def __init__(
        self, directory: CacheDirectory, fingerprint: str, *, daily_bytes: int | None
    ) -> None:
        self.directory = directory
        self.fingerprint = fingerprint
        self.home = directory.path / fingerprint
        self.daily_bytes = daily_bytes
        self._spilled = [0, 0]  # a day, and how many bytes that left RAM were written in it
        self._told = 0  # the day on which the log reported that the daily budget is used up

    def write(self, snapshot: Snapshot, label: str = "", *, spilled: bool = False) -> Writing:
        """Store ``snapshot``, a segment each time that the one that it yielded has its rows; for
        one writing thread per store.

        ``label`` describes its content to users. What is ``spilled`` may take part of the bytes of
        a day only, and does not replace snapshots of more worth. 0 when it is too long, here
        already, or does not fit the bytes of the day. NotWrittenError when its rows were given up,
        or the directory has no room for it. OSError when the disk does not take it; nothing stays
        then, and nothing can be found before all is there.
        """
        for _ in range(3):  # segments that were there when it started may be gone at the end
            if (writing := self._open(snapshot, label, spilled)) is None:
                return 0
            try:
                for segment in writing.names.missing:
                    yield segment
                    self._add(writing, segment)
                written = self._finish(writing)
            finally:
                self._end(writing)
            if written is not None:
                return written
        raise NotWrittenError("other processes remove segments that it needs")

    def _open(self, snapshot: Snapshot, label: str, spilled: bool) -> OpenWrite | None:
        """The files of ``snapshot`` to write; None if `write` writes nothing."""
        if snapshot.segment.end > MAX_TOKENS:
            return None
        self.directory.restore_index()
        self.directory.look_ahead()
        if snapshot.state.parts.keys() - {RECURRENT, DRAFT}:
            return None
        with self.directory.reading() as connection:
            names = ChainNames(snapshot, partial(self._is_whole, connection))
            twin = Index.record(connection, self.key(StateName.of(snapshot.prefix)))
            today = Index.written_today(connection)
        if self._satisfies(twin, snapshot.exact):
            return None
        raw = snapshot.state.n_bytes + sum(
            each.n_bytes + each.only_held_bytes for each in names.missing
        )
        if self.directory.budget is not None and raw > self.directory.budget:
            raise NotWrittenError(
                f"it may need {raw / 2**20:,.0f} MiB, more than --kv-cache-budget"
            )
        if spilled:
            may = self._may_spill(raw, today) and self._would_stay(snapshot)
        elif not (may := self._has_day(raw, today)):
            self._tell(today)
        return OpenWrite(snapshot, label, names, spilled) if may else None

    def _add(self, writing: OpenWrite, segment: Segment) -> None:
        """Write ``segment``, the next of those missing, under a temp name.

        NotWrittenError if its rows were given up.
        """
        name, parent = writing.names.name(segment)
        with self.directory.reading() as connection:
            is_there = self._is_whole(connection, name)
        if not is_there:
            path = writing.temps.enter_context(temp_path(self.home))
            writing.records[path] = self._write_temp(path, name, parent, False, blocks_of(segment))

    def _finish(self, writing: OpenWrite) -> int | None:
        """Write the state and publish everything; how many bytes that took, None if segments that
        were there are gone.

        NotWrittenError if the directory is full or the snapshot is no longer selected.
        """
        names = writing.names
        snapshot = writing.snapshot
        path = writing.temps.enter_context(temp_path(self.home))
        record = self._write_state(path, snapshot, names.chain[-1])
        if writing.is_spilled:
            record = replace(record, used=_epoch(snapshot.used), hits=snapshot.hits)
        writing.records[path] = record
        done = self._publish(
            snapshot, writing.records, [self.key(name) for name in names.chain], writing.label
        )
        if done == 0:
            raise NotWrittenError("the directory is full, or the snapshot is no longer selected")
        if done is not None:
            sync_directory(self.home)
            for segment in names.missing:
                segment.file.is_there = True
            writing.records.clear()
            self._spilled[1] += done * writing.is_spilled
        return done

    def _end(self, writing: OpenWrite) -> None:
        """Remove the files that were not published; they count for the day all the same."""
        with writing.temps:
            if written := sum(record.n_bytes for record in writing.records.values()):
                with self.directory.changing(look=False) as connection:
                    Index.add_written(connection, written)

    def _has_day(self, n_bytes: int, written: int) -> bool:
        """Whether a day in which so much was ``written`` has room for more."""
        return self.daily_bytes is None or written + n_bytes <= self.daily_bytes

    def _tell(self, written: int) -> None:
        """Say once a day that it has no more room."""
        if self._told != (day := int(time.time() // 86_400)):
            self._told = day
            log.warning(
                "disk cache: %.1f GiB written today, the limit of --kv-cache-daily-writes; new "
                "snapshots stay in "
                "RAM until midnight UTC",
                written / 2**30,
            )

    def _may_spill(self, n_bytes: int, written: int) -> bool:
        """Whether a snapshot that RAM evicts may be written."""
        day = int(time.time() // 86_400)
        budget = self.directory.budget
        if self._spilled[0] != day:
            self._spilled = [day, 0]
        if budget is not None and self._spilled[1] + n_bytes > SPILLED_PER_DAY * budget:
            return False
        return self._has_day(SPILL_SHARE * n_bytes, SPILL_SHARE * written)

    def _would_stay(self, snapshot: Snapshot) -> bool:
        """Whether the snapshots to evict for ``snapshot``, if any, are worth less."""
        budget = self.directory.budget
        if budget is None:
            return True
        with self.directory.reading() as connection:
            names = ChainNames(snapshot, partial(self._is_whole, connection))
            links = [(segment.n_bytes, *names.name(segment)) for segment in names.missing]
            missing = [link for link in links if not self._is_whole(connection, link[1])]
        home = self.fingerprint
        now = time.time()
        used = _epoch(snapshot.used)
        name = StateName.of(snapshot.prefix)
        n_bytes = snapshot.state.n_bytes
        exact = snapshot.exact
        state = Record(home, name, n_bytes, names.chain[-1], exact, now, used, snapshot.hits)
        fresh = [
            Record(home, name, n_bytes, parent, False, now, now)
            for n_bytes, name, parent in missing
        ]
        with self.directory.changing(look=False) as connection:
            graph = self.directory.graph(connection)
            room = budget - self.directory.bytes_beside()
            if graph.n_bytes + sum(record.n_bytes for record in (*fresh, state)) <= room:
                return True
            for record in (*fresh, state):
                graph.add(record)
            going = graph.shrink(room)
            self.directory.reread()
            return graph.n_bytes <= room and all(record.key != state.key for record in going)

    def _is_whole(self, connection: sqlite3.Connection, name: SegmentName) -> bool:
        """Whether a segment is there with all its ancestors."""
        at: SegmentName | None = name
        while at is not None:
            record = Index.record(connection, self.key(at))
            if record is None or not self.has(at):
                return False
            at = record.parent
        return True

    def _write_state(self, path: Path, snapshot: Snapshot, parent: SegmentName) -> Record:
        blocks = {PartKind.STATE: snapshot.state.recurrent}
        if snapshot.state.draft.size:
            blocks[PartKind.DRAFT_STATE] = snapshot.state.draft
        return self._write_temp(path, StateName.of(snapshot.prefix), parent, snapshot.exact, blocks)

    def _write_temp(
        self,
        path: Path,
        name: Name,
        parent: SegmentName | None,
        exact: bool,
        blocks: dict[PartKind, Block],
    ) -> Record:
        now = time.time()
        blocks = {what: np.ascontiguousarray(block) for what, block in blocks.items()}
        header = Header(self.fingerprint, name, parent, exact, now, parts_of(blocks))
        write_file(path, header, blocks)
        return Record(self.fingerprint, name, header.offsets[-1], parent, exact, now, now)

    def adopt(self, temps: dict[Path, Record], chain: list[Key]) -> bool:
        """Let the directory have whole, checked files: a state, and what it lacks of the ``chain``
        under it.

        False if there is no room for them, or the day has none. OSError as `write`. Any thread.
        """
        done = self._publish(None, temps, chain, "")
        if done:
            sync_directory(self.home)
        return bool(done)

    def _publish(
        self, snapshot: Snapshot | None, temps: dict[Path, Record], chain: list[Key], label: str
    ) -> int | None:
        """Make room, rename and enter, in one transaction; nothing if the ``snapshot`` is no longer
        for the disk.
        """
        state_path, state = next(
            (path, record) for path, record in temps.items() if record.is_state
        )
        renamed: list[Path] = []
        try:
            with self.directory.changing() as connection:
                graph = self.directory.graph(connection)
                known = graph.records
                twin = known.get(state.key)
                if self._satisfies(twin, state.exact) or not (
                    snapshot is None or snapshot.facts.for_disk
                ):
                    return 0
                fresh = {
                    p: new
                    for p, new in temps.items()
                    if new.key not in known or not self.has(new.name)
                }
                if twin is not None:
                    fresh[state_path] = replace(state, hits=twin.hits, pinned=twin.pinned)
                arriving = {record.key for record in fresh.values()}
                if any(
                    not (key in arriving or (key in known and self.has(key[1]))) for key in chain
                ):
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

    def spend(self, n_bytes: int) -> bool:
        """Make room for bytes that are no snapshot's and count them; False if the day has none for
        them.
        """
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

    def key(self, name: Name) -> Key:
        """What names a file of this fingerprint among all."""
        return self.fingerprint, name

    def has(self, name: Name) -> bool:
        """Whether there is such a file."""
        return (self.home / str(name)).is_file()

    def _allows(self, connection: sqlite3.Connection, n_bytes: int) -> bool:
        return (
            self.daily_bytes is None
            or Index.written_today(connection) + n_bytes <= self.daily_bytes
        )

    def _satisfies(self, record: Record | None, exact: bool) -> bool:
        """Whether there is no need for a state as ``exact`` as that, because ``record`` is
        there.
        """
        return record is not None and (record.exact or not exact) and self.has(record.name)


def _epoch(at: float) -> float:
    """Epoch seconds of monotonic ones."""
    return time.time() - (time.monotonic() - at)
