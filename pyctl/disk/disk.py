"""The disk as the cache and the engine use it: find, read, choose, write.

The engine's thread never waits for a write: the list of stored prefixes is in memory, and the
writing thread does all work that needs the index, a writer's lock, or the drive (`write_queue`). A
request waits only for a snapshot that it restores, and only if evaluation would take longer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from pyctl.cache.costs import Costs
from pyctl.cache.device_limits import MAX_UNWRITTEN_BYTES
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.pending_snapshot import PendingSnapshot
from pyctl.cache.ports import DiskView, Entry, FlushCopies, RowsOf
from pyctl.cache.reads import Reading, Reads
from pyctl.cache.recent import RecentMatches, RecentPrompts
from pyctl.cache.snapshot import Prefix, PromptMatch, Snapshot
from pyctl.disk.file_format import PROMPTS, StateName
from pyctl.disk.index_mirror import Contents
from pyctl.disk.reader import StoreReader
from pyctl.disk.readers import STALL_SECONDS
from pyctl.disk.recent_files import DEFAULT_FILE_BYTES, RecentFiles
from pyctl.disk.remote_store import RemoteStore
from pyctl.disk.stored_checks import DiskChecks
from pyctl.disk.write_job import Writing
from pyctl.disk.write_queue import RETRY_SECONDS, WriteQueue
from pyctl.disk.writer import StoreWriter

__all__ = ["Disk", "WriteLimits"]

log = logging.getLogger(__name__)

TextOf: TypeAlias = Callable[[Sequence[int]], str]

CLOSE_SECONDS = 10.0
"""Time for pending writes when the server ends."""

REFRESH_SECONDS = 1.0
"""Interval of looks for the writes of other processes, while there are requests."""

WORTH_WRITING = 0.1
"""An evicted snapshot is written only if it saves this fraction of the seconds that reading it
takes (bench/results/spill.md of 1323d1c8).
"""

MEASURED_BYTES = 2**20
"""Smaller reads do not show a drive's speed."""

HEAD_TOKENS = 12
"""Tokens at the start of a prefix in its label."""

TAIL_TOKENS = 24
"""Tokens at the end of a prefix in its label."""


@dataclass(frozen=True)
class WriteLimits:
    """Limits on writes.

    Attributes:
        min_tokens: The minimum tokens of a prefix, except at the end of a conversation.
        cold_max: The maximum tokens of an additional prefix of a long prompt under policy ``full``.
        close_seconds: The maximum seconds of writing when the disk is closed.
        retry_seconds: The pause after the disk refused a write.
        stall_seconds: The seconds after which a write without progress counts as one that hangs.
        spilled_bytes: The maximum bytes of evicted snapshots that wait.
        recent_bytes: The maximum bytes of the files of recent prompts.
        interim_seconds: The seconds of evaluation after which an interim snapshot is written, 0
            for none.
    """

    min_tokens: int = 512
    cold_max: int = 10_240
    close_seconds: float = CLOSE_SECONDS
    retry_seconds: float = RETRY_SECONDS
    stall_seconds: float = STALL_SECONDS
    spilled_bytes: int = MAX_UNWRITTEN_BYTES
    recent_bytes: int = DEFAULT_FILE_BYTES
    interim_seconds: float = 0.0


class Disk:
    """The `Store` on disk: ``reader`` and ``writer`` are of the same folder; ``policy`` serves
    requests that name none.

    ``text_of`` makes readable text of tokens. ``remote`` is the object store. The engine's thread
    calls everything and changes ``recent``, except where a method names other threads. The queue's
    thread writes, and one that reads recovers the directory: start-up never waits for that, and a
    file is a miss until it is adopted.
    """

    def __init__(
        self,
        reader: StoreReader,
        writer: StoreWriter,
        policy: DiskPolicy,
        limits: WriteLimits = WriteLimits(),
        *,
        text_of: TextOf | None = None,
        remote: RemoteStore | None = None,
    ) -> None:
        """Read the recent prompts, start the writing thread, and start to recover what a killed
        process left. Opening does not wait for the recovery.
        """
        self.folder = reader.folder
        self.directory = reader.folder.directory
        self.reader = reader
        self.writer = writer
        self.remote = remote
        self.policy = policy
        self.close_seconds = limits.close_seconds
        self.interim_seconds = limits.interim_seconds
        self.costs = Costs()
        self.recent = RecentPrompts()
        self.on_rows_needed: FlushCopies = lambda: None
        self.n_hits = 0
        self._limits = limits
        self._text_of = text_of
        self._refreshed_at = time.monotonic()
        self._recent_files = RecentFiles(
            self.folder.path / PROMPTS,
            self.folder.auxiliary_limit(limits.recent_bytes),
            writer.reserve_write,
        )
        self.recent.load(self._recent_files.load())
        self.queue = self._make_queue()
        self.checks = DiskChecks(reader, self.queue, remote)
        self.queue.on_rows_needed = lambda: self.on_rows_needed()
        self.queue.start()
        reader.run_soon = self.queue.run_soon
        reader.record_read = self._record_read
        (self.recovery,) = self.directory.readers.start([self._recover])

    def _make_queue(self) -> WriteQueue:
        """Return the queue, which has not started."""
        return WriteQueue(
            self._write,
            self._limits.spilled_bytes,
            retry_seconds=self._limits.retry_seconds,
            stall_seconds=self._limits.stall_seconds,
        )

    # -- finding and reading
    # ----------------------------------------------------------------------------------

    def find(self, prompt: PromptMatch, limit: int) -> list[Prefix]:
        """Return the prefixes of ``prompt`` of ``limit`` tokens at most that are stored, the
        deepest first.
        """
        self._refresh_soon()
        if self.checks.is_in_doubt:
            return []
        return self.folder.find(prompt, limit)

    def find_remote(self, prompt: PromptMatch, limit: int) -> list[tuple[Prefix, float]]:
        """Return the prefixes of ``prompt`` of ``limit`` tokens at most that only the object store
        has, and the seconds until each is here.
        """
        if self.remote is None:
            return []
        stored = self.find(prompt, limit)
        n_covered = stored[0].n if stored else 0
        return self.remote.find(prompt, limit, n_covered)

    def fetch(self, prefix: Prefix) -> Reads | None:
        """Start to fetch ``prefix`` from the object store to the disk; return None if that is
        impossible now.
        """
        return self.remote.fetch(prefix) if self.remote is not None else None

    def open(
        self,
        prefix: Prefix,
        prompt: PromptMatch,
        base: Snapshot | None,
        max_bytes: int | None = None,
    ) -> Reading[PendingSnapshot | None]:
        """Start to read ``prefix`` without the rows of ``base``; return None if it is gone. Beyond
        ``max_bytes``, the rest is read when the first has left RAM.
        """
        return (yield from self.reader.open(prefix, prompt.tokens, base, max_bytes))

    def contains(self, prefix: Prefix) -> bool:
        """Return whether the state of ``prefix`` is on disk."""
        return self.folder.contains(prefix)

    def count_hit(self, snapshot: Snapshot) -> None:
        """Record that a snapshot from here was of use."""
        self.n_hits += 1
        self.queue.run_soon(partial(self._touch, StateName.from_prefix(snapshot.prefix)))

    def discard(self, snapshot: Snapshot) -> None:
        """Drop a snapshot that came from here and is of no use to the model."""
        self.reader.discard(snapshot.prefix)
        if self.remote is not None:
            self.remote.exclude(StateName.from_prefix(snapshot.prefix))

    # -- choosing and writing
    # ----------------------------------------------------------------------------------

    def select(
        self, matches: RecentMatches, start: int, policy: DiskPolicy | None = None
    ) -> tuple[int, ...]:
        """Return the prefix lengths past ``start`` that belong on disk, of a prompt that was
        compared with ``recent``.
        """
        policy = policy or self.policy
        chosen = policy.select(
            matches,
            min_tokens=self._limits.min_tokens,
            cold_max=self._limits.cold_max,
            start=start,
        )
        if policy.kind == "auto":
            n_recent = min(policy.window, sum(recent.for_disk for recent in matches.recent))
            log.debug(
                "disk policy auto: %d of %d recent prompts share %d tokens, %d go to disk",
                n_recent,
                policy.window,
                chosen.eligible_len,
                chosen.selected,
            )
        return chosen.positions

    def write(self, snapshot: Snapshot, *, is_last: bool = False) -> None:
        """Queue a ``snapshot`` of the cache if the disk may have it and lacks it, the last one
        however short; its bytes in RAM are complete.
        """
        if self._should_store(snapshot, is_last=is_last):
            self.queue.write(snapshot)

    def write_interim(self, snapshot: Snapshot) -> bool:
        """Queue a ``snapshot`` of a prompt that is still being evaluated; return False if the disk
        has it or may not have it. Its bytes in RAM are complete.

        It may take part of the bytes of a day only, and does not replace snapshots of more worth.
        """
        if not self._should_store(snapshot):
            return False
        self.queue.write(snapshot, is_interim=True)
        return True

    def is_queued(self, prefix: Prefix) -> bool:
        """Return whether a snapshot of ``prefix`` is to be written."""
        return self.queue.is_queued(prefix)

    def supersede(self, prefix: Prefix) -> None:
        """Remove the state of ``prefix`` soon, unless it was used or is pinned: the disk has a
        deeper one of its prompt.
        """
        self.queue.run_soon(partial(self._remove_unused, StateName.from_prefix(prefix)))

    def evict(self, snapshot: Snapshot, value: float, rows_of: RowsOf) -> None:
        """Keep the part to be written of ``snapshot``, which saves ``value`` seconds and leaves
        RAM: if it is queued, or if the policy spills and it is worth reading again.
        """
        if not self._should_store(snapshot):
            return
        missing = [segment for segment in snapshot.chain if not segment.file.is_there]
        n_bytes = snapshot.state.n_bytes
        n_bytes += sum(each.n_bytes + each.device_only_bytes for each in missing)
        spills = self.policy.spill and value >= WORTH_WRITING * self.costs.read(n_bytes)
        self.queue.evict(snapshot, rows_of, value, n_bytes, spills=spills)

    @property
    def awaits_rows(self) -> bool:
        """True if a write waits for `supply_rows`."""
        return self.queue.awaits_rows

    def supply_rows(self, rows_of: RowsOf) -> None:
        """Bring the rows that a write needs, as `WriteQueue.supply_rows` does."""
        self.queue.supply_rows(rows_of)

    @property
    def is_draining_device(self) -> bool:
        """True if rows that only the device has are being written."""
        return self.queue.is_draining_device

    def drop_lowest_value(self) -> bool:
        """Drop the snapshot of lowest value among those that wait and take RAM; return False if
        there is none.
        """
        return self.queue.drop_lowest_value()

    # -- managing
    # ----------------------------------------------------------------------------------

    @property
    def contents(self) -> Contents:
        """The contents of the directory: another object after each change."""
        return self.directory.contents

    def entries(self) -> list[Entry]:
        """Return the snapshots of this model, the last used first; waits for the disk, on any
        thread.
        """
        entries = self.directory.entries()
        return [entry for entry in entries if entry.fingerprint == self.folder.fingerprint]

    def remove(self, name: str) -> bool:
        """Remove the snapshot called ``name``, also if it waits to be written; return False if
        there is none.

        Waits for the disk; any thread may call it.
        """
        was_queued = self.queue.remove(name)
        # The object store first, so that it is not fetched again.
        was_remote = self.remote is not None and self.remote.remove(name)
        was_stored = self.directory.remove(f"{self.folder.fingerprint}/{name}")
        return was_queued or was_remote or was_stored

    def view(self) -> DiskView:
        """Return the contents and counters of the disk."""
        self._refresh_soon()
        return DiskView(
            policy=self.policy.name,
            in_use=len(self.folder.lengths),
            n_bytes=self.contents.n_bytes,
            budget=self.directory.budget or -1,
            hits=self.n_hits,
            written=self.queue.written,
            damaged=self.reader.n_damaged,
            waiting=self.queue.n_waiting,
            failed=self.queue.n_failed,
            spilled=self.queue.spilled,
            interim=self.queue.interim,
            given_up=self.queue.n_dropped,
            store=self.remote.view() if self.remote is not None else None,
        )

    def flush(self, timeout: float) -> bool:
        """Wait until the queue is written, ``timeout`` seconds at most; return False if something
        is left.
        """
        return self.queue.flush(timeout)

    def close(self, flush_copies: FlushCopies = lambda: None) -> bool:
        """Write the queue and close everything, within ``close_seconds``; return False if something
        is not written.
        """
        n_failed = self.queue.n_failed
        deadline = time.monotonic() + self.close_seconds
        self.queue.run_soon(self._save_recent)
        is_written = self.queue.close(self.close_seconds, flush_copies)
        if not is_written:
            log.warning("disk cache: writes are incomplete after %.0f s", self.close_seconds)
        if self.remote is not None:
            self.remote.close(max(deadline - time.monotonic(), 0.1))
        wait((self.recovery,), max(deadline - time.monotonic(), 0.1))
        if is_written and self.recovery.done():
            self.directory.close()  # which would wait for its users
        return is_written and self.queue.n_failed == n_failed

    # -- other threads
    # ----------------------------------------------------------------------------------

    def _write(self, snapshot: Snapshot, spilled: bool) -> Writing:
        """Store ``snapshot`` with a label for users, and recent prompts with it, since a process
        may be killed.
        """
        label = self._label(snapshot)
        n_bytes = yield from self.writer.write(snapshot, label, spilled=spilled)
        if self.remote is not None:
            self.remote.wake.set()
        self._save_recent()
        return n_bytes

    def _touch(self, state: StateName) -> None:
        """Count a hit of ``state``, now; may wait for other writers."""
        try:
            with self.directory.changing() as transaction:
                transaction.touch(self.folder.key(state))
        except OSError:
            return  # a use of a file is lost, and no file: not worth an error

    def _remove_unused(self, state: StateName) -> None:
        """Remove ``state``, here and from the object store, unless it was used or is pinned."""
        key = self.folder.key(state)
        try:
            with self.directory.changing() as transaction:
                record = transaction.graph.records.get(key)
                if record is None or record.hits or record.pinned:
                    return
                transaction.delete(transaction.graph.remove(key))
        except OSError:
            return  # the directory evicts it later, when it needs room
        if self.remote is not None:
            self.remote.remove(state.prefix.name)

    def _save_recent(self) -> None:
        try:
            self._recent_files.save(self.recent.newest_first())
        except OSError as error:
            log.warning("cannot write recent prompts: %s", error)

    def _recover(self) -> None:
        try:
            self.directory.recover()
        except OSError as error:
            log.warning("cannot scan the disk cache: %s", error)

    # -- helpers
    # ----------------------------------------------------------------------------------

    def _should_store(self, snapshot: Snapshot, *, is_last: bool = False) -> bool:
        """Return whether the disk may have ``snapshot``, and lacks it or has only one that is not
        exact.
        """
        if not snapshot.facts.for_disk:
            return False
        if snapshot.n < self._limits.min_tokens and not is_last:
            return False
        is_stored_exact = self.folder.states.get(StateName.from_prefix(snapshot.prefix))
        return is_stored_exact is None or (snapshot.exact and not is_stored_exact)

    def _label(self, snapshot: Snapshot) -> str:
        """Return the beginning and the end of the prefix."""
        if self._text_of is None:
            return ""
        head = self._text_of(snapshot.head(HEAD_TOKENS))
        tail = self._text_of(snapshot.tail(TAIL_TOKENS))
        return " … ".join(" ".join(part.split()) for part in (head, tail))

    def _record_read(self, n_bytes: int, seconds: float) -> None:
        if n_bytes >= MEASURED_BYTES:
            self.costs.record_read(n_bytes, seconds)

    def _refresh_soon(self) -> None:
        now = time.monotonic()
        if now - self._refreshed_at >= REFRESH_SECONDS:
            self._refreshed_at = now
            self.queue.run_soon(self.directory.refresh)
