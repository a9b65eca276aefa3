"""The engine's thread: owns llama.cpp, accepts requests from any thread, and runs the engine until
closed.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from pyctl.engine.backend import EngineInfo
from pyctl.engine.engine import Engine
from pyctl.engine.handle import RequestHandle
from pyctl.engine.idle import IDLE_SECONDS, IdleFacts, IdleSchedule, IdleTask
from pyctl.engine.jobs import Job
from pyctl.engine.openmp import end_threads
from pyctl.engine.request import Failed, Request, as_client_error, empty_reply
from pyctl.engine.sampling import Sampling
from pyctl.engine.watchdog import STILL_SECONDS, WATCH_SECONDS, ProgressWatch, StillThread
from pyctl.errors import (
    BusyError,
    ContextSizeError,
    EngineError,
    PyctlError,
    RequestError,
    UnavailableError,
)
from pyctl.prompt import Prompt
from pyctl.settings.limit import limit

__all__ = ["Worker", "WorkerTimes"]

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

SHUTTING_DOWN = "the server is shutting down"

MAX_FAILED_STEPS = limit(
    3, "steps of the engine in a row that fail", "the server ends, exit code 1", "process"
)


@dataclass(frozen=True)
class WorkerTimes:
    """Seconds of a worker's waits.

    Attributes:
        finish: The longest duration of a step after closing, before it is interrupted.
        step: The time of an interrupted step to end.
        copy: The idle time before rows that only the device has are copied.
        watch: The interval between two checks of the engine's thread.
        still: After the loss of a device, the time at one instruction of a call that never returns.
    """

    finish: float = FINISH_SECONDS
    step: float = STEP_SECONDS
    copy: float = IDLE_SECONDS
    watch: float = WATCH_SECONDS
    still: float = STILL_SECONDS


class Worker:
    """Runs ``engine`` on its own thread. All methods are thread-safe.

    After ``sleep_seconds`` without work (negative: never) the model is unloaded until the next
    request. An error ends only the requests of its step. If the thread ends, makes no progress for
    ``stall_seconds`` (0: no limit), or a device is lost, all requests and calls fail and `trouble`
    holds the reason.
    """

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        sleep_seconds: float = -1,
        stall_seconds: float = 0,
        times: WorkerTimes = WorkerTimes(),
    ) -> None:
        """Start the thread; ``info`` describes the model to other threads."""
        self._engine = engine
        self.info = info
        self.trouble: PyctlError | None = None
        self._times = times
        self._idle = IdleSchedule(
            sleep_seconds, engine.clock, times.copy, engine.canary.schedule.quiet
        )
        self._inbox: queue.SimpleQueue[RequestHandle | Job[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the open requests and the states of closing
        self._open: set[RequestHandle] = set()
        self._current: Job[Any] | None = None
        self._before_close: list[Callable[[], None]] = []
        # Progress, which the watching thread reads.
        self._working = False
        self._n_steps = 0
        self._n_failed = 0
        self._watch = ProgressWatch(stall_seconds, self._sign(), interval=times.watch)
        # The end: by `close`, or because the thread hangs or a device is lost.
        self._closing = False
        self._ended = False  # no call runs on the thread from now on
        self._hangs = False
        self._is_lost = False
        self._is_saving = False
        self._unloads = True
        self._is_complete = False
        self._deadline = 0.0
        self._no_more_steps = threading.Event()
        self._over = threading.Event()
        disk = engine.prefix_cache.disk
        if disk is not None:
            disk.on_rows_needed = lambda: self.call(self._hand_over)
        self._thread = threading.Thread(target=self._run, name="pyctl-engine", daemon=True)
        self._thread.start()

    @property
    def is_serving(self) -> bool:
        """True while a client's request has not ended."""
        with self._lock:
            return any(not each.is_over and not each.cancelled for each in self._open)

    @property
    def is_sleeping(self) -> bool:
        """Return whether the model is unloaded; the next request reloads it."""
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
        if not request.prompt.tokens.size:  # as llama-server does
            handle.put(empty_reply(request))
            return handle
        self._check_tokens(request.prompt)
        with self._lock:
            self._check_accepts()
            self._open = {each for each in self._open if not each.is_over and not each.cancelled}
            self._open.add(handle)
            self._inbox.put(handle)
        if not request.background:
            self._engine.backend.control.preempt()
        return handle

    def _check_tokens(self, prompt: Prompt) -> None:
        """Raise RequestError for ids that are neither tokens of text nor of the prompt's
        images.
        """
        n_negative = int((prompt.tokens < 0).sum())
        n_of_images = sum(picture.n_tokens for picture in prompt.pictures)
        if n_negative != n_of_images or int(prompt.tokens.max()) >= self.info.n_vocab:
            raise RequestError(f"token ids must be in [0, {self.info.n_vocab})")

    def _check_accepts(self) -> None:
        """Raise the reason why no request is accepted now, if there is one."""
        if self.trouble is not None:
            raise UnavailableError(str(self.trouble))
        if self._closing:
            raise UnavailableError(SHUTTING_DOWN)
        n_waiting = self._engine.n_waiting + self._inbox.qsize()
        if n_waiting >= self._engine.max_waiting:
            raise BusyError(n_waiting)

    def prewarm(self, request: Request) -> None:
        """Queue a background request without a consumer. Does not wake a sleeping engine."""
        if len(request.prompt) >= self.info.n_ctx:
            return
        handle = RequestHandle(request)
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
            is_refused = self._ended
            if not is_refused:
                put = reads.add if is_read else self._inbox.put
                put(job)
        if needs_model:
            self._engine.backend.control.preempt()
        if is_refused:
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
            self.poll()  # the device may be lost, and another worker have noticed first
        for function in self._before_close:
            function()
        wait = self._engine.close_seconds + self._times.step if timeout is None else timeout
        with self._lock:
            is_first = not self._closing
            self._closing = True
            if is_first:
                self._unloads = unload
                self._deadline = time.monotonic() + wait
        if is_first:
            self._end_requests(min(self._times.finish, wait))
        if not self._hangs or self._is_lost:
            self._over.wait(max(self._deadline - time.monotonic(), 0.0))
        if is_first and not self._over.is_set():
            log.error("the engine did not stop: pending cache writes are lost")
        return self._is_complete

    def _end_requests(self, seconds: float) -> None:
        """Refuse and end all requests; interrupt a step that takes longer than ``seconds``."""
        self._fail_open(UnavailableError(SHUTTING_DOWN))
        self._inbox.put(None)
        if not self._hangs and not self._no_more_steps.wait(seconds):
            self._engine.backend.control.interrupt()

    # -- the watching thread
    # ----------------------------------------------------------------------------------

    def watch(self) -> None:
        """Run `poll` until the worker ends."""
        while not self._over.wait(self._watch.interval):
            self.poll()
        self.poll()

    def poll(self) -> None:
        """Note progress; one thread calls this every `WorkerTimes.watch` seconds.

        Raises `trouble` if the engine's thread fails or makes no progress, and after the loss of a
        device, when the cache in RAM is on disk.
        """
        if self.trouble is None and not self._over.is_set():
            self._check_progress()
        if self.trouble is not None:
            raise self.trouble

    def _sign(self) -> tuple[int, int]:
        """Return a value that changes with progress. Raises EngineError if a device is lost."""
        return self._n_steps, self._engine.backend.control.heartbeat

    def _check_progress(self) -> None:
        try:
            sign = self._sign()
        except EngineError as error:
            return self._shut_down_lost_device(error)
        is_working = self._working and not self._closing
        if self._watch.is_stalled(sign, is_working=is_working):
            seconds = self._watch.still_seconds
            log.critical("the engine has work and made no progress for %.0f s", seconds)
            self._hangs = True
            self.give_up(EngineError("the engine makes no progress"))

    def _shut_down_lost_device(self, reason: EngineError) -> None:
        """End the service and write the snapshots of RAM: by the engine's thread, or here if a call
        for the device holds it.
        """
        self._hangs = True
        self._is_lost = True
        self.give_up(reason)
        self._inbox.put(None)
        thread = StillThread(self._thread, seconds=self._times.still)
        while not self._over.wait(thread.interval) and not self._is_saving:
            if thread.is_still():
                self._save_rest()
                self._over.set()
        self._over.wait(self._engine.close_seconds)

    # -- the engine's thread
    # ----------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run the thread: serve until the end, then write the cache, whatever ended it."""
        try:
            self._serve()
            self._no_more_steps.set()
            if self._is_lost:
                return self._save_rest()
            is_complete = self._engine.close(UnavailableError(SHUTTING_DOWN))
            with self._lock:
                self._ended = True
            self._fail_inbox(None)
            if self._unloads:
                cache = self._engine.prefix_cache.cache
                cache.clear(pinned=True)
                cache.budget.shared.remove(cache)
                self._engine.backend.unload()
            self._is_complete = is_complete
        except BaseException as error:
            if self._is_lost:
                return self._save_rest()
            log.critical("the engine's thread has ended", exc_info=error)
            reason = str(error) or type(error).__name__
            self.give_up(EngineError(f"the engine has failed: {reason}"))
            self._save_rest()
        finally:
            self._no_more_steps.set()
            self._over.set()

    def _save_rest(self) -> None:
        """After a failure, write the cache to disk if possible, once: its contents are still
        valid.
        """
        with self._lock:
            if self._is_saving:
                return
            self._is_saving = True
        try:
            if self._is_lost:
                self._engine.backend.unload()
                self._engine.prefix_cache.device.evict_all()
            self._engine.prefix_cache.close()
        except Exception:
            log.exception("cannot write the cache")

    def _serve(self) -> None:
        """Run steps while there is work, and take new requests and calls between them, until
        `close`.
        """
        is_busy = False
        while True:
            if is_busy and self._inbox.empty():
                is_busy = self._step()
                if self._idle.is_background and not self._engine.running:
                    is_busy = False  # idle tasks decide: copying rows precedes background requests
                if not is_busy:
                    self._start_idling()
                continue
            self._working = is_busy
            seconds = None if is_busy else self._idle.seconds(self._idle_facts())
            try:
                with self._engine.state_reads.allowed(evaluating=False):
                    item = self._inbox.get(timeout=seconds)
            except queue.Empty:
                is_busy = self._run_idle_task()
                continue
            if item is None:
                return
            is_busy = self._take(item) or is_busy
            self._n_steps += 1

    def _step(self) -> bool:
        """Run one step of the engine; return whether work is left."""
        self._working = True
        try:
            has_work = self._engine.step()
        except Exception as error:
            self._n_failed += 1
            self._engine.recover(as_client_error(error))
            if self._n_failed >= MAX_FAILED_STEPS:
                raise
            return True
        self._n_failed = 0
        self._n_steps += 1
        return has_work

    def _start_idling(self) -> None:
        """Begin to be idle after the end of work."""
        end_threads()
        self._idle.restart()
        self._engine.prefix_cache.write_back.flush_copies()

    def _idle_facts(self) -> IdleFacts:
        engine = self._engine
        disk = engine.prefix_cache.disk
        return IdleFacts(
            is_asleep=engine.asleep,
            needs_warm_up=engine.needs_warm_up,
            is_writing=disk is not None and disk.is_draining_device,
            prewarm_seconds=engine.prewarms.seconds,
            canary_seconds=engine.canary.seconds,
        )

    def _run_idle_task(self) -> bool:
        """Run the most urgent task that is due; return whether the engine has steps to run."""
        task = self._idle.due_task(self._idle_facts())
        if task is IdleTask.PREWARM:
            self._idle.is_background = True
            return True
        if task is IdleTask.SLEEP:
            self._engine.sleep()
            log.info("idle: model unloaded until the next request")
        elif task is IdleTask.COPY:
            self._idle.record_copy(has_more=self._engine.prefix_cache.write_back.copy_next())
        elif task is IdleTask.PREPARE:
            self._engine.warm_up()
        elif task is IdleTask.CANARY:
            self._working = True
            self._engine.canary.step()
            self._n_steps += 1
        else:
            self._idle.is_background = False
        return False

    def _hand_over(self) -> None:
        """Copy the rows that the disk needs; while a client waits for the engine's work, that is
        done between two tokens.
        """
        if self._idle.is_background or not self._engine.scheduler.has_work:
            self._engine.prefix_cache.write_back.flush_copies()

    def _take(self, item: RequestHandle | Job[Any]) -> bool:
        """Start ``item``; return whether the engine has work."""
        if isinstance(item, Job) and not item.needs_model:
            self._run_job(item)
            return False
        try:
            self._engine.wake()  # loading has no time limit: `_working` is not set yet
        except Exception as error:
            log.error("cannot reload the model: %s", error)
            _fail(item, UnavailableError(f"cannot reload the model: {error}"))
            return False
        if isinstance(item, Job):
            self._idle.is_background = False
            self._engine.canary.stop()
            self._run_job(item)
        else:
            self._begin(item)
        return True

    def _begin(self, handle: RequestHandle) -> None:
        """Give a request to the engine. Background work stays so if no client's work runs."""
        was_background = self._idle.is_background or not self._working
        self._idle.is_background = handle.request.background and was_background
        try:
            self._engine.submit(handle)
        except Exception as error:
            handle.put(Failed(as_client_error(error)))

    def _run_job(self, job: Job[Any]) -> None:
        if job.seq >= 0:  # it waits for its sequence
            self._engine.scheduler.idle_jobs.append(job)
            return
        self._working = True
        self._current = job
        self._engine.deliver_events()  # deliver before a call that may take long
        job.run()
        self._current = None

    # -- from any thread
    # ----------------------------------------------------------------------------------

    def give_up(self, reason: PyctlError) -> None:
        """Fail all requests and calls with ``reason``, now and later."""
        with self._lock:
            self.trouble = reason
            self._ended = True
        self._fail_open(reason)
        self._fail_inbox(reason)
        current = self._current
        if current is not None:
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
        """Fail all that waits with ``reason``; without one, cancel calls."""
        self._engine.state_reads.fail(reason)
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if item is not None:
                    _fail(item, reason)


def _fail(item: RequestHandle | Job[Any], reason: PyctlError | None) -> None:
    """Fail ``item`` with ``reason``; without one the server is shutting down."""
    if isinstance(item, RequestHandle):
        item.put(Failed(reason or UnavailableError(SHUTTING_DOWN)))
    else:
        item.fail(reason)
