"""The engine's thread: owns llama.cpp, accepts requests from any thread, and runs the engine until
closed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, TypeVar

from pyctl.cache import AGAIN_SECONDS, RequestStats
from pyctl.engine.backend import EngineInfo
from pyctl.engine.engine import Engine
from pyctl.engine.handle import RequestHandle
from pyctl.engine.jobs import Job
from pyctl.engine.openmp import end_threads
from pyctl.engine.request import Done, Failed, Request, Timings, as_client_error
from pyctl.engine.sampling import Sampling
from pyctl.errors import (
    BusyError,
    ContextSizeError,
    EngineError,
    PyctlError,
    RequestError,
    UnavailableError,
)
from pyctl.limit import limit

__all__ = ["EvictableEngineCache", "Worker"]

R = TypeVar("R")

log = logging.getLogger(__name__)

FINISH_SECONDS = 2.0
"""Longest duration of a step after closing. Then it is interrupted, which loses the contents of its
sequences.
"""

STEP_SECONDS = limit(
    20.0,
    "a step of the engine that cannot be interrupted, at the stop",
    "the process exits with code 1",
    "process",
    "s",
)

MAX_FAILED_STEPS = limit(
    3, "steps of the engine in a row that fail", "the server ends, exit code 1", "process"
)

IDLE_SECONDS = 2.0
"""Idle time after a client's last request before held rows without a copy go to free RAM of the
cache, else to disk. Background requests start after this copy.
"""

PREPARE_SECONDS = 0.5
"""Idle time before `Engine.prepare`: a request that waited for the model arrives within it."""

STILL_SECONDS = 2.0
"""After the loss of a device, a thread that stands at one instruction for so long is in a call that
never returns.
"""

WATCH_SECONDS = 1.0
"""Interval between two checks of the engine's thread."""


class IdleJobs:
    """Schedule of idle work: background requests, unloading the model, copying held rows, preparing
    for requests.

    ``is_ahead``: the engine's current work has no waiting client.
    """

    def __init__(self, engine: Engine, sleep_seconds: float) -> None:
        self.is_ahead = False
        self._engine = engine
        self._clock = engine.clock
        self._sleep_seconds = sleep_seconds
        self._last_work = self._last_asked = self._clock()
        self._copy_at = math.inf

    def worked(self) -> None:
        """Restart the idle time: the engine has finished its work."""
        end_threads()
        self._last_work = self._clock()
        if not self.is_ahead:
            self._last_asked = self._last_work
        self._copy_at = max(self._last_asked + IDLE_SECONDS, self._last_work)
        self._engine.prefix_cache.write_back.flush_copies()

    def hand_over(self) -> None:
        """Copy what the disk needs; while a client waits for the engine's work, that is done
        between two tokens.
        """
        if self.is_ahead or not self._engine.scheduler.has_work:
            self._engine.prefix_cache.write_back.flush_copies()

    @property
    def seconds(self) -> float | None:
        """Seconds until the next job is due; None if there is none."""
        now = self._clock()
        due = min(at for at, _ in self._jobs(now))
        return max(due - now, 0.0) if due < math.inf else None

    def run(self) -> bool:
        """Run the first due job; return whether the engine has steps to run."""
        now = self._clock()
        due = [job for at, job in self._jobs(now) if at <= now]
        if due and due[0] is not None:
            due[0]()
            return False
        self.is_ahead = bool(due)
        return self.is_ahead

    def _jobs(self, now: float) -> list[tuple[float, Callable[[], None] | None]]:
        """Return (due time, job), most urgent first; the job None stands for steps of the
        engine.
        """
        engine = self._engine
        copy_at = math.inf if engine.asleep else self._copy_at
        ahead = engine.prewarms.seconds if copy_at > now + AGAIN_SECONDS else None
        sleep_at = (
            self._last_work + self._sleep_seconds
            if self._sleep_seconds >= 0 and not engine.asleep
            else math.inf
        )
        ahead_at = now + ahead if ahead is not None else math.inf
        if (disk := engine.prefix_cache.disk) is not None and disk.is_draining_device:
            sleep_at, ahead_at = (max(at, now + AGAIN_SECONDS) for at in (sleep_at, ahead_at))
        prepare_at = self._last_work + PREPARE_SECONDS if engine.can_prepare else math.inf
        return [
            (ahead_at, None),
            (sleep_at, self._sleep),
            (copy_at, self._copy),
            (prepare_at, engine.prepare),
        ]

    def _sleep(self) -> None:
        self._engine.sleep()
        log.info("idle: model unloaded until the next request")

    def _copy(self) -> None:
        has_copied = self._engine.prefix_cache.write_back.copy_next()
        self._copy_at = self._clock() if has_copied else math.inf


class Worker:
    """Runs ``engine`` on its own thread. All methods are thread-safe.

    After ``sleep_seconds`` without work (negative: never) the model is unloaded until the next
    request. An error ends only the requests of its step. If the thread ends, makes no progress for
    ``stall_seconds`` (0: no limit), or a device is lost, all requests and calls fail and `trouble`
    holds the reason.
    """

    def __init__(
        self, engine: Engine, info: EngineInfo, sleep_seconds: float = -1, stall_seconds: float = 0
    ) -> None:
        self._engine = engine
        self.info = info
        self._stall_seconds = stall_seconds
        self._idle = IdleJobs(engine, sleep_seconds)
        self._inbox: queue.SimpleQueue[RequestHandle | Job[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the open requests and the states of closing
        self._open: set[RequestHandle] = set()
        self._current: Job[Any] | None = None
        self._closing = False
        self._unloads = True
        self._ended = False
        self._deadline = 0.0
        self._complete = False
        self.trouble: PyctlError | None = None
        self._stalled = self._is_lost = self._is_saving = False
        self._working = False
        self._n_steps = 0
        self._n_failed = 0
        # After this, `look` is to learn of a lost device.
        self._sign = (0, engine.backend.control.heartbeat)
        self._looked_at = time.monotonic()
        self._still_seconds = 0.0
        self._before_close: list[Callable[[], None]] = []
        if (disk := engine.prefix_cache.disk) is not None:
            disk.on_rows_needed = lambda: self.call(self._idle.hand_over)
        self._no_more_steps = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pyctl-engine", daemon=True)
        self._thread.start()

    @property
    def is_sleeping(self) -> bool:
        """Whether the model is unloaded; the next request reloads it."""
        return self._engine.asleep

    def submit(self, request: Request) -> RequestHandle:
        """Queue ``request``; iterate over the handle for its events.

        An empty prompt gets an empty reply. Raises ContextSizeError if the prompt can never fit,
        RequestError for invalid token ids, BusyError if the queue is full, and UnavailableError
        after `close` or in `trouble`.
        """
        n_ctx = self.info.n_ctx
        if len(request.prompt) >= n_ctx:
            raise ContextSizeError(len(request.prompt), n_ctx)
        handle = RequestHandle(request)
        tokens = request.prompt.tokens
        if not tokens.size:  # as llama-server does
            handle.put(
                Done(
                    "limit",
                    "",
                    Timings(0, 0, 0.0, 0, 0.0, 0.0),
                    RequestStats(0),
                    max(request.seq, 0),
                )
            )
            return handle
        n_of_images = sum(picture.n_tokens for picture in request.prompt.pictures)
        if int((tokens < 0).sum()) != n_of_images or int(tokens.max()) >= self.info.n_vocab:
            raise RequestError(f"token ids must be in [0, {self.info.n_vocab})")
        with self._lock:
            if self.trouble is not None:
                raise UnavailableError(str(self.trouble))
            if self._closing:
                raise UnavailableError("the server is shutting down")
            if (
                n_waiting := self._engine.n_waiting + self._inbox.qsize()
            ) >= self._engine.max_waiting:
                raise BusyError(n_waiting)
            self._open = {each for each in self._open if not each.is_over and not each.cancelled}
            self._open.add(handle)
            self._inbox.put(handle)
        if not request.background:
            self._engine.backend.control.preempt()
        return handle

    def prewarm(self, request: Request) -> None:
        """Queue a background request without a consumer. Does not wake a sleeping engine."""
        handle = RequestHandle(request)
        if len(request.prompt) < self.info.n_ctx:
            self.call(lambda: None if self._engine.asleep else self._engine.submit(handle))

    def before_close(self, function: Callable[[], None]) -> None:
        """Register ``function`` for `close` to call first, to end other threads that use the
        vocabulary.
        """
        self._before_close.append(function)

    def check(self, sampling: Sampling) -> None:
        """Raise RequestError for an invalid grammar. May take a second, without blocking the
        engine's thread.
        """
        self._engine.backend.vocabulary.check(sampling)

    def call(
        self,
        function: Callable[[], R],
        *,
        needs_model: bool = False,
        seq: int = -1,
        is_read: bool = False,
    ) -> Future[R]:
        """Run ``function`` on the engine's thread between two steps; cancelled if the worker closes
        first.

        ``needs_model`` wakes a sleeping engine; otherwise the model may be unloaded. With ``seq``
        the function waits until no request owns that sequence. One that ``is_read`` changes
        nothing: it runs on any thread, at once if the engine's thread waits for an evaluation or
        for work (`StateReads`).
        """
        job = Job(function, needs_model=needs_model, seq=seq)
        reads = self._engine.state_reads
        with self._lock:
            refused = self._ended
            if not refused:
                (reads.add if is_read else self._inbox.put)(job)
        if needs_model:
            self._engine.backend.control.preempt()
        if refused:
            job.fail(self.trouble)
        elif is_read:
            reads.run()
        return job.future

    def unload(self) -> Future[None]:
        """Unload the model and keep its cache. All requests must have ended or be cancelled by
        then.
        """
        return self.call(lambda: None if self._engine.asleep else self._engine.sleep())

    def load(self) -> Future[None]:
        """Load the model again after `unload`. The future raises UnavailableError if that fails."""
        return self.call(lambda: None, needs_model=True)

    def end_requests(self, reason: PyctlError) -> Future[None]:
        """End all requests with ``reason``."""
        return self.call(lambda: self._engine.scheduler.end_all(reason))

    def close(self, timeout: float | None = None, *, unload: bool = True) -> bool:
        """End all requests with UnavailableError and stop after the current step; interrupt a long
        one. Idempotent.

        Waits up to ``timeout`` seconds, by default `Engine.close_seconds` and a margin for the
        step. Returns whether all pending cache writes completed. Without ``unload`` the model stays
        loaded, since other threads may still use its vocabulary.
        """
        with contextlib.suppress(PyctlError):
            self.look()  # the device may be lost, and another worker have noticed first
        for function in self._before_close:
            function()
        wait = self._engine.close_seconds + STEP_SECONDS if timeout is None else timeout
        with self._lock:
            first = not self._closing
            self._closing = True
            if first:
                self._unloads = unload
                self._deadline = time.monotonic() + wait
        if first:
            self._fail_open(UnavailableError("the server is shutting down"))
            self._inbox.put(None)
            if not self._stalled and not self._no_more_steps.wait(min(FINISH_SECONDS, wait)):
                self._engine.backend.control.interrupt()
        if not self._stalled or self._is_lost:
            self._over.wait(max(self._deadline - time.monotonic(), 0.0))
        if first and not self._over.is_set():
            log.error("the engine did not stop: pending cache writes are lost")
        return self._complete

    def watch(self) -> None:
        """`look` until the worker ends."""
        while not self._over.wait(WATCH_SECONDS):
            self.look()
        self.look()

    def look(self) -> None:
        """Note progress; one thread calls this every WATCH_SECONDS. Raises `trouble` if the
        engine's thread fails or makes no progress, and after the loss of a device, when the cache
        in RAM is on disk.
        """
        if self.trouble is None and not self._over.is_set():
            self._note_progress()
        if self.trouble is not None:
            raise self.trouble

    def _note_progress(self) -> None:
        # Counts at most two intervals: a stopped process or machine is not a stall.
        now = time.monotonic()
        passed = min(now - self._looked_at, 2 * WATCH_SECONDS)
        self._looked_at = now
        try:
            before = self._sign
            self._sign = (self._n_steps, self._engine.backend.control.heartbeat)
        except EngineError as error:
            return self._lose_device(error)
        stands = self._working and self._sign == before and not self._closing
        self._still_seconds = self._still_seconds + passed if stands else 0.0
        if 0 < self._stall_seconds <= self._still_seconds:
            log.critical("the engine has work and made no progress for %.0f s", self._still_seconds)
            self._stalled = True
            self._give_up(EngineError("the engine makes no progress"))

    def _lose_device(self, reason: EngineError) -> None:
        """End the service and write what RAM has: by the engine's thread, or here if a call for the
        device holds it.
        """
        self._stalled = self._is_lost = True
        self._give_up(reason)
        self._inbox.put(None)
        place = None
        since = time.monotonic()
        while not self._over.wait(STILL_SECONDS / 10) and not self._is_saving:
            frame = sys._current_frames().get(self._thread.ident or 0)
            here = (id(frame), frame.f_lasti if frame is not None else 0)
            if here != place:
                place = here
                since = time.monotonic()
            elif time.monotonic() - since >= STILL_SECONDS:
                self._save_rest()
                self._over.set()
        self._over.wait(self._engine.close_seconds)

    # -- the thread
    # ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
            self._no_more_steps.set()
            if self._is_lost:
                return self._save_rest()
            complete = self._engine.close(UnavailableError("the server is shutting down"))
            with self._lock:
                self._ended = True
            self._fail_inbox(None)
            if self._unloads:
                cache = self._engine.prefix_cache.cache
                cache.clear(pinned=True)
                cache.shared.remove(cache)
                self._engine.backend.unload()
            self._complete = complete
        except BaseException as error:
            if self._is_lost:
                return self._save_rest()
            log.critical("the engine's thread has ended", exc_info=error)
            self._give_up(
                EngineError(f"the engine has failed: {str(error) or type(error).__name__}")
            )
            self._save_rest()
        finally:
            self._no_more_steps.set()
            self._over.set()

    def _save_rest(self) -> None:
        """After a failure, write the cache to disk if possible, once: its contents are still
        valid.
        """
        with self._lock:
            is_first = not self._is_saving
            self._is_saving = True
        if not is_first:
            return
        try:
            if self._is_lost:
                self._engine.backend.unload()
                self._engine.prefix_cache.device.leave_all()
            self._engine.prefix_cache.close()
        except Exception:
            log.exception("cannot write the cache")

    def _serve(self) -> None:
        busy = False
        while True:
            if busy and self._inbox.empty():
                busy = self._step()
                if self._idle.is_ahead and not self._engine.running:
                    busy = False  # let idle jobs decide: copying rows precedes background requests
                if not busy:
                    self._idle.worked()
                continue
            self._working = busy
            seconds = None if busy else self._idle.seconds
            try:
                with self._engine.state_reads.allowed(evaluating=False):
                    item = self._inbox.get(timeout=seconds)
            except queue.Empty:
                busy = self._idle.run()
                continue
            if item is None:
                return
            busy = self._take(item) or busy
            self._n_steps += 1

    def _step(self) -> bool:
        """Run one step of the engine; return whether work is left."""
        self._working = True
        try:
            busy = self._engine.step()
        except Exception as error:
            self._n_failed += 1
            self._engine.recover(as_client_error(error))
            if self._n_failed >= MAX_FAILED_STEPS:
                raise
            return True
        self._n_failed = 0
        self._n_steps += 1
        return busy

    def _take(self, item: RequestHandle | Job[Any]) -> bool:
        """Start ``item``; return whether the engine has work."""
        if isinstance(item, Job) and not item.needs_model:
            self._do(item)
            return False
        try:
            self._engine.wake()  # loading has no time limit: `_working` is not set yet
        except Exception as error:
            log.error("cannot reload the model: %s", error)
            reason = UnavailableError(f"cannot reload the model: {error}")
            if isinstance(item, RequestHandle):
                item.put(Failed(reason))
            else:
                item.fail(reason)
            return False
        if isinstance(item, Job):
            self._idle.is_ahead = False
            self._do(item)
            return True
        self._idle.is_ahead = item.request.background and (self._idle.is_ahead or not self._working)
        try:
            self._engine.submit(item)
        except Exception as error:
            item.put(Failed(as_client_error(error)))
        return True

    def _do(self, item: Job[Any]) -> None:
        if item.seq >= 0:
            return self._engine.scheduler.idle_jobs.append(item)
        self._working = True
        self._current = item
        self._engine.tell()  # deliver before a call that may take long
        item.run()
        self._current = None

    # -- from any thread
    # ----------------------------------------------------------------------------------

    def _give_up(self, reason: PyctlError) -> None:
        """Fail all requests and calls with ``reason``, now and later."""
        with self._lock:
            self.trouble = reason
            self._ended = True
        self._fail_open(reason)
        self._fail_inbox(reason)
        if (current := self._current) is not None:
            current.fail(reason)
        for job in tuple(self._engine.scheduler.idle_jobs):
            job.fail(reason)

    def _fail_open(self, reason: PyctlError) -> None:
        with self._lock:
            handles = self._open
            self._open = set()
        for handle in handles:
            if not handle.is_over:
                handle.put(Failed(reason))

    def _fail_inbox(self, reason: PyctlError | None) -> None:
        self._engine.state_reads.fail(reason)
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, RequestHandle):
                    item.put(Failed(reason or UnavailableError("the server is shutting down")))
                elif item is not None:
                    item.fail(reason)


WAIT_SECONDS = 0.25
"""Longest wait for the engine of an unloaded model, which answers at once unless it is being
loaded.
"""


class EvictableEngineCache:
    """The cache of ``engine``, which ``worker`` runs, in a `RamBudget`. Thread-safe."""

    def __init__(self, worker: Worker, engine: Engine) -> None:
        self._worker = worker
        self._engine = engine

    @property
    def n_bytes(self) -> int:
        """Bytes of the cache."""
        return self._engine.prefix_cache.cache.pool.n_bytes

    @property
    def n_fixed(self) -> int:
        """Bytes that it cannot evict at once."""
        pool = self._engine.prefix_cache.cache.pool
        pinned = tuple(self._engine.prefix_cache.cache.pinned)
        return pool.n_needed(pinned) if self._worker.is_sleeping else pool.n_bytes

    def evict_bytes(self, n_bytes: int, worth: float) -> bool:
        """Evict below ``worth``, seconds per byte, on the engine's thread; wait only if the model
        is unloaded.
        """
        rests = self._worker.is_sleeping
        done = self._worker.call(partial(self._evict_bytes, n_bytes, worth))
        if not rests:
            return False
        try:
            return done.result(WAIT_SECONDS)
        except (FutureTimeout, CancelledError):
            return False

    def _evict_bytes(self, n_bytes: int, worth: float) -> bool:
        """Evict as `RamCache.evict_bytes` does, and have what belongs on disk written."""
        prefix_cache = self._engine.prefix_cache
        has_evicted = prefix_cache.cache.evict_bytes(n_bytes, worth)
        if has_evicted:
            prefix_cache.write_back.flush_copies()
        return has_evicted
