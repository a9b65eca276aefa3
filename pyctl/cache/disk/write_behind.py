"""The thread that writes snapshots, and what waits for it: bounded by number and by bytes, the least worth given up."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from pyctl.cache.snapshot import NOTHING, Block, Prefix, Segment, Snapshot
from pyctl.limit import limit

__all__ = ["MOST_BEHIND_BYTES", "RowsOf", "WriteBehind", "copy_of"]

log = logging.getLogger(__name__)

R = TypeVar("R")

RowsOf = Callable[[Segment], Block]
"""Copies to RAM the rows of a segment that only the device has."""

RETRY_SECONDS = 60.0
"""After the disk refused, it is left alone so long."""

MAX_WAITING = limit(8, "snapshots that wait to be written", "the oldest is not written", "memory")

MAX_SPILLED = limit(256, "snapshots that have left RAM and wait to be written", "the least worth are not", "memory")

MOST_BEHIND_BYTES = limit(
    2**29, "snapshots that have left RAM and wait to be written", "the least worth are not", "memory", "bytes"
)

MAX_CALLS = limit(4096, "errands of a disk that hangs, such as noting a hit", "the oldest are not done", "memory")


@dataclass(eq=False)
class Spilled:
    """A snapshot that has left RAM, and the ``n_bytes`` that waiting for the disk costs.

    ``worth`` is in seconds. Before it ``is_settled``, its bytes may still be on their way.
    """

    snapshot: Snapshot
    worth: float
    n_bytes: int
    is_settled: bool = False

    @property
    def density(self) -> float:
        """Worth per byte."""
        return self.worth / max(self.n_bytes, 1)


class WriteBehind:
    """A queue of snapshots, and the thread that hands them to ``write``: first those offered, the newest first, then
    those spilled, the most worth first.

    Of those offered there are at most ``limit``, and a full queue gives up its oldest; those spilled have at most
    ``most_bytes``, and those of the least worth for their bytes are given up. ``write`` is told whether it was spilled
    and returns the bytes written; OSError, of a disk that is full or read-only, is a warning once a minute, what waits
    is kept for the next attempt, and the server goes on from RAM. Nothing here is held by the thread while it writes.
    """

    def __init__(
        self, write: Callable[[Snapshot, bool], int], limit: int = MAX_WAITING, most_bytes: int = MOST_BEHIND_BYTES
    ) -> None:
        self._write_one = write
        self._limit, self._most_bytes = limit, most_bytes
        self._waiting: OrderedDict[Prefix, Snapshot] = OrderedDict()
        self._spilled: dict[Prefix, Spilled] = {}
        self._calls: deque[Callable[[], None]] = deque(maxlen=MAX_CALLS)
        self._steps: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._writing: Snapshot | None = None
        self._closing = self._last_chance = False
        self._resume_at = 0.0
        self.n_bytes = 0
        self.n_spilled = 0
        self.spilled_bytes = 0
        self.n_failed = 0
        self._failure = ""
        self.n_given_up = 0
        self._thread = threading.Thread(target=self._run, name="pyctl-disk", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot, rows_of: RowsOf | None = None) -> None:
        """Queue ``snapshot``. Its rows are held until they are written, also if the cache in RAM drops them."""
        copy = copy_of(snapshot, rows_of)
        with self._changed:
            if self._closing or snapshot.prefix in self._waiting:
                return
            self._spilled.pop(snapshot.prefix, None)
            self._waiting[snapshot.prefix] = copy
            while len(self._waiting) > self._limit:
                self._waiting.popitem(last=False)
                self.n_given_up += 1
            self._changed.notify_all()

    def spill(self, snapshot: Snapshot, worth: float, n_bytes: int, rows_of: RowsOf | None = None) -> None:
        """Queue ``snapshot``, whose ``n_bytes`` leave RAM, for when `settle` is called, unless all that waits is worth
        more and has no room for it."""
        entry = Spilled(snapshot, worth, n_bytes)
        with self._changed:
            if self._closing or snapshot.prefix in self._waiting or snapshot.prefix in self._spilled:
                return
            if not self._make_room(entry):
                self.n_given_up += 1
                return
        entry.snapshot = copy_of(snapshot, rows_of, lean=True)
        with self._changed:
            self._spilled[snapshot.prefix] = entry

    def step(self, write: Callable[[], R]) -> Future[R]:
        """Call ``write`` behind what was offered, where OSError is what it is for any write; cancelled by `close`.

        For who waits for each such step before the next.
        """
        future: Future[R] = Future()
        with self._changed:
            if self._closing:
                future.cancel()
            else:
                self._steps.append((write, future))
                self._changed.notify_all()
        return future

    def settle(self) -> None:
        """All bytes of what was spilled are there."""
        with self._changed:
            for entry in self._spilled.values():
                entry.is_settled = True
            self._changed.notify_all()

    @property
    def is_unsettled(self) -> bool:
        """Whether something waits for `settle`; for the thread that calls `spill` and `settle`."""
        return any(not entry.is_settled for entry in self._spilled.copy().values())

    def give_up_least(self) -> bool:
        """Take what is worth least out of the queue, or else what waits for longest; False if nothing waits."""
        with self._changed:
            if self._spilled:
                self._drop(min(self._spilled.values(), key=lambda entry: entry.density))
            elif self._waiting:
                self._waiting.popitem(last=False)
            else:
                return False
            self.n_given_up += 1
            return True

    def drop(self, name: str) -> bool:
        """Write no snapshot of the prefix called ``name`` of those that wait; False if there is none.

        One that is being written is not published any more, unless it has been already.
        """
        with self._changed:
            found = [prefix for prefix in (*self._waiting, *self._spilled) if prefix.name == name]
            for prefix in found:
                self._waiting.pop(prefix, None)
                self._spilled.pop(prefix, None)
            now = self._writing if self._writing is not None and self._writing.prefix.name == name else None
            if now is not None:
                now.for_disk = False  # a copy of its own
            return bool(found) or now is not None

    @property
    def n_waiting(self) -> int:
        """Snapshots in the queue."""
        return len(self._waiting) + len(self._spilled)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of those spilled."""
        return sum(entry.n_bytes for entry in self._spilled.copy().values())

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
            return not (self._waiting or self._steps or self._spilled or self._calls or self._busy)

    def retry(self) -> None:
        """Do not wait any longer after the disk refused."""
        with self._changed:
            self._resume_at = 0.0
            self._changed.notify_all()

    def hurry(self) -> None:
        """Try what waits now, and each write only once: the end is near."""
        self._last_chance = True
        self.retry()

    def close(self, timeout: float) -> bool:
        """Flush, then stop the thread; False if it is still at work after ``timeout`` seconds.

        What waits is tried once more, and given up then. What is being written goes on, and is cut off when the process
        ends: a temp file. What was spilled is written as far as there is time: it was promised to nobody.
        """
        deadline = time.monotonic() + timeout
        self.hurry()
        self.flush(timeout)
        with self._changed:
            self._closing = True
            done = not (self._waiting or self._calls or self._steps)
            self._waiting.clear()
            self._spilled.clear()
            self._calls.clear()
            for _, future in self._steps:
                future.cancel()
            self._steps.clear()
            self._changed.notify_all()
        self._thread.join(max(deadline - time.monotonic(), 0.1))
        return done and not self._thread.is_alive()

    def _make_room(self, entry: Spilled) -> bool:
        """Give up what is worth less than ``entry``, if that makes room for it."""
        room = self._most_bytes - self.waiting_bytes - entry.n_bytes
        least: list[Spilled] = []
        for other in sorted(self._spilled.values(), key=lambda other: other.density):
            if room >= 0 and len(self._spilled) - len(least) < MAX_SPILLED:
                break
            if other.density >= entry.density:
                return False
            least.append(other)
            room += other.n_bytes
        if room < 0:
            return False
        for other in least:
            self._drop(other)
            self.n_given_up += 1
        return True

    def _drop(self, entry: Spilled) -> None:
        del self._spilled[entry.snapshot.prefix]

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closing or self._calls or self._may_write()):
                    self._changed.wait(max(self._resume_at - time.monotonic(), 0.0) if self._waits() else None)
                if self._closing:
                    return
                job = self._calls.popleft() if self._calls else self._next_write()
                self._busy = True
            try:
                job()
            except Exception:
                log.exception("the prefix cache on disk")
            finally:
                del job  # which may hold memory while this thread waits
                with self._changed:
                    self._busy, self._writing = False, None
                    self._changed.notify_all()

    def _waits(self) -> bool:
        return bool(self._waiting or self._steps) or any(entry.is_settled for entry in self._spilled.values())

    def _may_write(self) -> bool:
        return self._waits() and time.monotonic() >= self._resume_at

    def _next_write(self) -> Callable[[], None]:
        # The newest first: it is what a restart would miss most.
        if self._waiting:
            _, snapshot = self._waiting.popitem(last=True)
            self._writing = snapshot
            return lambda: self._write(snapshot, None)
        if self._steps:
            return partial(self._take_step, *self._steps.popleft())
        settled = [entry for entry in self._spilled.values() if entry.is_settled]
        best = max(settled, key=lambda entry: entry.worth)
        self._drop(best)
        self._writing = best.snapshot
        return lambda: self._write(best.snapshot, best)

    def _write(self, snapshot: Snapshot, spilled: Spilled | None) -> None:
        try:
            n_bytes = self._write_one(snapshot, spilled is not None)
            self.n_bytes += n_bytes
            self._failure = ""
            if spilled is not None and n_bytes:
                self.n_spilled += 1
                self.spilled_bytes += n_bytes
        except OSError as error:
            self._refused(error)
            with self._changed:
                if not self._last_chance:
                    self._put_back(snapshot, spilled)
        except Exception:
            self.n_failed += 1
            log.exception("a snapshot at %d could not be written", snapshot.n)

    def _take_step(self, write: Callable[[], R], future: Future[R]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(write())
        except BaseException as error:
            if isinstance(error, OSError):
                self._refused(error)
            future.set_exception(error)
        finally:
            del write, future  # the error knows this frame: what is written would stay until the collector comes

    def _refused(self, error: OSError) -> None:
        """The disk takes nothing: leave it alone for a while."""
        self.n_failed += 1
        reason = error.strerror or str(error)
        if reason != self._failure:  # else each snapshot would say so
            log.warning("the prefix cache cannot be written, serving goes on from RAM: %s", reason)
        self._failure = reason
        with self._changed:
            if not self._last_chance:
                self._resume_at = time.monotonic() + RETRY_SECONDS

    def _put_back(self, snapshot: Snapshot, spilled: Spilled | None) -> None:
        if snapshot.prefix in self._waiting or not snapshot.for_disk:
            return
        if spilled is None and len(self._waiting) < self._limit:
            self._waiting[snapshot.prefix] = snapshot
            self._waiting.move_to_end(snapshot.prefix, last=False)
        elif spilled is not None and snapshot.prefix not in self._spilled and self._make_room(spilled):
            self._spilled[snapshot.prefix] = spilled


def copy_of(snapshot: Snapshot, rows_of: RowsOf | None = None, *, lean: bool = False) -> Snapshot:
    """A copy with segments of its own that share the bytes, so that nobody can take them away.

    ``rows_of`` gives rows that only the device has, if the disk has none. A ``lean`` copy has no rows that are there.
    """
    parent: Segment | None = None
    for segment in reversed(snapshot.chain):
        copy = replace(segment, parent=parent, references=0, held=None)
        is_held = segment.only_held_bytes > 0
        if segment.file.is_there and (lean or is_held):
            copy.drop()
        elif is_held:
            copy.rows = rows_of(segment) if rows_of is not None else NOTHING
            copy.dropped = rows_of is None
        parent = copy
    assert parent is not None
    return Snapshot(snapshot.prefix, parent, snapshot.state, snapshot.exact, snapshot.hits, used=snapshot.used)
