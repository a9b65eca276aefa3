"""The disk as the engine sees it: what it holds for a prompt, what belongs there, and the thread that writes.

The engine's thread asks and offers, and never waits: what is stored is known in memory, and whatever needs the index, a
lock that a writer holds, or the drive itself is done by the thread that writes. Only a snapshot that is restored is
waited for, where evaluating would take longer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from pyctl.cache.disk.chain import PendingSnapshot
from pyctl.cache.disk.file_format import PROMPTS
from pyctl.cache.disk.readers import Reading
from pyctl.cache.disk.store import DiskStore
from pyctl.cache.persist import DiskPolicy
from pyctl.cache.recent import DEFAULT_FILE_BYTES, RecentFiles, RecentMatches, RecentPrompts
from pyctl.cache.snapshot import Prefix, PromptMatch, Segment, Snapshot
from pyctl.limit import limit

__all__ = ["DiskTier", "DiskView", "WriteBehind"]

log = logging.getLogger(__name__)

TextOf: TypeAlias = Callable[[Sequence[int]], str]

RETRY_SECONDS = 60.0
"""After the disk refused, it is left alone so long."""

MAX_WAITING = limit(8, "snapshots that wait to be written", "the oldest is not written", "memory")

MAX_CALLS = limit(4096, "errands of a disk that hangs, such as noting a hit", "the oldest are not done", "memory")


class WriteBehind:
    """A queue of at most ``limit`` snapshots, newest last, and the thread that hands them to ``write``.

    A full queue gives up its oldest. ``write`` returns the bytes written; OSError, of a disk that is full or read-only,
    is a warning once a minute, what waits is kept for the next attempt, and the server goes on from RAM. Nothing here
    is held by the thread while it writes.
    """

    def __init__(self, write: Callable[[Snapshot], int], limit: int = MAX_WAITING) -> None:
        self._write_one = write
        self._limit = limit
        self._waiting: OrderedDict[Prefix, Snapshot] = OrderedDict()
        self._calls: deque[Callable[[], None]] = deque(maxlen=MAX_CALLS)
        self._changed = threading.Condition()
        self._busy = False
        self._closing = self._last_chance = False
        self._resume_at = 0.0
        self.n_bytes = 0
        self.n_failed = 0
        self._thread = threading.Thread(target=self._run, name="pyctl-disk", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> None:
        """Queue ``snapshot``. Its rows are held until they are written, also if the cache in RAM drops them."""
        copy = copy_of(snapshot)
        with self._changed:
            if self._closing or snapshot.prefix in self._waiting:
                return
            self._waiting[snapshot.prefix] = copy
            while len(self._waiting) > self._limit:
                self._waiting.popitem(last=False)
            self._changed.notify_all()

    def give_up_oldest(self) -> bool:
        """Take the oldest snapshot out of the queue; False if nothing waits."""
        with self._changed:
            if not self._waiting:
                return False
            self._waiting.popitem(last=False)
            return True

    @property
    def n_waiting(self) -> int:
        """Snapshots in the queue."""
        return len(self._waiting)

    def run_soon(self, function: Callable[[], None]) -> None:
        """Have ``function``, which may wait for the disk, called by the thread that writes."""
        with self._changed:
            self._calls.append(function)
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until everything queued is written, ``timeout`` seconds at most; False if something is left.

        What a disk that refused will be asked to take later is not waited for.
        """
        with self._changed:
            self._changed.wait_for(lambda: not (self._calls or self._busy or self._may_write()), timeout)
            return not (self._waiting or self._calls or self._busy)

    def retry(self) -> None:
        """Do not wait any longer after the disk refused."""
        with self._changed:
            self._resume_at = 0.0
            self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        """Flush, then stop the thread; False if it is still at work after ``timeout`` seconds.

        What waits is tried once more, and given up then. What is being written goes on, and is cut off when the process
        ends: a temp file.
        """
        deadline = time.monotonic() + timeout
        self._last_chance = True
        self.retry()
        self.flush(timeout)
        with self._changed:
            self._closing = True
            done = not self._waiting and not self._calls
            self._waiting.clear()
            self._calls.clear()
            self._changed.notify_all()
        self._thread.join(max(deadline - time.monotonic(), 0.1))
        return done and not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closing or self._calls or self._may_write()):
                    self._changed.wait(max(self._resume_at - time.monotonic(), 0.0) if self._waiting else None)
                if self._closing:
                    return
                job = self._calls.popleft() if self._calls else self._next_write()
                self._busy = True
            try:
                job()
            except Exception:
                log.exception("the prefix cache on disk")
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _may_write(self) -> bool:
        return bool(self._waiting) and time.monotonic() >= self._resume_at

    def _next_write(self) -> Callable[[], None]:
        # The newest first: it is what a restart would miss most.
        _, snapshot = self._waiting.popitem(last=True)
        return lambda: self._write(snapshot)

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self.n_bytes += self._write_one(snapshot)
        except OSError as error:
            self.n_failed += 1
            log.warning("the prefix cache cannot be written, serving goes on from RAM: %s", error)
            with self._changed:
                if not self._last_chance:
                    self._resume_at = time.monotonic() + RETRY_SECONDS
                    if len(self._waiting) < self._limit and snapshot.prefix not in self._waiting:
                        self._waiting[snapshot.prefix] = snapshot
                        self._waiting.move_to_end(snapshot.prefix, last=False)
        except Exception:
            self.n_failed += 1
            log.exception("a snapshot at %d could not be written", snapshot.n)


def copy_of(snapshot: Snapshot) -> Snapshot:
    """A copy with segments of its own that share the bytes, so that nobody can take them away."""
    parent: Segment | None = None
    for segment in reversed(snapshot.chain):
        parent = replace(segment, parent=parent, references=0)
    assert parent is not None
    return Snapshot(snapshot.prefix, parent, snapshot.state, snapshot.exact)


FLUSH_SECONDS = 10.0
"""How long closing may take."""

REFRESH_SECONDS = 1.0
"""How often to look for what other processes have written, while there are requests."""

HEAD_TOKENS, TAIL_TOKENS = 12, 24
"""How much of a prefix people are shown."""


@dataclass(frozen=True)
class DiskView:
    """Sums of the tier: lengths at which something is stored, bytes of the directory, its budget (-1: none), restores
    that came from it, bytes written by this process, files found damaged, snapshots that wait to be written, and those
    that could not be."""

    policy: str
    in_use: int
    n_bytes: int
    budget: int
    hits: int
    written: int
    damaged: int
    waiting: int = 0
    failed: int = 0


class _SnapshotWriter:
    """What the thread that writes does with a snapshot: stores it with words for people, and, since a process may be
    killed, the prompts that led to it.
    """

    def __init__(
        self,
        store: DiskStore,
        recent: RecentPrompts,
        files: RecentFiles,
        text_of: Callable[[Sequence[int]], str] | None,
    ) -> None:
        self._store, self._recent, self._files, self._text_of = store, recent, files, text_of

    def write(self, snapshot: Snapshot) -> int:
        n_bytes = self._store.write(snapshot, self._label(snapshot))
        self.save_recent()
        return n_bytes

    def save_recent(self) -> None:
        try:
            self._files.save(self._recent.newest_first())
        except OSError as error:
            log.warning("the recent prompts could not be written: %s", error)

    def _label(self, snapshot: Snapshot) -> str:
        """How the prefix begins and ends."""
        if self._text_of is None:
            return ""
        parts = (self._text_of(tokens) for tokens in (snapshot.head(HEAD_TOKENS), snapshot.tail(TAIL_TOKENS)))
        return " … ".join(" ".join(part.split()) for part in parts)


class DiskTier:
    """Reads from and writes behind to ``store``; ``policy`` is what a request gets that names none.

    ``text_of`` makes text of tokens for people. The engine's thread calls everything and changes `recent`; writing and
    recovery have threads of their own. Closing takes at most ``close_seconds``.
    """

    def __init__(
        self,
        store: DiskStore,
        policy: DiskPolicy,
        *,
        cold_max: int,
        text_of: TextOf | None = None,
        close_seconds: float = FLUSH_SECONDS,
    ) -> None:
        self.store = store
        self.policy = policy
        self.close_seconds = close_seconds
        self._cold_max = cold_max
        self.recent = RecentPrompts()
        files = RecentFiles(store.home / PROMPTS, store.limit_beside(DEFAULT_FILE_BYTES), store.spend)
        self.recent.load(files.load())
        self._writer = _SnapshotWriter(store, self.recent, files, text_of)
        self._behind = WriteBehind(self._writer.write)
        store.run_soon = self._behind.run_soon
        self.n_hits = 0
        self._refreshed = time.monotonic()
        # Start-up never waits for a large directory; what is not adopted yet is a miss until it is.
        self._recovery = threading.Thread(target=self._recover, name="pyctl-disk-recovery", daemon=True)
        self._recovery.start()

    def find(self, prompt: PromptMatch, above: int, limit: int) -> Reading[PendingSnapshot | None]:
        """The deepest stored snapshot of ``prompt`` with ``above`` < n <= ``limit``, on its way here."""
        self._refresh_soon()
        lengths = sorted(n for n in self.store.lengths() if above < n <= limit)
        # Named in ascending order, all prefixes cost one pass over the prompt.
        for prefix in reversed([prompt.prefix(n) for n in lengths]):
            pending = yield from self.store.open(prefix, prompt.tokens)
            if pending is not None:
                return pending
        return None

    def refuse(self, snapshot: Snapshot) -> None:
        """Lose a snapshot that came from here and is of no use to the model."""
        self.store.refuse(snapshot.prefix)

    def count_hit(self, snapshot: Snapshot) -> None:
        """Note that a snapshot from here was of use."""
        self.n_hits += 1
        self._behind.run_soon(partial(self.store.touch, snapshot.prefix))

    def select(self, matches: RecentMatches, start: int, policy: DiskPolicy | None = None) -> tuple[int, ...]:
        """The prefix lengths past ``start`` that belong on disk, of a prompt that was compared with `recent`."""
        policy = policy or self.policy
        if policy.kind == "off":
            return ()
        chosen = policy.select(matches, min_tokens=self.store.min_tokens, cold_max=self._cold_max, start=start)
        if policy.kind == "auto":
            log.info(
                "[disk-cache] auto scope: window=%d recent=%d safe=%d selected=%d",
                policy.window,
                min(policy.window, sum(recent.on_disk for recent in matches.recent)),
                chosen.safe,
                chosen.selected,
            )
        return chosen.positions

    def run_soon(self, function: Callable[[], None]) -> None:
        """Have ``function``, which may wait for the disk, called by the thread that writes."""
        self._behind.run_soon(function)

    def offer(self, snapshots: Iterable[Snapshot]) -> None:
        """Write ``snapshots`` behind, the last first, unless they are there."""
        for snapshot in snapshots:
            if self.store.wants(snapshot):
                self._behind.offer(snapshot)

    def give_up_oldest(self) -> bool:
        """Do not write what waits for that longest, so that its memory is free; False if nothing waits."""
        return self._behind.give_up_oldest()

    def flush(self, timeout: float) -> bool:
        """Wait until what was offered is written, ``timeout`` seconds at most; False if something is left."""
        return self._behind.flush(timeout)

    def view(self) -> DiskView:
        """What the tier holds and did."""
        self._refresh_soon()
        directory = self.store.directory
        return DiskView(
            self.policy.name,
            len(self.store.lengths()),
            directory.contents.n_bytes,
            directory.budget or -1,
            self.n_hits,
            self._behind.n_bytes,
            self.store.damaged,
            self._behind.n_waiting,
            self._behind.n_failed,
        )

    def close(self) -> bool:
        """Write what is waiting and close the store, within ``close_seconds``; False if something is not written."""
        n_failed = self._behind.n_failed
        deadline = time.monotonic() + self.close_seconds
        self._behind.run_soon(self._writer.save_recent)
        done = self._behind.close(self.close_seconds)
        if not done:
            log.warning("the prefix cache could not be written completely within %.0f s", self.close_seconds)
        self._recovery.join(max(deadline - time.monotonic(), 0.1))
        if done and not self._recovery.is_alive():
            self.store.close()  # which would wait for whoever still uses it
        return done and self._behind.n_failed == n_failed

    def _refresh_soon(self) -> None:
        now = time.monotonic()
        if now - self._refreshed >= REFRESH_SECONDS:
            self._refreshed = now
            self._behind.run_soon(self.store.directory.refresh)

    def _recover(self) -> None:
        try:
            self.store.directory.recover()
        except OSError as error:
            log.warning("the prefix cache on disk could not be looked through: %s", error)
