"""Writing snapshots into a cache directory: only missing files, within the budget and the daily
write budget.

A snapshot is published in one transaction, after all its files are complete under temp names: see
`write_queue` for the order, and for the files that a kill leaves at each step.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from pyctl.cache.snapshot import DRAFT, RECURRENT, Block, Segment, Snapshot
from pyctl.disk.chain import ChainNames, segment_blocks
from pyctl.disk.file_format import MAX_TOKENS, Header, Name, PartKind, SegmentName, StateName
from pyctl.disk.graph import FileGraph
from pyctl.disk.index import Index, Key, Record, file_path
from pyctl.disk.model_folder import ModelFolder
from pyctl.disk.segment_files import remove_file, segment_parts, write_file
from pyctl.disk.transaction import Transaction
from pyctl.disk.write_job import Writing
from pyctl.errors import NotWrittenError
from pyctl.files.atomic_file import sync_directory, temp_path
from pyctl.settings.limit import limit

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

MAX_ATTEMPTS = 3
"""Attempts to write a snapshot whose segments on disk other processes remove meanwhile."""

DAY_SECONDS = 86_400


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


@dataclass
class _SpilledToday:
    """The bytes of evicted snapshots that this process wrote on a ``day`` (UTC)."""

    day: int = 0
    n_bytes: int = 0

    def on(self, day: int) -> int:
        """Return the bytes of ``day``, and start to count it."""
        if self.day != day:
            self.day = day
            self.n_bytes = 0
        return self.n_bytes


class StoreWriter:
    """The writes of snapshots of the model of ``folder``; ``daily_bytes`` limits the bytes that all
    processes write in a day (UTC), None for no limit.
    """

    def __init__(self, folder: ModelFolder, daily_bytes: int | None = None) -> None:
        self.folder = folder
        self.directory = folder.directory
        self.daily_bytes = daily_bytes
        self._spilled = _SpilledToday()
        self._warned_day = 0  # the day on which the log reported that the daily budget is used up

    # -- snapshots
    # ----------------------------------------------------------------------------------

    def write(self, snapshot: Snapshot, label: str = "", *, spilled: bool = False) -> Writing:
        """Store ``snapshot``, a segment each time that the one that it yielded has its rows; for
        one writing thread per folder.

        ``label`` describes its content to users. A ``spilled`` one may take part of the bytes of a
        day only, and does not replace snapshots of more worth. 0 when it is too long, stored
        already, or does not fit the bytes of the day. NotWrittenError when its rows were given up,
        or the directory has no room for it. OSError when the disk does not take it; nothing stays
        then, and nothing can be found before all is there.
        """
        for _ in range(MAX_ATTEMPTS):  # segments that were there at first may be gone at the end
            writing = self._open(snapshot, label, spilled)
            if writing is None:
                return 0
            try:
                for segment in writing.names.missing:
                    yield segment
                    self._add(writing, segment)
                n_bytes = self._finish(writing)
            finally:
                self._close(writing)
            if n_bytes is not None:
                return n_bytes
        raise NotWrittenError("other processes remove segments that it needs")

    def _open(self, snapshot: Snapshot, label: str, spilled: bool) -> OpenWrite | None:
        """Return the files of ``snapshot`` to write; None if `write` writes nothing."""
        if snapshot.segment.end > MAX_TOKENS:
            return None
        if snapshot.state.parts.keys() - {RECURRENT, DRAFT}:
            return None  # no file has room for the other parts
        self.directory.restore_index()
        self.directory.read_ahead()
        with self.directory.reading() as connection:
            names = ChainNames(snapshot, partial(self._is_whole, connection))
            twin = Index.record(connection, self.folder.key(StateName.from_prefix(snapshot.prefix)))
            written_today = Index.written_today(connection, self.directory.clock())
        if self._satisfies(twin, snapshot.exact):
            return None
        n_bytes = snapshot.state.n_bytes
        n_bytes += sum(segment.n_bytes + segment.device_only_bytes for segment in names.missing)
        if self.directory.budget is not None and n_bytes > self.directory.budget:
            raise NotWrittenError(
                f"it may need {n_bytes / 2**20:,.0f} MiB, more than --kv-cache-budget"
            )
        if spilled:
            if not (self._may_spill(n_bytes, written_today) and self._would_stay(snapshot)):
                return None
        elif not self._within_daily_limit(n_bytes, written_today):
            self._log_limit_once(written_today)
            return None
        return OpenWrite(snapshot, label, names, spilled)

    def _add(self, writing: OpenWrite, segment: Segment) -> None:
        """Write ``segment``, the next of those missing, under a temp name.

        NotWrittenError if its rows were given up.
        """
        name, parent = writing.names.name(segment)
        with self.directory.reading() as connection:
            if self._is_whole(connection, name):
                return  # another process was faster
        path = writing.temps.enter_context(temp_path(self.folder.path))
        writing.records[path] = self._write_temp(path, name, parent, False, segment_blocks(segment))

    def _finish(self, writing: OpenWrite) -> int | None:
        """Write the state and publish everything; return the bytes written, None if segments that
        were there are gone.

        NotWrittenError if the directory is full or the snapshot is no longer selected.
        """
        names = writing.names
        snapshot = writing.snapshot
        path = writing.temps.enter_context(temp_path(self.folder.path))
        record = self._write_state(path, snapshot, names.chain[-1])
        if writing.is_spilled:
            record = replace(record, used=self._epoch(snapshot.used), hits=snapshot.hits)
        writing.records[path] = record
        chain = [self.folder.key(name) for name in names.chain]
        n_bytes = self._publish(snapshot, writing.records, chain, writing.label)
        if n_bytes is None:
            return None
        if n_bytes == 0:
            raise NotWrittenError("the directory is full, or the snapshot is no longer selected")
        sync_directory(self.folder.path)
        for segment in names.missing:
            segment.file.is_there = True
        writing.records.clear()
        if writing.is_spilled:
            self._spilled.n_bytes += n_bytes
        return n_bytes

    def _close(self, writing: OpenWrite) -> None:
        """Remove the files that were not published; they count for the day all the same."""
        with writing.temps:
            n_bytes = sum(record.n_bytes for record in writing.records.values())
            if n_bytes:
                with self.directory.changing(is_shown=False) as transaction:
                    Index.add_written(transaction.connection, n_bytes, self.directory.clock())

    # -- one transaction
    # ----------------------------------------------------------------------------------

    def adopt(self, temps: dict[Path, Record], chain: list[Key]) -> bool:
        """Move whole, checked files into the directory: a state, and the files that the directory
        lacks of the ``chain`` under it.

        Returns False if there is no room for them, or the day has none. OSError as `write`. Any
        thread.
        """
        n_bytes = self._publish(None, temps, chain, "")
        if n_bytes:
            sync_directory(self.folder.path)
        return bool(n_bytes)

    def _publish(
        self, snapshot: Snapshot | None, temps: dict[Path, Record], chain: list[Key], label: str
    ) -> int | None:
        """Rename the files ``temps``, enter them and remove others for them, in one transaction.

        Return the bytes of the new files: 0 if there is no room for them or no need, or if the
        ``snapshot`` is no longer for the disk; None if the directory lacks a file of ``chain``.

        If anything fails, the new files go and the evicted ones stay. The drive holds no more bytes
        for that: it has the new files already, under their temp names.
        """
        state_path, state = next(item for item in temps.items() if item[1].is_state)
        renamed: list[Path] = []
        try:
            with self.directory.changing() as transaction:
                graph = transaction.graph
                twin = graph.records.get(state.key)
                if self._satisfies(twin, state.exact):
                    return 0
                if snapshot is not None and not snapshot.facts.for_disk:
                    return 0  # it was removed while it was written
                fresh = {
                    path: record
                    for path, record in temps.items()
                    if not self._is_stored(graph, record.key)
                }
                if twin is not None:  # the use of the less exact one counts on
                    fresh[state_path] = replace(state, hits=twin.hits, pinned=twin.pinned)
                arriving = {record.key for record in fresh.values()}
                # ``chain`` begins at the deepest file that was there when the write began; the
                # files under that one may have been removed by hand since, without the index.
                needed = [*graph.chain(chain[0]), *chain]
                if not all(key in arriving or self._is_stored(graph, key) for key in needed):
                    return None
                n_bytes = sum(record.n_bytes for record in fresh.values())
                written_today = Index.written_today(transaction.connection, self.directory.clock())
                if not self._within_daily_limit(n_bytes, written_today):
                    return 0
                evicted = self._plan_eviction(transaction, fresh.values(), state.key)
                if evicted is None:
                    return 0
                for path, record in fresh.items():
                    target = file_path(self.directory.path, record.key)
                    os.replace(path, target)
                    renamed.append(target)
                    transaction.insert(record, label if record.is_state else "")
                transaction.delete(evicted)
                Index.add_written(transaction.connection, n_bytes, self.directory.clock())
        except BaseException:
            for path in renamed:
                remove_file(path)
            raise
        return n_bytes

    def _plan_eviction(
        self, transaction: Transaction, fresh: Collection[Record], state: Key
    ) -> list[Record] | None:
        """Add ``fresh`` files to the graph, and take out of it the files that have to go for them,
        but not ``state``. Return the latter; None, and nothing changes, if the budget has no room.
        """
        graph = transaction.graph
        replaces = state in graph.records
        for record in fresh:
            graph.add(record)
        evicted: list[Record] = []
        if self.directory.budget is not None:
            file_budget = self.directory.budget - self.directory.auxiliary_bytes()
            evicted = graph.shrink(file_budget, {state})
            if graph.n_bytes > file_budget:
                transaction.discard_graph()
                return None
        if replaces:
            for key in graph.invalid_keys():  # segments that only the replaced state needed
                evicted += graph.remove(key)
        return evicted

    def reserve_write(self, n_bytes: int) -> bool:
        """Make room for bytes of prompts or replies and count them; return False if the day has
        none for them.
        """
        with self.directory.changing(is_shown=False) as transaction:
            written_today = Index.written_today(transaction.connection, self.directory.clock())
            if not self._within_daily_limit(n_bytes, written_today):
                return False
            if self.directory.budget is not None:
                room = self.directory.budget - self.directory.auxiliary_bytes()
                transaction.shrink(room - n_bytes)
            Index.add_written(transaction.connection, n_bytes, self.directory.clock())
        return True

    # -- limits
    # ----------------------------------------------------------------------------------

    @property
    def _today(self) -> int:
        """The number of the day (UTC) since the epoch."""
        return int(self.directory.clock() // DAY_SECONDS)

    def _within_daily_limit(self, n_bytes: int, written_today: int) -> bool:
        return self.daily_bytes is None or written_today + n_bytes <= self.daily_bytes

    def _log_limit_once(self, written_today: int) -> None:
        """Log once a day that it has no more room."""
        day = self._today
        if self._warned_day == day:
            return
        self._warned_day = day
        log.warning(
            "disk cache: %.1f GiB written today, the limit of --kv-cache-daily-writes; new "
            "snapshots stay in RAM until midnight UTC",
            written_today / 2**30,
        )

    def _may_spill(self, n_bytes: int, written_today: int) -> bool:
        """Return whether an evicted snapshot of ``n_bytes`` may still be written today."""
        budget = self.directory.budget
        spilled_today = self._spilled.on(self._today)
        if budget is not None and spilled_today + n_bytes > SPILLED_PER_DAY * budget:
            return False
        return self._within_daily_limit(SPILL_SHARE * n_bytes, SPILL_SHARE * written_today)

    def _would_stay(self, snapshot: Snapshot) -> bool:
        """Return whether the snapshots to evict for ``snapshot``, if any, are worth less.

        The eviction is tried on the graph of a transaction, which is discarded: the trial evicts as
        the real one would, and the index stays as it is.
        """
        budget = self.directory.budget
        if budget is None:
            return True
        fresh = self._estimate_records(snapshot)
        state = fresh[-1]
        with self.directory.changing(is_shown=False) as transaction:
            graph = transaction.graph
            file_budget = budget - self.directory.auxiliary_bytes()
            if graph.n_bytes + sum(record.n_bytes for record in fresh) <= file_budget:
                return True
            transaction.discard_graph()  # a trial: the index has none of the following
            for record in fresh:
                graph.add(record)
            evicted = graph.shrink(file_budget)
            return graph.n_bytes <= file_budget and all(
                evicted_state.key != state.key for evicted_state in evicted
            )

    def _estimate_records(self, snapshot: Snapshot) -> list[Record]:
        """Return records of about the files of ``snapshot`` that are missing, the state last."""
        now = self.directory.clock()
        records: list[Record] = []
        with self.directory.reading() as connection:
            names = ChainNames(snapshot, partial(self._is_whole, connection))
            for segment in names.missing:
                n_bytes = segment.n_bytes
                name, parent = names.name(segment)
                if not self._is_whole(connection, name):
                    fingerprint = self.folder.fingerprint
                    records.append(Record(fingerprint, name, n_bytes, parent, False, now, now))
        state = Record(
            self.folder.fingerprint,
            StateName.from_prefix(snapshot.prefix),
            snapshot.state.n_bytes,
            names.chain[-1],
            snapshot.exact,
            created=now,
            used=self._epoch(snapshot.used),
            hits=snapshot.hits,
        )
        return [*records, state]

    def _epoch(self, at: float) -> float:
        """Return the epoch seconds of monotonic seconds."""
        return self.directory.clock() - (time.monotonic() - at)

    # -- files
    # ----------------------------------------------------------------------------------

    def _write_state(self, path: Path, snapshot: Snapshot, parent: SegmentName) -> Record:
        blocks = {PartKind.STATE: snapshot.state.recurrent}
        if snapshot.state.draft.size:
            blocks[PartKind.DRAFT_STATE] = snapshot.state.draft
        return self._write_temp(
            path, StateName.from_prefix(snapshot.prefix), parent, snapshot.exact, blocks
        )

    def _write_temp(
        self,
        path: Path,
        name: Name,
        parent: SegmentName | None,
        exact: bool,
        blocks: Mapping[PartKind, Block],
    ) -> Record:
        """Write and sync a file under its temp name ``path``; return its record."""
        now = self.directory.clock()
        fingerprint = self.folder.fingerprint
        whole = {kind: np.ascontiguousarray(block) for kind, block in blocks.items()}
        header = Header(fingerprint, name, parent, exact, now, segment_parts(whole))
        write_file(path, header, whole)
        return Record(fingerprint, name, header.offsets[-1], parent, exact, now, now)

    def _is_whole(self, connection: sqlite3.Connection, name: SegmentName) -> bool:
        """Return whether a segment is stored with all its ancestors."""
        current: SegmentName | None = name
        while current is not None:
            record = Index.record(connection, self.folder.key(current))
            if record is None or not self.folder.has_file(current):
                return False
            current = record.parent
        return True

    def _is_stored(self, graph: FileGraph, key: Key) -> bool:
        """Return whether ``key`` is in the index and on the drive."""
        return key in graph.records and self.folder.has_file(key[1])

    def _satisfies(self, record: Record | None, exact: bool) -> bool:
        """Return whether ``record`` is a stored state that is exact, if ``exact`` is required."""
        if record is None or (exact and not record.exact):
            return False
        return self.folder.has_file(record.name)
