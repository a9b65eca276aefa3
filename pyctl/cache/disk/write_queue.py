"""The queue of snapshots to write, and the thread that writes them."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from pyctl.cache.disk.readers import STALL_SECONDS
from pyctl.cache.ports import AGAIN_SECONDS, MAX_UNWRITTEN_BYTES, HandOver, RowsOf, Writing, Written
from pyctl.cache.snapshot import NOTHING, Segment, Snapshot
from pyctl.errors import NotWrittenError, StateError
from pyctl.limit import limit

__all__ = ["WriteQueue", "copy_of"]

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""After the disk refused, it is left alone so long."""

LAST_SECONDS = 1.0
"""How long before the end of closing no more segments are written, for the one that is."""

MAX_SPILLED = limit(
    256, "evicted snapshots that wait to be written", "the least worth are dropped", "memory"
)

MAX_CALLS = limit(
    4096, "queued disk operations, such as counting a hit", "the oldest are dropped", "memory"
)


@dataclass(eq=False)
class WriteJob:
    """Writes ``snapshot``, which has its own segments, one of them in each turn.

    Rows that only the device has come from the ``original`` in the cache when they are ``wanted``.
    Once that is evicted, the job has all rows: ``n_bytes`` of RAM, which may be on their way until
    it ``is_ready``. ``worth`` is in seconds; of what a policy chose, later ones are worth more.
    What the disk ``refused`` before its rows were here waits for the end. An ``error`` ends it.
    """

    snapshot: Snapshot
    original: weakref.ref[Snapshot]
    is_chosen: bool
    worth: float
    n_bytes: int = 0
    is_ready: bool = True
    refused: bool = False
    writing: Writing | None = None
    wanted: Segment | None = None
    error: Exception | None = None

    @property
    def depends(self) -> bool:
        """Whether it needs rows that only the device has, or had."""
        return any(segment.held is not None for segment in self.snapshot.chain)

    @property
    def asks(self) -> bool:
        """Whether it waits for the rows of the ``wanted`` segment."""
        return self.error is None and self.wanted is not None and self.wanted.only_held_bytes > 0

    @property
    def rank(self) -> tuple[bool, bool, bool, float]:
        """The larger, the earlier is its turn, and the later it is given up: ended, selected, in
        RAM, of more worth, per byte unless it was selected.
        """
        value = self.worth if self.is_chosen else self.worth / max(self.n_bytes, 1)
        return self.error is not None, self.is_chosen, self.n_bytes > 0, value

    def take_rows(self, original: Snapshot, rows_of: RowsOf) -> None:
        """Have all rows that are still to be written, before the cache drops them. StateError or
        MemoryError.
        """
        first = self.wanted.start if self.wanted is not None else 0
        pairs = [
            pair
            for pair in zip(self.snapshot.chain, original.chain, strict=True)
            if pair[0].start >= first
        ]
        for copy, _ in pairs:
            if copy.file.is_there and self.wanted is None:
                copy.drop()
        lacking = [(copy, segment) for copy, segment in pairs if copy.only_held_bytes]
        for (copy, _), rows in zip(
            lacking, rows_of([segment for _, segment in lacking]), strict=True
        ):
            copy.rows = rows
            copy.held = None

    def withdraw(self) -> None:
        """Have the cache not offer the snapshot again before it is used."""
        if (original := self.original()) is not None:
            original.facts = replace(original.facts, for_disk=False)


class WriteQueue:
    """Jobs, and the thread that runs them with ``write``: chosen ones first, then by worth, a
    segment in each turn.

    ``write`` gets a snapshot, and whether it was evicted without having been chosen.

    A job whose snapshot is in the cache costs nothing. It requests rows that only the device has by
    ``on_wait``, and others have their turns until `serve` brings them. Evicted snapshots that no
    policy chose are limited to MAX_SPILLED and ``max_bytes``: the ones worth least per byte are
    lost, with a warning once a minute. OSError (a full or read-only disk) is a warning once a
    minute; jobs stay queued for the next attempt, and the server goes on from RAM.
    """

    def __init__(
        self, write: Callable[[Snapshot, bool], Writing], max_bytes: int = MAX_UNWRITTEN_BYTES
    ) -> None:
        self.on_wait: HandOver = lambda: None
        self._write_one = write
        self._max_bytes = max_bytes
        self._jobs: dict[WriteJob, None] = {}
        self._calls: deque[Callable[[], object]] = deque(maxlen=MAX_CALLS)
        self._order = itertools.count(1)
        self._changed = threading.Condition()
        self._current: object = None  # the job or call at work
        self._tell_at = 0.0  # when the next loss is logged
        self._moved = 0.0
        self._closing = False
        self._last_chance = False
        self._resume_at = 0.0
        self._failure = ""
        self.written = self.spilled = Written()
        self.n_failed = 0
        self.n_dropped = 0
        self._thread = threading.Thread(target=self._run, name="pyctl-disk", daemon=True)
        self._thread.start()

    def write(self, snapshot: Snapshot) -> None:
        """Queue a ``snapshot`` of the cache. Its rows in RAM are there; they are held until they
        are written.
        """
        job = WriteJob(copy_of(snapshot), weakref.ref(snapshot), True, next(self._order))
        with self._changed:
            if (known := self._find(snapshot)) is not None:
                known.is_chosen = True
            elif not self._closing:
                self._jobs[job] = None
                self._moved = time.monotonic()
                self._changed.notify_all()

    def evict(
        self, snapshot: Snapshot, rows_of: RowsOf, worth: float, n_bytes: int, *, spills: bool
    ) -> None:
        """Have all rows of ``snapshot``, which the cache evicts, if it waits; else queue it if it
        ``spills`` and all that waits so is not above ``worth``, the seconds that it saves.
        """
        with self._changed:
            job = self._find(snapshot)
            if job is None and spills and not self._closing:
                job = WriteJob(
                    copy_of(snapshot), weakref.ref(snapshot), False, worth, is_ready=False
                )
                self._jobs[job] = None
            if job is None or job.n_bytes:
                return
            job.n_bytes = n_bytes
            job.is_ready = job.is_ready and not job.depends
            self._make_room()
            if job not in self._jobs or job.original() is not snapshot:
                return
        try:
            job.take_rows(snapshot, rows_of)
        except (StateError, MemoryError) as error:
            with self._changed:
                self._drop(job, str(error))

    @property
    def waits(self) -> bool:
        """Whether a job waits for `serve`."""
        with self._changed:
            return any(job.asks or not job.is_ready for job in self._jobs)

    def serve(self, rows_of: RowsOf) -> None:
        """All bytes of evicted snapshots are there; have the rows that a job needs, if RAM has room
        for them, also there. For the thread that owns the device.
        """
        with self._changed:
            for each in self._jobs:
                each.is_ready = True
            job = max(
                (each for each in self._jobs if each.asks), key=lambda each: each.rank, default=None
            )
            self._changed.notify_all()
        if job is None or (wanted := job.wanted) is None:
            return
        try:
            if (
                (original := job.original()) is None
                or original.segment.dropped
                or not original.facts.for_disk
            ):
                raise NotWrittenError("others needed the cells of its rows, or it was dropped")
            (wanted.rows,) = rows_of([original.segment_at(min(wanted.end, original.n))])
        except MemoryError:
            return
        except (NotWrittenError, StateError) as error:
            job.error = error.with_traceback(None)  # which would hold the snapshot
        with self._changed:
            self._changed.notify_all()

    @property
    def is_moving(self) -> bool:
        """Whether snapshots are written whose rows only the device has, and the disk takes them."""
        with self._changed:
            depends = any(job.depends and not job.refused for job in self._jobs)
            return depends and time.monotonic() - self._moved < STALL_SECONDS

    def drop_least_worth(self) -> bool:
        """Lose the snapshot of least rank of those that were evicted or have rows in RAM; False if
        there is none.
        """
        with self._changed:
            jobs = [job for job in self._jobs if job.error is None]
            jobs = [
                job
                for job in jobs
                if job.n_bytes or any(each.rows.size for each in job.snapshot.chain)
            ]
            if jobs:
                self._drop(min(jobs, key=lambda job: job.rank), "the disk is too slow")
            return bool(jobs)

    def drop(self, name: str) -> bool:
        """Write no snapshot of the prefix called ``name`` of those that wait; False if there is
        none in the queue.

        One that is being written is no longer published, unless it has been already. The cache
        offers it again once it was used.
        """
        with self._changed:
            found = [
                job for job in self._jobs if job.snapshot.prefix.name == name and job.error is None
            ]
            for job in found:
                job.withdraw()
                self._cancel(job, "it was dropped")
            return bool(found)

    @property
    def n_waiting(self) -> int:
        """Snapshots in the queue, with those that are being written."""
        with self._changed:
            return sum(job.error is None for job in self._jobs)

    def run_soon(self, function: Callable[[], object]) -> None:
        """Have ``function``, which may wait for the disk, called by the thread that writes."""
        with self._changed:
            self._calls.append(function)
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until nothing more can be written now, ``timeout`` seconds at most; False if
        something is left.

        What waits for rows of the device, or was refused without them, does not count.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not (self._calls or self._current or self._next()), timeout
            )
            left = any(not (job.asks or job.refused) for job in self._jobs)
            return not (left or self._calls or self._current)

    def retry(self) -> None:
        """Do not wait any longer after the disk refused."""
        with self._changed:
            self._resume_at = 0.0
            self._changed.notify_all()

    def close(self, timeout: float, hand_over: HandOver = lambda: None) -> bool:
        """Write all, then stop the thread; False if a chosen snapshot is left, or the thread is
        still at work after ``timeout`` seconds.

        ``hand_over`` calls `serve`. Refused snapshots are tried once more. A running write ends
        with its segment, or the process leaves its temp file.
        """
        deadline = time.monotonic() + timeout
        self._last_chance = True
        self.retry()
        while (
            self._jobs or self._calls or self._current
        ) and time.monotonic() < deadline - LAST_SECONDS:
            hand_over()
            with self._changed:
                self._changed.wait(AGAIN_SECONDS)
        with self._changed:
            self._closing = True
            n_left = sum(job.is_chosen for job in self._jobs)
            n_calls = len(self._calls)
            self.n_dropped += n_left
            for job in self._jobs.copy():
                self._cancel(job, "there is no time")
            self._calls.clear()
            self._changed.notify_all()
        self._thread.join(max(deadline - time.monotonic(), 0.1))
        return not (n_left or n_calls or self._thread.is_alive())

    def _find(self, snapshot: Snapshot) -> WriteJob | None:
        """The job that writes ``snapshot``, or as good a one."""
        known = [
            job
            for job in self._jobs
            if job.snapshot.prefix == snapshot.prefix and job.error is None
        ]
        known = [job for job in known if job.original() is snapshot or not job.depends]
        return next((job for job in known if job.snapshot.exact >= snapshot.exact), None)

    def _make_room(self) -> None:
        """Lose evicted snapshots that no policy chose, the least worth first, until the others
        fit.
        """
        n_left = MAX_SPILLED
        room = self._max_bytes
        spilled = [job for job in self._jobs if not job.is_chosen and job.error is None]
        for job in sorted(spilled, key=lambda job: job.rank, reverse=True):
            if n_left and job.n_bytes <= room:
                n_left = n_left - 1
                room = room - job.n_bytes
            else:
                self._drop(job, "the disk is too slow")

    def _drop(self, job: WriteJob, reason: str) -> None:
        self._cancel(job, reason)
        self.n_dropped += 1
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + RETRY_SECONDS
            log.warning("%d snapshots are not written: %s", self.n_dropped, reason)

    def _cancel(self, job: WriteJob, reason: str) -> None:
        """End ``job``: now, or in its next turn if it has started."""
        job.snapshot.facts = replace(job.snapshot.facts, for_disk=False)  # of a copy
        job.error = NotWrittenError(reason)
        if job.writing is None and job is not self._current:
            self._jobs.pop(job, None)
        self._changed.notify_all()

    # -- the thread
    # ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while (step := self._wait()) is not None:
            try:
                step()
            except Exception:
                log.exception("disk cache: a write job failed")
            finally:
                del step  # which may hold memory while this thread waits
                with self._changed:
                    self._current = None
                    self._changed.notify_all()

    def _wait(self) -> Callable[[], object] | None:
        """What is to be done next; None for the end."""
        with self._changed:
            while True:
                if self._calls:
                    self._current = call = self._calls.popleft()
                    return call
                if (job := self._next()) is not None:
                    self._current = job
                    return partial(self._turn, job)
                if self._closing:
                    return None
                left = self._resume_at - time.monotonic()
                self._changed.wait(max(left, 0.0) if left > 0 and self._jobs else None)

    def _next(self) -> WriteJob | None:
        """The job whose turn it is."""
        may_begin = time.monotonic() >= self._resume_at
        ready = [
            job
            for job in self._jobs
            if job.error is not None
            or (
                may_begin
                and job.is_ready
                and not job.asks
                and (self._last_chance or not job.refused)
            )
        ]
        return max(ready, key=lambda job: job.rank, default=None)

    def _turn(self, job: WriteJob) -> None:
        """Write the segment whose rows are here, then wait for the next one."""
        if job.error is not None:
            return self._end(job, job.error)
        try:
            if job.writing is None:
                job.writing = self._write_one(job.snapshot, not job.is_chosen)
            written = job.wanted
            wanted = next(job.writing)
        except StopIteration as end:
            self._done(job, end.value)
        except Exception as error:
            self._end(job, error)
        else:
            with self._changed:
                if written is not None and written.held is not None:
                    written.rows = NOTHING
                job.wanted = wanted
                self._moved = time.monotonic()
        with self._changed:
            asks = any(each.asks for each in self._jobs)
        if asks:
            self.on_wait()

    def _done(self, job: WriteJob, n_bytes: int) -> None:
        with self._changed:
            self._jobs.pop(job, None)
            self._failure = ""
            self._moved = time.monotonic()
            if n_bytes:
                self.written = self.written.plus(n_bytes)
                self.spilled = self.spilled if job.is_chosen else self.spilled.plus(n_bytes)

    def _end(self, job: WriteJob, error: Exception) -> None:
        """Leave what the disk may take later in the queue; give up the rest."""
        if job.writing is not None:
            with suppress(OSError):
                job.writing.close()
        is_wanted = job.snapshot.facts.for_disk
        is_refused = isinstance(error, OSError)
        if isinstance(error, OSError):
            self._leave_alone(error)
        elif not isinstance(error, (NotWrittenError, StateError)):
            self.n_failed += 1
            log.error("cannot write the snapshot at %d tokens", job.snapshot.n, exc_info=error)
        elif is_wanted and job.depends:
            log.warning("prefix of %d tokens not written: %s", job.snapshot.n, error)
            job.withdraw()
        with self._changed:
            for segment in job.snapshot.chain:
                segment.rows = segment.rows if segment.held is None else NOTHING
            job.writing = job.wanted = None
            if is_wanted and is_refused and not self._last_chance:
                job.refused = job.depends
            else:
                self._jobs.pop(job, None)
                self.n_dropped += is_wanted and job.depends

    def _leave_alone(self, error: OSError) -> None:
        """The disk takes nothing for a while."""
        self.n_failed += 1
        reason = error.strerror or str(error)
        if reason != self._failure:  # one warning, not one for each snapshot
            log.warning("cannot write the disk cache, serving from RAM: %s", reason)
        self._failure = reason
        if not self._last_chance:
            self._resume_at = time.monotonic() + RETRY_SECONDS


def copy_of(snapshot: Snapshot) -> Snapshot:
    """A copy with its own segments that share the bytes, so that no eviction takes them away."""
    parent: Segment | None = None
    for segment in reversed(snapshot.chain):
        held = segment.held if segment.only_held_bytes else None
        parent = replace(segment, parent=parent, references=0, held=held)
    assert parent is not None
    return Snapshot(
        snapshot.prefix, parent, snapshot.state, snapshot.exact, snapshot.hits, used=snapshot.used
    )
