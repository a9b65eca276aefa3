"""The queue of snapshots to write, and the thread that writes them.

Threads and the data that each owns:

  engine      offers snapshots (`write`, `evict`), supplies rows of the device (`supply_rows`) and
              drops jobs that take too much RAM. It alone calls the device and changes the cache,
              and never waits for the disk: under the lock it only keeps books.
  pyctl-disk  runs one turn of one job at a time, and calls (`run_soon`). It alone runs the
              generators of `StoreWriter.write`, so all temp files of writes are its own. It never
              calls the device: a turn ends where rows are missing, and others have theirs
              meanwhile.
  any thread  `remove`, `run_soon`, `flush`, and the counters.

One lock, `_changed`, guards the jobs, their states and the counters. No thread holds it during a
turn, a call or a copy from the device. A job has copies of the cache's segments that share their
bytes: an eviction drops the cache's references, and the bytes live until they are written.

Order of one snapshot, from the shallowest segment on:

  1. rows -> RAM       `supply_rows` follows `synchronize`: no turn reads bytes that a copy from the
                       device still writes. COPYING and NEEDS_ROWS wait for this.
  2. RAM -> temp file  a locked temp file for each missing segment and then for the state, each with
                       fsync: all bytes are durable before any of them has a name.
  3. names and index   one transaction, exclusive among processes: rename the temp files, the state
                       last, insert their rows, and remove the evicted files with theirs.
  4. fsync of the folder, so that the names are durable.

Files after a kill -9:

  in 1 or 2         temp files without a lock, which the next recovery removes.
  in 3, uncommitted SQLite rolls back. Renamed files have no row: recovery adopts those that make a
                    whole snapshot and removes the rest. Evicted files have a row again and only a
                    temp name: recovery removes both, and a restore that comes earlier is a miss.
  after 3           everything is there; a power loss before 4 may take names back, which leaves
                    rows without files, as above.

So no state exists in which a lookup finds a snapshot with missing or wrong bytes: readers verify
every byte, and a missing file is a miss.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from pyctl.cache.device_limits import MAX_UNWRITTEN_BYTES
from pyctl.cache.ports import AGAIN_SECONDS, FlushCopies, RowsOf, Written
from pyctl.cache.snapshot import NOTHING, Prefix, Segment, Snapshot
from pyctl.disk.readers import STALL_SECONDS
from pyctl.disk.write_job import JobState, WriteJob, Writing, detached_copy
from pyctl.errors import NotWrittenError, StateError
from pyctl.settings.limit import limit

__all__ = ["WriteQueue"]

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""Pause after the disk refused a write, and between two warnings of lost snapshots."""

GIVEN_UP = (NotWrittenError, StateError)
"""Errors of jobs that can no longer be written; the disk works."""

LAST_SECONDS = 1.0
"""Time at the end of closing in which no further segment is written, for the one that runs."""

MAX_SPILLED = limit(
    256, "evicted snapshots that wait to be written", "the least valuable are dropped", "memory"
)

MAX_CALLS = limit(
    4096, "queued disk operations, such as counting a hit", "the oldest are dropped", "memory"
)


class WriteQueue:
    """The queue of jobs, and the thread that runs them: chosen jobs first, then by worth, a segment
    in a turn.

    ``write`` gets a snapshot, and whether it was evicted without having been chosen. `start` starts
    the thread. ``clock`` gives monotonic seconds. A queue without a thread overrides `start`,
    `wait_for_change` and `join`, and calls `run_next` there.

    A job whose snapshot is in the cache costs no RAM. When it needs rows that only the device has,
    ``on_rows_needed`` is called on the writing thread, and other jobs have their turns until
    `supply_rows` supplies them. Evicted snapshots that no policy chose are limited to MAX_SPILLED
    and ``max_bytes``: those of the lowest worth per byte are dropped, with a warning once a minute.
    Interim snapshots, which no policy chose either, come last.
    An OSError (a full or read-only disk) is a warning, and the server continues from RAM. A job
    that it hits is retried ``retry_seconds`` later; one that needs rows of the device is parked
    until the queue closes; other errors, and a last try, give the job up.

    Attributes:
        on_rows_needed: The function to call when a job needs rows of the device.
        written: The snapshots that were written, and their bytes.
        spilled: The evicted snapshots among them that no policy chose.
        interim: The snapshots among them whose prompts were still being evaluated.
        n_failed: The writes that failed.
        n_dropped: The snapshots that were dropped before they were written.
    """

    def __init__(
        self,
        write: Callable[[Snapshot, bool], Writing],
        max_bytes: int = MAX_UNWRITTEN_BYTES,
        clock: Callable[[], float] = time.monotonic,
        retry_seconds: float = RETRY_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """Make an empty queue. ``write`` starts the write of a snapshot, ``max_bytes`` limits
        evicted ones, ``clock`` gives monotonic seconds. A write that makes no progress for
        ``stall_seconds`` does not count as one that drains the device.
        """
        self.on_rows_needed: FlushCopies = lambda: None
        self.written = Written()
        self.spilled = Written()
        self.interim = Written()
        self.n_failed = 0
        self.n_dropped = 0
        self.write_one = write
        self._max_bytes = max_bytes
        self._clock = clock
        self._retry_seconds = retry_seconds
        self._stall_seconds = stall_seconds
        self._jobs: dict[WriteJob, None] = {}  # a set that keeps the order
        self._calls: deque[Callable[[], object]] = deque(maxlen=MAX_CALLS)
        self._order = itertools.count(1)
        self._changed = threading.Condition()
        self._current: object = None  # the job or call that runs
        self._progress_at = 0.0
        self._warn_at = 0.0  # no warning of a lost snapshot before this time
        self._resume_at = 0.0
        self._failure = ""  # the last reason of the disk, for one warning each
        self._is_closing = False
        self._is_last_try = False
        self._thread = threading.Thread(target=self._run, name="pyctl-disk", daemon=True)

    def start(self) -> None:
        """Start the thread that writes."""
        self._thread.start()

    def wait_for_change(self, seconds: float) -> None:
        """Wait until the writing thread changes something, at most ``seconds``."""
        with self._changed:
            self._changed.wait(seconds)

    def join(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the end of the writing thread; return whether it ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # -- for the engine's thread
    # ----------------------------------------------------------------------------------

    def write(self, snapshot: Snapshot, *, is_interim: bool = False) -> None:
        """Queue a ``snapshot`` of the cache, whose rows in RAM are complete; they live until they
        are written. One that ``is_interim`` comes after all others.
        """
        copy = detached_copy(snapshot)
        value = 0 if is_interim else next(self._order)
        job = WriteJob(copy, weakref.ref(snapshot), not is_interim, value, is_interim=is_interim)
        with self._changed:
            queued = self._find_equivalent(snapshot)
            if queued is not None:
                self._join(queued, job)
            elif not self._is_closing:
                self._jobs[job] = None
                self._progress_at = self._clock()
                self._changed.notify_all()

    def evict(
        self, snapshot: Snapshot, rows_of: RowsOf, value: float, n_bytes: int, *, spills: bool
    ) -> None:
        """Take over ``snapshot``, which the cache evicts, with ``n_bytes`` that are to be written.

        A queued one takes all its rows. Another one is queued if it ``spills`` and the snapshots
        that wait are not worth more than its ``value``, the seconds that it saves.
        """
        with self._changed:
            job = self._find_equivalent(snapshot)
            if job is None:
                if not spills or self._is_closing:
                    return
                copy = detached_copy(snapshot)
                job = WriteJob(copy, weakref.ref(snapshot), False, value, JobState.COPYING)
                self._jobs[job] = None
            elif job.is_evicted:
                return  # it has all rows already
            elif job.needs_device_rows:
                job.change(JobState.COPYING)
            if not job.is_chosen:
                job.value = value
            job.n_bytes = n_bytes
            self._make_room()
            if job not in self._jobs or job.original() is not snapshot:
                return  # an equivalent job has its own rows
        try:
            job.take_rows(snapshot, rows_of)
        except (StateError, MemoryError) as error:
            with self._changed:
                if job in self._jobs and not job.is_cancelled:  # else another thread removed it
                    self._cancel_logged(job, str(error))

    @property
    def awaits_rows(self) -> bool:
        """True if a job waits for `supply_rows`."""
        if not self._jobs:  # asked after each token
            return False
        waiting = (JobState.NEEDS_ROWS, JobState.COPYING)
        with self._changed:
            return any(job.state in waiting for job in self._jobs)

    def supply_rows(self, rows_of: RowsOf) -> None:
        """Supply the rows that one job needs, if RAM has room for them; ``rows_of`` returns
        complete blocks.

        The caller has waited for all copies before, so evicted snapshots are complete.
        """
        with self._changed:
            for job in self._jobs:
                if job.state is JobState.COPYING:
                    job.change(JobState.READY)
            self._changed.notify_all()
            waiting = [each for each in self._jobs if each.state is JobState.NEEDS_ROWS]
            if not waiting:
                return
            job = max(waiting, key=lambda each: each.rank)
            segment = job.next_segment
        assert segment is not None
        try:
            rows = job.rows_from_cache(segment, rows_of)
        except MemoryError:
            return  # a later call may find room
        except (NotWrittenError, StateError) as error:
            self._settle(job, error)
        else:
            segment.rows = rows
            self._settle(job, None)

    @property
    def is_draining_device(self) -> bool:
        """True if rows that only the device has are being written, and the disk takes them."""
        with self._changed:
            pending = (job for job in self._jobs if job.state is not JobState.PARKED)
            is_pending = any(job.needs_device_rows for job in pending)
            return is_pending and self._clock() - self._progress_at < self._stall_seconds

    def drop_lowest_value(self) -> bool:
        """Drop the snapshot of lowest rank among those that take RAM; return False if there is
        none.
        """
        with self._changed:
            jobs = [job for job in self._jobs if not job.is_cancelled and job.has_bytes]
            if not jobs:
                return False
            self._cancel_logged(min(jobs, key=lambda job: job.rank), "the disk is too slow")
            return True

    # -- for any thread
    # ----------------------------------------------------------------------------------

    def remove(self, name: str) -> bool:
        """Cancel the jobs of the prefix called ``name``; return False if there is none.

        One that is being written is not published, unless it has been already. The cache offers it
        again once it was used.
        """
        with self._changed:
            jobs = [job for job in self._jobs if job.snapshot.prefix.name == name]
            jobs = [job for job in jobs if not job.is_cancelled]
            for job in jobs:
                job.mark_handled()
                self._cancel(job, "it was dropped")
            return bool(jobs)

    @property
    def jobs(self) -> list[WriteJob]:
        """The jobs of the queue, in the order of their arrival."""
        with self._changed:
            return list(self._jobs)

    @property
    def n_waiting(self) -> int:
        """The number of snapshots in the queue, with those that are being written."""
        with self._changed:
            return sum(not job.is_cancelled for job in self._jobs)

    def is_queued(self, prefix: Prefix) -> bool:
        """Return whether a snapshot of ``prefix`` waits to be written, or is being written."""
        with self._changed:
            return any(job.snapshot.prefix == prefix for job in self._jobs if not job.is_cancelled)

    def run_soon(self, function: Callable[[], object]) -> None:
        """Have the writing thread call ``function``, which may wait for the disk."""
        with self._changed:
            self._calls.append(function)
            self._changed.notify_all()

    def flush(self, timeout: float) -> bool:
        """Wait until nothing more can be written now, ``timeout`` seconds at most; return False if
        something is left.

        Jobs that need rows of the device, or are parked without them, do not count.
        """
        waiting = (JobState.NEEDS_ROWS, JobState.PARKED)
        with self._changed:
            self._changed.wait_for(lambda: not self._has_work(), timeout)
            is_left = any(job.state not in waiting for job in self._jobs)
            return not (is_left or self._calls or self._current)

    def retry(self) -> None:
        """End the pause after the disk refused a write."""
        with self._changed:
            self._resume_at = 0.0
            self._changed.notify_all()

    def close(self, timeout: float, flush_copies: FlushCopies = lambda: None) -> bool:
        """Write all, then stop the thread; return False if a chosen snapshot is left, or the thread
        still runs after ``timeout`` seconds.

        ``flush_copies`` calls `supply_rows`. Parked snapshots are tried once more. A running write
        ends with its segment, or the process leaves its temp file.
        """
        deadline = self._clock() + timeout
        self.begin_last_try()
        while self._is_busy() and self._clock() < deadline - LAST_SECONDS:
            flush_copies()
            self.wait_for_change(AGAIN_SECONDS)
        with self._changed:
            self._is_closing = True
            n_left = sum(job.is_chosen for job in self._jobs)
            n_calls = len(self._calls)
            self.n_dropped += n_left
            for job in self._jobs.copy():
                if not job.is_cancelled:
                    self._cancel(job, "there is no time")
            self._calls.clear()
            self._changed.notify_all()
        has_ended = self.join(max(deadline - self._clock(), 0.1))
        return has_ended and not (n_left or n_calls)

    # -- under the lock
    # ----------------------------------------------------------------------------------

    def _find_equivalent(self, snapshot: Snapshot) -> WriteJob | None:
        """Return the job that writes ``snapshot``, or one that serves as well: it has the same
        prefix, and is exact if the snapshot is.
        """
        for job in self._jobs:
            if job.is_cancelled or job.snapshot.prefix != snapshot.prefix:
                continue
            if job.original() is not snapshot and job.needs_device_rows:
                continue  # the rows of another snapshot may never come
            if job.snapshot.exact or not snapshot.exact:
                return job
        return None

    def _join(self, queued: WriteJob, job: WriteJob) -> None:
        """Have ``queued`` serve for ``job`` also: once a policy chose it, it is not interim."""
        if not job.is_chosen:
            return
        if queued.is_interim:
            queued.value = job.value
        queued.is_chosen = True
        queued.is_interim = False

    def _make_room(self) -> None:
        """Lose evicted snapshots that no policy chose, the least worth first, until the others
        fit.
        """
        n_left = MAX_SPILLED
        room = self._max_bytes
        spilled = [job for job in self._jobs if not job.is_chosen and not job.is_cancelled]
        for job in sorted(spilled, key=lambda job: job.rank, reverse=True):
            if n_left and job.n_bytes <= room:
                n_left -= 1
                room -= job.n_bytes
            else:
                self._cancel_logged(job, "the disk is too slow")

    def _cancel_logged(self, job: WriteJob, reason: str) -> None:
        """Cancel ``job``, count it, and log that once a minute."""
        self._cancel(job, reason)
        self.n_dropped += 1
        if self._clock() >= self._warn_at:
            self._warn_at = self._clock() + self._retry_seconds
            log.warning("%d snapshots are not written: %s", self.n_dropped, reason)

    def _cancel(self, job: WriteJob, reason: str) -> None:
        """End ``job``: now, or in its next turn if it has temp files."""
        job.forbid_publishing()
        if job.writing is None:
            self._end(job)
        else:
            job.error = NotWrittenError(reason)
            job.change(JobState.CANCELLED)
        self._changed.notify_all()

    def _end(self, job: WriteJob) -> None:
        """Take ``job`` out of the queue."""
        self._jobs.pop(job, None)
        job.change(JobState.ENDED)

    def _has_work(self) -> bool:
        """Return whether a call or a turn runs or could run now."""
        return bool(self._calls or self._current) or self._next_job() is not None

    def _next_job(self) -> WriteJob | None:
        """Return the job whose turn it is, None if no job can have one now."""
        is_pausing = self._clock() < self._resume_at
        states = {JobState.CANCELLED} if is_pausing else {JobState.CANCELLED, JobState.READY}
        jobs = [job for job in self._jobs if job.state in states]
        return max(jobs, key=lambda job: job.rank, default=None)

    # -- short sections with the lock
    # ----------------------------------------------------------------------------------

    def _settle(self, job: WriteJob, error: Exception | None) -> None:
        """End the wait of ``job`` for rows: it has them, or they never come because of
        ``error``.
        """
        with self._changed:
            if job.state is JobState.NEEDS_ROWS:  # else it was cancelled meanwhile
                if error is not None:
                    job.error = error.with_traceback(None)  # which would keep the snapshot alive
                job.change(JobState.READY if error is None else JobState.CANCELLED)
            self._changed.notify_all()

    def begin_last_try(self) -> None:
        """Try parked jobs once more, and from now on park none."""
        with self._changed:
            self._is_last_try = True
            for job in self._jobs:
                if job.state is JobState.PARKED:
                    job.change(JobState.READY)
        self.retry()

    def _is_busy(self) -> bool:
        with self._changed:
            return bool(self._jobs or self._calls or self._current)

    # -- the writing thread
    # ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while self.run_next() or self._wait_for_work():
            continue

    def _wait_for_work(self) -> bool:
        """Wait until there is something to run; return False for the end."""
        with self._changed:
            while not self._has_work():
                if self._is_closing:
                    return False
                pause = self._resume_at - self._clock()
                self._changed.wait(pause if pause > 0 and self._jobs else None)
            return True

    def run_next(self) -> bool:
        """Run the next call or turn on this thread, which is the only one; return False if none can
        run now.
        """
        step = self._take_next()
        if step is None:
            return False
        try:
            step()
        except Exception:
            log.exception("disk cache: a write job failed")
        finally:
            del step  # which may hold memory while this thread waits
            with self._changed:
                self._current = None
                self._changed.notify_all()
        return True

    def _take_next(self) -> Callable[[], object] | None:
        with self._changed:
            if self._calls:
                call = self._calls.popleft()
                self._current = call
                return call
            job = self._next_job()
            if job is None:
                return None
            if job.writing is None:
                job.writing = self.write_one(job.snapshot, not job.is_chosen)
            self._current = job
            return partial(self._turn, job)

    def _turn(self, job: WriteJob) -> None:
        """Write the segment whose rows are here, and find which is next."""
        assert job.writing is not None
        if job.error is not None:
            self._fail(job, job.error)
            return
        written = job.next_segment
        try:
            next_segment = next(job.writing)
        except StopIteration as end:
            self._finish(job, end.value)
        except Exception as error:
            self._fail(job, error)
        else:
            self._advance(job, written, next_segment)
        with self._changed:
            needs_rows = any(each.state is JobState.NEEDS_ROWS for each in self._jobs)
        if needs_rows:
            self.on_rows_needed()

    def _advance(self, job: WriteJob, written: Segment | None, next_segment: Segment) -> None:
        """Record the end of a turn that wrote ``written`` and needs ``next_segment`` next."""
        with self._changed:
            if written is not None and written.held is not None:
                written.rows = NOTHING  # a copy of rows that the device has
            job.next_segment = next_segment
            self._progress_at = self._clock()
            if job.state is JobState.READY and next_segment.device_only_bytes:
                job.change(JobState.NEEDS_ROWS)

    def _finish(self, job: WriteJob, n_bytes: int) -> None:
        """Count a job whose write returned; 0 bytes if there was nothing to write."""
        with self._changed:
            self._end(job)
            self._failure = ""
            self._progress_at = self._clock()
            if not n_bytes:
                return
            self.written = self.written.plus(n_bytes)
            if job.is_interim:
                self.interim = self.interim.plus(n_bytes)
            elif not job.is_chosen:
                self.spilled = self.spilled.plus(n_bytes)

    def _fail(self, job: WriteJob, error: Exception) -> None:
        """End a turn that failed: retry the job, park it, or give it up."""
        assert job.writing is not None
        with suppress(OSError):
            job.writing.close()
        is_disk_error = isinstance(error, OSError)
        if isinstance(error, OSError):
            self._back_off(error)
        elif not isinstance(error, GIVEN_UP):
            self.n_failed += 1
            log.error("cannot write the snapshot at %d tokens", job.snapshot.n, exc_info=error)
        with self._changed:
            if not is_disk_error or not job.may_publish or self._is_last_try:
                self._give_up(job, error)
            elif job.state is JobState.READY and job.needs_device_rows:
                self._park(job)
            else:
                self._retry(job)

    def _retry(self, job: WriteJob) -> None:
        """Leave ``job`` in the queue: after the pause it starts again at its first segment."""
        job.restart()

    def _park(self, job: WriteJob) -> None:
        """Leave ``job`` until the queue closes: each further try would copy its rows from the
        device again.
        """
        job.restart()
        job.change(JobState.PARKED)

    def _give_up(self, job: WriteJob, error: Exception) -> None:
        """Take ``job`` out of the queue unwritten, and count it if its rows may be lost."""
        job.restart()  # which frees copies of rows
        if job.may_publish and job.needs_device_rows:
            self.n_dropped += 1
            if isinstance(error, GIVEN_UP):
                log.warning("prefix of %d tokens not written: %s", job.snapshot.n, error)
                job.mark_handled()
        self._end(job)

    def _back_off(self, error: OSError) -> None:
        """Write nothing for a while, since the disk refused."""
        self.n_failed += 1
        reason = error.strerror or str(error)
        with self._changed:
            if reason != self._failure:  # one warning, not one for each snapshot
                log.warning("cannot write the disk cache, serving from RAM: %s", reason)
            self._failure = reason
            if not self._is_last_try:
                self._resume_at = self._clock() + self._retry_seconds
