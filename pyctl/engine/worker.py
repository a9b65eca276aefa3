"""The thread that owns llama.cpp: takes requests from any thread and runs the engine until it is closed."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from pyctl.cache.cache_stats import RequestStats
from pyctl.engine.backend import EngineInfo
from pyctl.engine.engine import Engine
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Request, Timings
from pyctl.engine.sampling import Sampling
from pyctl.errors import ContextSizeError, RequestError, UnavailableError

__all__ = ["Worker"]

R = TypeVar("R")

log = logging.getLogger(__name__)


STEP_SECONDS = 10.0
"""How long a step may take before closing no longer waits for it."""


class _Call(NamedTuple):
    run: Callable[[], None]
    fail: Callable[[Exception | None], None]
    needs_model: bool


class Worker:
    """Runs ``engine`` on a thread of its own.

    After ``sleep_seconds`` without work, below 0 never, the model is freed until there is work again. `submit`, `call`
    and `close` may be called from any thread; everything else happens on the worker's.
    """

    def __init__(self, engine: Engine, info: EngineInfo, sleep_seconds: float = -1) -> None:
        self._engine = engine
        self._info = info
        self._sleep_seconds = sleep_seconds
        self._last_work = time.monotonic()
        self._inbox: queue.SimpleQueue[RequestHandle | _Call | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pyctl-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        """Facts about the model and the context."""
        return self._info

    @property
    def is_sleeping(self) -> bool:
        """Whether the model is freed for now; the next request loads it again."""
        return self._engine.asleep

    def submit(self, request: Request) -> RequestHandle:
        """Queue ``request``; iterate over the handle for its events.

        An empty prompt gets an empty reply. Raises ContextSizeError when the prompt does not fit, UnavailableError
        after `close`.
        """
        n_ctx = self._info.n_ctx
        if self._closing:
            raise UnavailableError("the server is shutting down")
        if len(request.prompt) >= n_ctx:
            raise ContextSizeError(len(request.prompt), n_ctx)
        handle, tokens = RequestHandle(request), request.prompt.tokens
        if not tokens.size:  # as llama-server does
            handle.put(Done("limit", "", Timings(0, 0, 0.0, 0, 0.0, 0.0, 0.0), RequestStats(0), max(request.seq, 0)))
            return handle
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._info.n_vocab:
            raise RequestError(f"token ids must be in [0, {self._info.n_vocab})")
        self._inbox.put(handle)
        return handle

    def check(self, sampling: Sampling) -> None:
        """Raise RequestError for a grammar that cannot be compiled; may take a second, but not of the engine's time."""
        self._engine.backend.check(sampling)

    def call(self, function: Callable[[], R], *, needs_model: bool = False) -> Future[R]:
        """Run ``function`` on the engine's thread, between two steps; cancelled if the worker closes first.

        With ``needs_model`` it is work: a sleeping engine is woken for it. Otherwise the engine may be asleep.
        """
        future: Future[R] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        def fail(error: Exception | None) -> None:
            if error is None:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._inbox.put(_Call(run, fail, needs_model))
        return future

    def close(self, timeout: float | None = None) -> None:
        """Stop after the current step; requests that are not done end with UnavailableError. Idempotent.

        Waits ``timeout`` seconds at most, by default as long as the engine may take to close and a margin for the step.
        """
        if timeout is None:
            timeout = self._engine.close_seconds + STEP_SECONDS
        if not self._closing:
            self._closing = True
            self._inbox.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        busy = False
        while True:
            if busy and self._inbox.empty():
                busy = self._engine.step()
                if not busy:
                    self._last_work = time.monotonic()
                continue
            try:
                item = self._inbox.get(timeout=None if busy else self._until_sleep())
            except queue.Empty:
                self._engine.sleep()
                continue
            if item is None:
                break
            busy = self._take(item) or busy
        reason = UnavailableError("the server is shutting down")
        self._engine.close(reason)
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, RequestHandle):
                item.put(Failed(reason))
            elif item is not None:
                item.fail(None)
        self._engine.backend.unload()

    def _take(self, item: RequestHandle | _Call) -> bool:
        """Begin with ``item``; returns whether the engine has work to do."""
        if isinstance(item, _Call) and not item.needs_model:
            item.run()
            return False
        try:
            self._engine.wake()
        except Exception as error:
            log.error("the model cannot be loaded again: %s", error)
            reason = UnavailableError(f"the model cannot be loaded again: {error}")
            if isinstance(item, RequestHandle):
                item.put(Failed(reason))
            else:
                item.fail(reason)
            return False
        self._last_work = time.monotonic()
        if isinstance(item, RequestHandle):
            self._engine.submit(item)
        else:
            item.run()
        return True

    def _until_sleep(self) -> float | None:
        """Seconds until the model is freed, None for not."""
        if self._sleep_seconds < 0 or self._engine.asleep:
            return None
        return max(self._last_work + self._sleep_seconds - time.monotonic(), 0.0)
