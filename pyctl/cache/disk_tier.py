"""The disk as the engine sees it: what it holds for a prompt, what belongs there, and the thread that writes."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from pyctl.cache.disk.chain import PendingSnapshot
from pyctl.cache.disk.file_format import PROMPTS, WORDS
from pyctl.cache.disk.labels import Labels
from pyctl.cache.disk.store import DiskStore
from pyctl.cache.persist import DiskPolicy
from pyctl.cache.recent import RecentFiles, RecentMatches, RecentPrompts
from pyctl.cache.snapshot import Prefix, PromptMatch, Segment, Snapshot

__all__ = ["DiskTier", "DiskView", "WriteBehind", "Writer"]

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0

"""After the disk refused, it is left alone so long."""


class Writer(Protocol):
    """Where snapshots go."""

    def write(self, snapshot: Snapshot) -> int:
        """Store ``snapshot``; the bytes written, 0 if it was there. Raises OSError when the disk refuses."""


class WriteBehind:
    """A queue of at most ``limit`` snapshots, newest last; a full one gives up its oldest.

    A disk that is full or read-only is a warning once a minute; the server goes on from RAM.
    """

    def __init__(self, writer: Writer, limit: int = 8) -> None:
        self._writer = writer
        self._limit = limit
        self._waiting: OrderedDict[Prefix, Snapshot] = OrderedDict()
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._closing = False
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
        """Wait until everything queued is written, ``timeout`` seconds at most; False if something is left."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._calls and not self._busy, timeout)

    def close(self, timeout: float) -> bool:
        """Flush, then stop the thread; what is left after ``timeout`` seconds is given up."""
        done = self.flush(timeout)
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._calls.clear()
            self._changed.notify_all()
        self._thread.join(timeout=1.0)
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting or self._calls)
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

    def _next_write(self) -> Callable[[], None]:
        # The newest first: it is what a restart would miss most.
        _, snapshot = self._waiting.popitem(last=True)
        return lambda: self._write(snapshot)

    def _write(self, snapshot: Snapshot) -> None:
        if time.monotonic() < self._resume_at:
            return
        try:
            self.n_bytes += self._writer.write(snapshot)
        except OSError as error:
            self.n_failed += 1
            self._resume_at = time.monotonic() + RETRY_SECONDS
            log.warning("the prefix cache cannot be written, serving goes on from RAM: %s", error)
        except Exception:
            self.n_failed += 1
            log.exception("a snapshot at %d could not be written", snapshot.n)


def copy_of(snapshot: Snapshot) -> Snapshot:
    """A copy with segments of its own that share the bytes, so that nobody can take them away."""
    parent: Segment | None = None
    for segment in reversed(snapshot.chain):
        parent = Segment(segment.start, segment.tokens, segment.rows, parent, segment.ends)
    assert parent is not None
    return Snapshot(snapshot.prefix, parent, snapshot.state, snapshot.exact)


FLUSH_SECONDS = 10.0

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


class DiskTier:
    """Reads from and writes behind to ``store``; ``policy`` is what a request gets that names none.

    ``text_of`` makes text of tokens for people. The engine's thread calls everything and owns `recent`; writing and
    recovery have threads of their own.
    """

    def __init__(
        self,
        store: DiskStore,
        policy: DiskPolicy,
        *,
        min_tokens: int,
        cold_max: int,
        text_of: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.store = store
        self.policy = policy
        self._min_tokens, self._cold_max = min_tokens, cold_max
        home = store.directory / store.fingerprint
        self._words = Labels(home / WORDS)
        self._text_of = text_of
        self.recent = RecentPrompts()
        self._recent_files = RecentFiles(home / PROMPTS)
        self.recent.load(self._recent_files.load())
        self._behind = WriteBehind(_Writer(self))
        self.n_hits = 0
        # Start-up never waits for a large directory; what is not adopted yet is a miss until it is.
        self._recovery = threading.Thread(target=self._recover, name="pyctl-disk-recovery", daemon=True)
        self._recovery.start()

    def find(self, prompt: PromptMatch, above: int, limit: int) -> PendingSnapshot | None:
        """The deepest stored snapshot of ``prompt`` with ``above`` < n <= ``limit``, on its way here."""
        lengths = sorted(n for n in self.store.lengths() if above < n <= limit)
        # Named in ascending order, all prefixes cost one pass over the prompt.
        for prefix in reversed([prompt.prefix(n) for n in lengths]):
            if self.store.contains(prefix):
                arrival = self.store.open(prefix, prompt.tokens)
                if arrival is not None:
                    return arrival
        return None

    def count_hit(self, snapshot: Snapshot) -> None:
        """Note that a snapshot from here was of use."""
        self.n_hits += 1
        self._behind.run_soon(partial(self.store.touch, snapshot.prefix))

    def select(self, matches: RecentMatches, start: int, policy: DiskPolicy | None = None) -> tuple[int, ...]:
        """The prefix lengths past ``start`` that belong on disk, of a prompt that was compared with `recent`."""
        policy = policy or self.policy
        if policy.kind == "off":
            return ()
        chosen = policy.select(matches, min_tokens=self._min_tokens, cold_max=self._cold_max, start=start)
        if policy.kind == "auto":
            log.info(
                "[disk-cache] auto scope: window=%d recent=%d safe=%d selected=%d",
                policy.window,
                min(policy.window, sum(recent.on_disk for recent in matches.recent)),
                chosen.safe,
                chosen.selected,
            )
        return chosen.positions

    def offer(self, snapshots: Iterable[Snapshot]) -> None:
        """Write ``snapshots`` behind, unless they are there."""
        for snapshot in snapshots:
            if snapshot.n >= self._min_tokens and not self.store.contains(snapshot.prefix):
                self._behind.offer(snapshot)

    def flush(self, timeout: float) -> bool:
        """Wait until what was offered is written, ``timeout`` seconds at most; False if something is left."""
        return self._behind.flush(timeout)

    def view(self) -> DiskView:
        """What the tier holds and did."""
        return DiskView(
            self.policy.name,
            len(self.store.lengths()),
            self.store.n_bytes,
            self.store.budget or -1,
            self.n_hits,
            self._behind.n_bytes,
            self.store.damaged,
            self._behind.n_waiting,
            self._behind.n_failed,
        )

    def close(self, timeout: float = FLUSH_SECONDS) -> None:
        """Write what is waiting, ``timeout`` seconds at most, and close the store."""
        if not self._behind.close(timeout):
            log.warning("the prefix cache could not be written completely within %.0f s", timeout)
        self.save_recent()
        self._recovery.join(timeout=1.0)
        self.store.close()

    def describe(self, snapshot: Snapshot) -> None:
        """Note how the prefix begins and ends, for `pyctl cache ls`."""
        if self._text_of is not None:
            parts = (self._text_of(tokens) for tokens in (snapshot.head(HEAD_TOKENS), snapshot.tail(TAIL_TOKENS)))
            self._words.add(snapshot.prefix.name, " … ".join(" ".join(part.split()) for part in parts))

    def save_recent(self) -> None:
        """Write the recent prompts, so that a restart compares with them; on the thread that writes."""
        try:
            self._recent_files.save(self.recent.newest_first())
        except OSError as error:
            log.warning("the list of recent prompts could not be written: %s", error)

    def _recover(self) -> None:
        try:
            self.store.recover()
            self._words.keep({entry.name for entry in self.store.entries()})
        except OSError as error:
            log.warning("the prefix cache on disk could not be looked through: %s", error)


class _Writer:
    """Writes a snapshot and, since a process may be killed, the prompts that led to it."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    def write(self, snapshot: Snapshot) -> int:
        n_bytes = self._tier.store.write(snapshot)
        if n_bytes:
            self._tier.describe(snapshot)
        self._tier.save_recent()
        return n_bytes
