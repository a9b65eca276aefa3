"""The thread that owns llama.cpp: takes requests from any thread and runs the engine until it is closed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from pyctl.engine.engine import Engine
from pyctl.engine.info import EngineInfo
from pyctl.engine.request import Failed, Request
from pyctl.engine.ticket import Ticket
from pyctl.errors import ContextSizeError, RequestError, UnavailableError

__all__ = ["Worker"]

R = TypeVar("R")


class _Call(NamedTuple):
    run: Callable[[], None]
    cancel: Callable[[], bool]


class Worker:
    """Runs ``engine`` on a thread of its own.

    `submit`, `call` and `close` may be called from any thread; everything else happens on the worker's.
    """

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self._engine = engine
        self._info = info
        self._inbox: queue.SimpleQueue[Ticket | _Call | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="pyctl-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        """Facts about the model and the context."""
        return self._info

    def submit(self, request: Request) -> Ticket:
        """Queue ``request``; iterate over the ticket for its events.

        Raises ContextSizeError when the prompt does not fit, RequestError for an empty one, UnavailableError after
        `close`.
        """
        n_ctx = self._info.n_ctx
        if self._closing:
            raise UnavailableError("the server is shutting down")
        if len(request.prompt) == 0:
            raise RequestError("the prompt is empty")
        if len(request.prompt) >= n_ctx:
            raise ContextSizeError(len(request.prompt), n_ctx)
        tokens = request.prompt.tokens
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._info.n_vocab:
            raise RequestError(f"token ids must be in [0, {self._info.n_vocab})")
        ticket = Ticket(request)
        self._inbox.put(ticket)
        return ticket

    def call(self, function: Callable[[], R]) -> Future[R]:
        """Run ``function`` on the engine's thread, between two steps; cancelled if the worker closes first."""
        future: Future[R] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self._inbox.put(_Call(run, future.cancel))
        return future

    def close(self, timeout: float = 10.0) -> None:
        """Stop after the current step; requests that are not done end with UnavailableError. Idempotent."""
        if not self._closing:
            self._closing = True
            self._inbox.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        busy = False
        while True:
            if busy and self._inbox.empty():
                busy = self._engine.step()
                continue
            item = self._inbox.get()
            if item is None:
                break
            if isinstance(item, Ticket):
                self._engine.submit(item)
                busy = True
            else:
                item.run()
        reason = UnavailableError("the server is shutting down")
        self._engine.close(reason)
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Ticket):
                item.put(Failed(reason))
            elif item is not None:
                item.cancel()
        self._engine.backend.close()
