"""The disk tier for the engine: lookup of stored prefixes, the choice of prefixes to write, and the
writing thread.

The engine's thread never waits for a write: the list of stored prefixes is in memory, and the
writing thread does all work that needs the index, a writer's lock, or the drive. A request waits
only for a snapshot that it restores, and only if evaluation would take longer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import TypeAlias

from pyctl.cache.costs import Costs
from pyctl.cache.disk.directory import Contents
from pyctl.cache.disk.file_format import PROMPTS, StateName
from pyctl.cache.disk.recent_files import DEFAULT_FILE_BYTES, RecentFiles
from pyctl.cache.disk.remote_store import RemoteStore
from pyctl.cache.disk.store import DiskStore
from pyctl.cache.disk.write_queue import WriteQueue
from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.pending_snapshot import PendingSnapshot
from pyctl.cache.ports import DiskView, Entry, HandOver, RowsOf, Writing
from pyctl.cache.reads import Reading, Reads
from pyctl.cache.recent import RecentMatches, RecentPrompts
from pyctl.cache.snapshot import Prefix, PromptMatch, Snapshot

__all__ = ["DiskTier"]

log = logging.getLogger(__name__)

TextOf: TypeAlias = Callable[[Sequence[int]], str]

FLUSH_SECONDS = 10.0
"""How long closing may take."""

REFRESH_SECONDS = 1.0
"""How often to look for what other processes have written, while there are requests."""

WORTH_WRITING = 0.1
"""A snapshot is written only if it saves this part of the seconds that reading it takes."""

MEASURED_BYTES = 2**20
"""Smaller reads do not show a drive's speed."""

HEAD_TOKENS = 12
TAIL_TOKENS = 24
"""How much of a prefix people are shown."""


class DiskTier:
    """The `Store` on disk: reads from and writes to ``store``; ``policy`` serves requests that name
    none.

    ``text_of`` makes text of tokens for people. ``remote`` is the object store. The engine's thread
    calls everything and changes `recent`; a separate thread writes, and one that reads recovers.
    Closing takes at most ``close_seconds``.
    """

    def __init__(
        self,
        store: DiskStore,
        policy: DiskPolicy,
        *,
        cold_max: int,
        text_of: TextOf | None = None,
        close_seconds: float = FLUSH_SECONDS,
        remote: RemoteStore | None = None,
    ) -> None:
        self.store = store
        self.remote = remote
        self.policy = policy
        self.close_seconds = close_seconds
        self._cold_max = cold_max
        self.recent = RecentPrompts()
        self._recent_files = RecentFiles(
            store.home / PROMPTS, store.limit_beside(DEFAULT_FILE_BYTES), store.files.spend
        )
        self.recent.load(self._recent_files.load())
        self._text_of = text_of
        self.queue = WriteQueue(self._write)
        store.run_soon = self.queue.run_soon
        store.note_read = self._note_read
        self.costs = Costs()
        self.n_hits = 0
        self._refreshed = time.monotonic()
        # Start-up never waits for a large directory; a file is a miss until it is adopted.
        (self._recovery,) = store.directory.readers.start([self._recover])

    def find(self, prompt: PromptMatch, limit: int) -> list[Prefix]:
        """The prefixes of ``prompt`` of ``limit`` tokens at most that are stored, the deepest
        first.
        """
        self._refresh_soon()
        return self.store.find(prompt, limit)

    def far(self, prompt: PromptMatch, limit: int) -> list[tuple[Prefix, float]]:
        """The prefixes of ``prompt`` of ``limit`` tokens at most that only the object store has,
        and the seconds until they are here.
        """
        if self.remote is None:
            return []
        covered = next((prefix.n for prefix in self.find(prompt, limit)), 0)
        return self.remote.far(prompt, limit, covered)

    def fetch(self, prefix: Prefix) -> Reads | None:
        """Start to bring here what only the object store has; None if that cannot be now."""
        return self.remote.fetch(prefix) if self.remote is not None else None

    def open(
        self,
        prefix: Prefix,
        prompt: PromptMatch,
        base: Snapshot | None,
        max_bytes: int | None = None,
    ) -> Reading[PendingSnapshot | None]:
        """The snapshot of ``prefix`` on its way here, None if there is none; what ``base`` has is
        not read, and of more than ``max_bytes`` the rest comes when the first has left RAM.
        """
        return (yield from self.store.open(prefix, prompt.tokens, base, max_bytes))

    @property
    def contents(self) -> Contents:
        """The contents of the directory: a new object after each change."""
        return self.store.directory.contents

    def entries(self) -> list[Entry]:
        """The snapshots of this model, the last used first; waits for the disk, on any thread."""
        return [
            each
            for each in self.store.directory.entries()
            if each.fingerprint == self.store.fingerprint
        ]

    def stored(self, prefix: Prefix) -> bool:
        """Whether the state of ``prefix`` is on disk; does not wait."""
        return self.store.contains(prefix)

    def refuse(self, snapshot: Snapshot) -> None:
        """Lose a snapshot that came from here and is of no use to the model."""
        self.store.refuse(snapshot.prefix)
        if self.remote is not None:
            self.remote.distrust(StateName.of(snapshot.prefix))

    def count_hit(self, snapshot: Snapshot) -> None:
        """Note that a snapshot from here was of use."""
        self.n_hits += 1
        self.queue.run_soon(partial(self.store.touch, snapshot.prefix))

    def select(
        self, matches: RecentMatches, start: int, policy: DiskPolicy | None = None
    ) -> tuple[int, ...]:
        """The prefix lengths past ``start`` that belong on disk, of a prompt that was compared with
        `recent`.
        """
        policy = policy or self.policy
        chosen = policy.select(
            matches, min_tokens=self.store.min_tokens, cold_max=self._cold_max, start=start
        )
        if policy.kind == "auto":
            n_recent = min(policy.window, sum(recent.for_disk for recent in matches.recent))
            log.debug(
                "disk policy auto: %d of %d recent prompts share %d tokens, %d go to disk",
                n_recent,
                policy.window,
                chosen.safe,
                chosen.selected,
            )
        return chosen.positions

    def remove(self, name: str) -> bool:
        """Remove the snapshot called ``name``, also if it waits to be written; False if there is
        none.

        Waits for the disk; any thread may call it.
        """
        found = self.queue.drop(name)
        if self.remote is not None:  # first, so that it is not fetched again
            found |= self.remote.remove(name)
        return self.store.directory.remove(f"{self.store.fingerprint}/{name}") or found

    def should_store(self, snapshot: Snapshot, *, is_last: bool = False) -> bool:
        """Whether the disk may have it and has not got it."""
        return snapshot.facts.for_disk and self.store.should_store(snapshot, is_last=is_last)

    def write(self, snapshot: Snapshot, *, is_last: bool = False) -> None:
        """Queue ``snapshot``, if it is selected, as `WriteQueue.write` does; the last one however
        short it is.
        """
        if self.should_store(snapshot, is_last=is_last):
            self.queue.write(snapshot)

    def evict(self, snapshot: Snapshot, worth: float, rows_of: RowsOf) -> None:
        """Keep the part to be written of ``snapshot``, which saves ``worth`` seconds and leaves
        RAM: the queue has it, or the policy spills and that is a tenth of what reading it takes
        (bench/results/spill.md of 1323d1c8).
        """
        if self.should_store(snapshot):
            missing = [segment for segment in snapshot.chain if not segment.file.is_there]
            n_bytes = snapshot.state.n_bytes + sum(
                each.n_bytes + each.only_held_bytes for each in missing
            )
            spills = self.policy.spill and worth >= WORTH_WRITING * self.costs.read(n_bytes)
            self.queue.evict(snapshot, rows_of, worth, n_bytes, spills=spills)

    def flush(self, timeout: float) -> bool:
        """Wait until the queue is written, ``timeout`` seconds at most; False if something is
        left.
        """
        return self.queue.flush(timeout)

    def view(self) -> DiskView:
        """Contents and counters of the tier."""
        self._refresh_soon()
        directory = self.store.directory
        return DiskView(
            self.policy.name,
            len(self.store.lengths()),
            directory.contents.n_bytes,
            directory.budget or -1,
            self.n_hits,
            self.queue.written,
            self.store.damaged,
            self.queue.n_waiting,
            self.queue.n_failed,
            self.queue.spilled,
            self.queue.n_dropped,
            self.remote.view() if self.remote is not None else None,
        )

    def close(self, hand_over: HandOver = lambda: None) -> bool:
        """Write the queue and close the store, within ``close_seconds``; False if something is not
        written.
        """
        n_failed = self.queue.n_failed
        deadline = time.monotonic() + self.close_seconds
        self.queue.run_soon(self._save_recent)
        done = self.queue.close(self.close_seconds, hand_over)
        if not done:
            log.warning("disk cache: writes are incomplete after %.0f s", self.close_seconds)
        if self.remote is not None:
            self.remote.close(max(deadline - time.monotonic(), 0.1))
        wait((self._recovery,), max(deadline - time.monotonic(), 0.1))
        if done and self._recovery.done():
            self.store.close()  # which would wait for its users
        return done and self.queue.n_failed == n_failed

    def _write(self, snapshot: Snapshot, spilled: bool) -> Writing:
        """Store ``snapshot`` with a label for people, and recent prompts with it, since a process
        may be killed.
        """
        n_bytes = yield from self.store.files.write(
            snapshot, self._label(snapshot), spilled=spilled
        )
        if self.remote is not None:
            self.remote.wake.set()
        self._save_recent()
        return n_bytes

    def _save_recent(self) -> None:
        try:
            self._recent_files.save(self.recent.newest_first())
        except OSError as error:
            log.warning("cannot write recent prompts: %s", error)

    def _label(self, snapshot: Snapshot) -> str:
        """The beginning and the end of the prefix."""
        if self._text_of is None:
            return ""
        parts = (
            self._text_of(tokens)
            for tokens in (snapshot.head(HEAD_TOKENS), snapshot.tail(TAIL_TOKENS))
        )
        return " … ".join(" ".join(part.split()) for part in parts)

    def _note_read(self, n_bytes: int, seconds: float) -> None:
        if n_bytes >= MEASURED_BYTES:
            self.costs.note_read(n_bytes, seconds)

    def _refresh_soon(self) -> None:
        now = time.monotonic()
        if now - self._refreshed >= REFRESH_SECONDS:
            self._refreshed = now
            self.queue.run_soon(self.store.directory.refresh)

    def _recover(self) -> None:
        try:
            self.store.directory.recover()
        except OSError as error:
            log.warning("cannot scan the disk cache: %s", error)
