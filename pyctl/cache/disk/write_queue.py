"""The queue of snapshots to write, and the thread that writes them."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from pyctl.cache.disk.readers import STALL_SECONDS
from pyctl.cache.ports import AGAIN_SECONDS, MOST_BEHIND_BYTES, HandOver, PieceOf, Reason, RowsOf, Written
from pyctl.cache.snapshot import NOTHING, Block, Prefix, Segment, Snapshot
from pyctl.errors import NotWrittenError, StateError
from pyctl.limit import limit

__all__ = ["WriteQueue", "copy_of"]

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""After the disk refused, it is left alone so long."""

ROOM_SECONDS = 0.1
"""How soon to look for room for what was put off; background requests do not wait for that."""

LAST_SECONDS = 1.0
"""How long before the end of closing no more segments are fetched from the device."""

MAX_WAITING = limit(8, "snapshots that wait to be written", "the oldest waits in RAM, if it is still there", "memory")

MAX_SPILLED = limit(256, "evicted snapshots that wait to be written", "the least worth are dropped", "memory")

MAX_CALLS = limit(4096, "queued disk operations, such as counting a hit", "the oldest are dropped", "memory")


@dataclass(eq=False)
class WriteJob:
    """A snapshot that waits, and the ``n_bytes`` of RAM that its waiting costs.

    ``worth`` is in seconds for EVICTED snapshots; for others, later ones are worth more. ``original`` is in the cache;
    all but LARGE jobs have a ``copy``. A job that is not ``is_ready`` waits for `WriteQueue.settle`.
    """

    prefix: Prefix
    original: weakref.ref[Snapshot]
    reason: Reason
    worth: float
    n_bytes: int = 0
    is_ready: bool = False
    copy: Snapshot | None = None

    @property
    def source(self) -> Snapshot | None:
        """What to write; None once the cache dropped a LARGE snapshot."""
        return self.copy or self.original()

    @property
    def density(self) -> float:
        """Worth per byte."""
        return self.worth / max(self.n_bytes, 1)


@dataclass(eq=False)
class _Piece:
    """A segment of which the writing thread needs the rows: the engine's thread sets ``rows`` or ``error``."""

    snapshot: Snapshot
    segment: Segment
    rows: Block | None = None
    error: Exception | None = None


class _Write(Protocol):
    """Writes a snapshot and returns the bytes written; NotWrittenError if it was dropped or has no room."""

    def __call__(self, snapshot: Snapshot, reason: Reason, rows_of: RowsOf | None) -> int: ...


class WriteQueue:
    """Jobs by prefix, and the thread that passes them to ``write``: by reason, then by worth.

    The jobs of each reason are limited (``limit``, MAX_SPILLED), those EVICTED also to ``most_bytes``; the job with the
    least worth per byte is dropped. One of another reason is put off (`again`) while the cache has its snapshot; a loss
    is a warning once a minute. The rows of a LARGE snapshot come from `write_piece` one segment at a time; the thread
    runs other jobs until they arrive. OSError (a full or read-only disk) is a warning once a minute; jobs stay queued
    for the next attempt, and the server goes on from RAM.
    """

    def __init__(self, write: _Write, limit: int = MAX_WAITING, most_bytes: int = MOST_BEHIND_BYTES) -> None:
        self._write_one = write
        self._limit = limit
        self._most_bytes = most_bytes
        self._jobs: dict[Prefix, WriteJob] = {}
        self._calls: deque[Callable[[], None]] = deque(maxlen=MAX_CALLS)
        self._order = itertools.count(1)
        self._changed = threading.Condition()
        self._n_busy = 0
        self._writing: list[tuple[Snapshot, Reason]] = []  # other jobs run while a large one waits for rows
        self._piece: _Piece | None = None
        self._put_off: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self._tell_at = 0.0  # when the next loss is logged
        self._moved = 0.0
        self._closing = False
        self._last_chance = False
        self._resume_at = 0.0
        self._failure = ""
        self.written = self.spilled = Written()
        self.n_failed = 0
        self.n_given_up = 0
        self._thread = threading.Thread(target=self._run, name="pyctl-disk", daemon=True)
        self._thread.start()

    def write(
        self,
        snapshot: Snapshot,
        reason: Reason = Reason.CHOSEN,
        *,
        worth: float = 0.0,
        n_bytes: int = 0,
        rows_of: RowsOf | None = None,
    ) -> None:
        """Queue ``snapshot``, unless all that waits for this reason is worth more and has no room for it.

        Its rows are held until they are written, also if the cache drops them, but those of a LARGE one: the cache may
        give it up. The bytes of what is EVICTED may be on their way until `settle`.
        """
        if reason != Reason.EVICTED:
            worth, n_bytes = next(self._order), 0
        job = WriteJob(snapshot.prefix, weakref.ref(snapshot), reason, worth, n_bytes, reason != Reason.EVICTED)
        with self._changed:
            self._put_off.discard(snapshot)
            if not self._may_join(job):
                return
        if reason != Reason.LARGE:
            job.copy = copy_of(snapshot, rows_of, lean=reason == Reason.EVICTED)
        with self._changed:
            if not self._closing:
                self._jobs[job.prefix] = job
                self._moved = time.monotonic() if reason == Reason.LARGE else self._moved
                self._changed.notify_all()

    def settle(self) -> None:
        """All bytes of what was evicted are there."""
        with self._changed:
            for job in self._jobs.values():
                job.is_ready = True
            self._changed.notify_all()

    @property
    def is_unsettled(self) -> bool:
        """Whether something waits for `settle`; for the thread that calls `write` and `settle`."""
        return any(job.reason == Reason.EVICTED and not job.is_ready for job in self._jobs.copy().values())

    def again(self) -> Snapshot | None:
        """What was put off and is to be queued again, now that there is room; for the thread that calls `write`."""
        with self._changed:
            reasons = [job.reason for job in self._jobs.values()]
            if self._closing or time.monotonic() < self._resume_at or not self._put_off:
                return None
            if max(map(reasons.count, (Reason.CHOSEN, Reason.LARGE))) >= self._limit:
                return None
            found = max(self._put_off, key=lambda each: each.used, default=None)
            if found is not None:
                self._put_off.discard(found)
            return found

    def is_put_off(self, snapshot: Snapshot) -> bool:
        """Whether there was no room for ``snapshot``, and it waits in RAM."""
        return snapshot in self._put_off

    def write_piece(self, piece_of: PieceOf) -> float | None:
        """Hand over the rows of a segment of a LARGE snapshot, from the thread that owns the device; after how many
        seconds to call again, None if nothing of these is left, nor put off."""
        with self._changed:
            piece = self._piece
            if piece is None or piece.rows is not None or piece.error is not None:
                soon = AGAIN_SECONDS if self._n_large else ROOM_SECONDS
                return (soon if self.is_moving else STALL_SECONDS) if self._has_more else None
        try:
            if not piece.snapshot.facts.for_disk or any(
                each.dropped and not each.file.is_there for each in piece.snapshot.chain
            ):
                raise NotWrittenError("others needed the cells of its rows, or it was dropped")
            if (rows := piece_of(piece.segment)) is None and not self.is_moving:
                raise NotWrittenError("RAM has no room for a part of it")
        except (NotWrittenError, StateError, MemoryError) as error:
            piece.error = error
        else:
            if rows is None:
                return AGAIN_SECONDS
            piece.rows = rows
        with self._changed:
            self._moved = time.monotonic()
            self._changed.notify_all()
        return AGAIN_SECONDS

    @property
    def is_moving(self) -> bool:
        """Whether a LARGE snapshot is being written, or some are put off, and the disk takes them."""
        return self._has_more and time.monotonic() - self._moved < STALL_SECONDS

    def give_up_least(self) -> bool:
        """Take the evicted job that is worth least, or else the oldest chosen one, out of the queue; False if there is
        none."""
        with self._changed:
            jobs = [job for job in self._jobs.values() if job.reason != Reason.LARGE]
            if jobs:
                self._give_up(min(jobs, key=lambda job: (-job.reason, job.density)))
            return bool(jobs)

    def drop(self, name: str) -> bool:
        """Write no snapshot of the prefix called ``name`` of those that wait; False if there is none in the queue.

        One that is being written is not published any more, unless it has been already.
        """
        with self._changed:
            found = [prefix for prefix in self._jobs if prefix.name == name]
            for prefix in found:
                del self._jobs[prefix]
            now = [snapshot for snapshot, _ in self._writing if snapshot.prefix.name == name]
            for snapshot in now:
                snapshot.facts = replace(snapshot.facts, for_disk=False)  # of a copy
            for put_off in [each for each in self._put_off if each.prefix.name == name]:
                self._put_off.discard(put_off)
            return bool(found or now)

    @property
    def n_waiting(self) -> int:
        """Snapshots in the queue, with a LARGE one that is being written, and those put off."""
        with self._changed:
            n_large = sum(reason == Reason.LARGE for _, reason in self._writing)
            return len(self._jobs) + n_large + len(self._put_off)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of those evicted."""
        return sum(job.n_bytes for job in self._jobs.copy().values())

    def run_soon(self, function: Callable[[], None]) -> None:
        """Have ``function``, which may wait for the disk, called by the thread that writes."""
        with self._changed:
            self._calls.append(function)
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until everything queued is written, ``timeout`` seconds at most; False if something is left.

        Jobs that wait after an error of the disk do not count, nor those that wait for `write_piece` or `again`.
        """
        with self._changed:
            self._changed.wait_for(lambda: not (self._calls or self._n_busy or self._may_write()), timeout)
            small = any(job.reason != Reason.LARGE for job in self._jobs.values())
            return not (small or self._calls or self._n_busy)

    def retry(self) -> None:
        """Do not wait any longer after the disk refused."""
        with self._changed:
            self._resume_at = 0.0
            self._changed.notify_all()

    def close(self, timeout: float, hand_over: HandOver | None = None) -> bool:
        """Flush, then stop the thread; False if something is left or it is still at work after ``timeout`` seconds.

        ``hand_over`` calls `again` and `write_piece`. Waiting jobs are tried once more, then dropped. A running write
        goes on; the end of the process leaves its temp file. Evicted snapshots are written as far as there is time.
        """
        deadline = time.monotonic() + timeout
        self._last_chance = True
        self.retry()
        done = self._write_rest(hand_over, deadline - LAST_SECONDS) if hand_over is not None else True
        self.flush(max(deadline - time.monotonic(), 0.0))
        with self._changed:
            self._closing = True
            done &= not self._calls and all(job.reason != Reason.CHOSEN for job in self._jobs.values())
            self._jobs.clear()
            self._calls.clear()
            self._changed.notify_all()
        self._thread.join(max(deadline - time.monotonic(), 0.1))
        return done and not self._thread.is_alive()

    def _write_rest(self, hand_over: HandOver, deadline: float) -> bool:
        """Write LARGE snapshots and those put off, until ``deadline`` (monotonic seconds); False if some are left."""
        while (left := deadline - time.monotonic()) > 0 and (seconds := hand_over()) is not None:
            with self._changed:
                self._changed.wait(min(seconds, left))
        with self._changed:
            left_over = [job for job in self._jobs.values() if job.reason == Reason.LARGE and job.source is not None]
            for job in left_over:
                self._give_up(job)
            if self._piece is not None:
                self._piece.error = NotWrittenError("there is no time")
            self._changed.notify_all()
            return not left_over and not self._has_more

    @property
    def _has_more(self) -> bool:
        """Whether `write_piece` and `again` have something left."""
        return self._n_large > 0 or len(self._put_off) > 0

    @property
    def _n_large(self) -> int:
        with self._changed:
            waiting = [job.prefix for job in self._jobs.values() if job.reason == Reason.LARGE and job.source is None]
            for prefix in waiting:  # dropped by the cache
                del self._jobs[prefix]
            large = [job for job in self._jobs.values() if job.reason == Reason.LARGE]
            return len(large) + sum(reason == Reason.LARGE for _, reason in self._writing)

    def _may_join(self, job: WriteJob) -> bool:
        """Whether ``job`` is new and has room; drops jobs of the same reason and less worth for it."""
        known = self._jobs.get(job.prefix)
        if self._closing or (known is not None and (known.reason < job.reason or known.reason == Reason.CHOSEN)):
            return False
        if known is not None and known.reason == job.reason == Reason.EVICTED:
            return False
        if job.reason == Reason.LARGE and any(
            reason == Reason.LARGE and snapshot.prefix == job.prefix for snapshot, reason in self._writing
        ):
            return False
        if known is not None:
            del self._jobs[job.prefix]
        if self._make_room(job):
            return True
        self._miss(job)
        return False

    def _make_room(self, job: WriteJob) -> bool:
        """Give up what is worth less than ``job``, if that makes room for it."""
        others = [other for other in self._jobs.values() if other.reason == job.reason]
        most = MAX_SPILLED if job.reason == Reason.EVICTED else self._limit
        room = self._most_bytes - sum(other.n_bytes for other in others) - job.n_bytes
        least: list[WriteJob] = []
        for other in sorted(others, key=lambda other: other.density):
            if room >= 0 and len(others) - len(least) < most:
                break
            if other.density >= job.density:
                return False
            least.append(other)
            room += other.n_bytes
        if room < 0:
            return False
        for other in least:
            self._give_up(other)
        return True

    def _give_up(self, job: WriteJob) -> None:
        del self._jobs[job.prefix]
        self._miss(job)

    def _miss(self, job: WriteJob) -> None:
        """Put off what has no room in the queue and is still in RAM; else count it as lost."""
        snapshot = job.original()
        if job.reason != Reason.EVICTED and snapshot is not None and not any(each.dropped for each in snapshot.chain):
            return self._put_off.add(snapshot)
        self.n_given_up += 1
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + RETRY_SECONDS
            log.warning("the disk is too slow for what leaves RAM: %d snapshots not written", self.n_given_up)

    def _run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run what waits, the thread's life long or ``until`` a large snapshot can go on."""
        while True:
            with self._changed:
                while not (self._closing or until() or self._calls or self._may_write()):
                    left = self._resume_at - time.monotonic()
                    self._changed.wait(max(left, 0.0) if left > 0 and self._next() is not None else None)
                if self._closing or until():
                    return
                step = self._calls.popleft() if self._calls else self._begin()
                self._n_busy += 1
            try:
                step()
            except Exception:
                log.exception("disk cache: a write job failed")
            finally:
                del step  # which may hold memory while this thread waits
                with self._changed:
                    self._n_busy -= 1
                    self._changed.notify_all()

    def _next(self) -> WriteJob | None:
        """The job to be written next: by reason, then by worth; no second LARGE one."""
        is_large = any(reason == Reason.LARGE for _, reason in self._writing)
        ready = [job for job in self._jobs.values() if job.is_ready and not (is_large and job.reason == Reason.LARGE)]
        return max(ready, key=lambda job: (-job.reason, job.worth), default=None)

    def _may_write(self) -> bool:
        return time.monotonic() >= self._resume_at and self._next() is not None

    def _begin(self) -> Callable[[], None]:
        job = self._next()
        assert job is not None
        del self._jobs[job.prefix]
        snapshot = job.source
        if snapshot is None:
            return lambda: None
        if job.reason == Reason.LARGE:
            snapshot = replace(snapshot)  # but not its bytes
        self._writing.append((snapshot, job.reason))
        return partial(self._write, job, snapshot)

    def _write(self, job: WriteJob, snapshot: Snapshot) -> None:
        is_large = job.reason == Reason.LARGE
        try:
            n_bytes = self._write_one(snapshot, job.reason, partial(self._fetch, snapshot) if is_large else None)
            self._failure, self._moved = "", time.monotonic()
            if n_bytes:
                self.written = self.written.plus(n_bytes)
                self.spilled = self.spilled.plus(n_bytes) if job.reason == Reason.EVICTED else self.spilled
        except OSError as error:
            self._refused(error)
            with self._changed:
                if is_large:
                    self.n_given_up += 1
                elif snapshot.facts.for_disk and not self._last_chance and job.prefix not in self._jobs:
                    if self._make_room(job):
                        self._jobs[job.prefix] = job
                    else:
                        self._miss(job)
        except Exception as error:
            if is_large and isinstance(error, (NotWrittenError, StateError, MemoryError)):
                log.warning("prefix of %d tokens not written: %s", snapshot.n, error)
            elif not isinstance(error, NotWrittenError):
                self.n_failed += 1
                log.exception("cannot write the snapshot at %d tokens", snapshot.n)
            self.n_given_up += is_large
        finally:
            with self._changed:
                self._writing.pop()

    def _fetch(self, snapshot: Snapshot, segment: Segment) -> Block:
        """The rows of ``segment``, from `write_piece`; other jobs are run meanwhile."""
        piece = _Piece(snapshot, segment)
        with self._changed:
            self._piece = piece
            self._n_busy -= 1
            self._moved = time.monotonic()
            self._changed.notify_all()
        try:
            self._run(lambda: piece.error is not None or piece.rows is not None)
        finally:
            with self._changed:
                self._piece = None
                self._n_busy += 1
        if piece.rows is None:
            raise piece.error or NotWrittenError("there is no time")
        return piece.rows

    def _refused(self, error: OSError) -> None:
        """The disk takes nothing: leave it alone for a while."""
        self.n_failed += 1
        reason = error.strerror or str(error)
        if reason != self._failure:  # one warning, not one for each snapshot
            log.warning("cannot write the disk cache, serving from RAM: %s", reason)
        self._failure = reason
        with self._changed:
            if not self._last_chance:
                self._resume_at = time.monotonic() + RETRY_SECONDS


def copy_of(snapshot: Snapshot, rows_of: RowsOf | None = None, *, lean: bool = False) -> Snapshot:
    """A copy with segments of its own that share the bytes, so that no eviction takes them away.

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
