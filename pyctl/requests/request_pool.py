"""Threads for the work of requests outside of the engine, by lanes: reading them, fetching,
rendering, the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from pyctl.errors import BusyError, RequestError, UnavailableError
from pyctl.settings.limit import limit

__all__ = [
    "NOTHING",
    "Fetched",
    "FilesMissing",
    "Lane",
    "PostReplyQueue",
    "RequestPool",
    "client_left",
    "run_until_disconnect",
]

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_MAX_WAITING = limit(256, "requests that wait to be read", "503 with Retry-After", "process")
_MAX_SECONDS = limit(30.0, "time to read a request", "503", "request", "s")
_MAX_ABANDONED = limit(
    8, "requests beyond the time to read that still run", "503 with Retry-After", "process"
)
_MAX_POST_REPLY = limit(16, "replies that wait for prewarming", "the oldest are dropped", "process")
_IDLE_SECONDS = 10.0
_CLOSE_SECONDS = 2.0


Fetched: TypeAlias = Mapping[str, bytes]
"""The files at addresses that a request names."""

NOTHING: Fetched = MappingProxyType({})


class FilesMissing(RequestError):
    """The error of a request that needs files first: ``fetch`` gets those at ``addresses``, each
    with its place in the request.
    """

    def __init__(
        self, addresses: Mapping[str, str], fetch: Callable[[Mapping[str, str]], Fetched]
    ) -> None:
        super().__init__(f"{next(iter(addresses.values()))}: images are not fetched here")
        self.addresses = addresses
        self.fetch = fetch


class RequestPool:
    """The daemon threads for all work that is not the event loop's; the end of the process does not
    wait for them.

    There are as many as its lanes start: ``reading`` is for requests that are read, ``fetching``
    for other servers and for files of models, ``rendering`` for the page, ``storage`` for the
    directory of the cache. A thread that has had nothing to do for ``idle_seconds`` ends, the
    last one with a call of ``on_rest``. ``n_alive`` are the threads that have not ended.
    """

    def __init__(
        self, on_rest: Callable[[], object] = lambda: None, idle_seconds: float = _IDLE_SECONDS
    ) -> None:
        self.on_rest = on_rest
        self._idle_seconds = idle_seconds
        self._changed = threading.Condition()  # guards all below
        self._ready: deque[Callable[[], None]] = deque()
        self.n_alive = 0
        self._n_idle = 0
        self.reading = Lane(self)
        self.fetching = Lane(self, 4, max_waiting=64)
        self.rendering = Lane(self, 2, max_waiting=16)
        self.storage = Lane(self, 4, max_waiting=64, max_seconds=600.0)

    async def read(self, request: Request, function: Callable[[Fetched], R]) -> R:
        """Call ``function`` on a thread; again, with the fetched files, if it raised
        FilesMissing.
        """
        try:
            return await self.reading.run(request, function, NOTHING)
        except FilesMissing as missing:
            fetched = await self.fetching.run(request, missing.fetch, missing.addresses)
        return await self.reading.run(request, function, fetched)

    def start(self, function: Callable[[], None]) -> None:
        """Call ``function``, which raises nothing, on a thread. Callers limit how many run at a
        time.
        """
        with self._changed:
            self._ready.append(function)
            if (
                len(self._ready) <= self._n_idle
            ):  # those that were woken before count as idle until they run
                return self._changed.notify()
            self.n_alive += 1
            self._n_idle += 1
        threading.Thread(target=self._work, name="pyctl-request", daemon=True).start()

    def _work(self) -> None:
        while (function := self._next()) is not None:
            function()
            del function
            with self._changed:
                self._n_idle += 1

    def _next(self) -> Callable[[], None] | None:
        """Return the next function; None if this thread has to end, since there was none for some
        time.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ready, self._idle_seconds)
            self._n_idle -= 1
            if self._ready:
                return self._ready.popleft()
            self.n_alive -= 1
            is_last = self.n_alive == 0
        if is_last:
            self.on_rest()
        return None


class Lane:
    """A queue for one kind of work of requests, which takes no threads of ``pool`` from another
    kind.

    A function that exceeds its time is abandoned: its client gets an error, and another thread
    replaces its thread, up to a number of such. A client that disconnects before its turn frees its
    place in the queue.
    """

    def __init__(
        self,
        pool: RequestPool,
        n_threads: int = 0,
        max_waiting: int = _MAX_WAITING,
        max_seconds: float = _MAX_SECONDS,
    ) -> None:
        """Allow ``n_threads``; 0 stands for the number of processors plus two."""
        self._pool = pool
        self._n_threads = n_threads or min((os.cpu_count() or 1) + 2, 16)
        self._max_waiting = max_waiting
        self._max_seconds = max_seconds
        self._lock = threading.Lock()  # guards all below
        self._waiting: deque[_Job[Any]] = deque()
        self.n_running = self._n_abandoned = 0

    async def run(
        self, request: Request, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call ``function`` on a thread.

        Raises BusyError if too many wait, UnavailableError if it takes too long, ClientDisconnect
        if the client of ``request``, whose body has been read, has left.
        """
        job = _Job(lambda: function(*args, **kwargs), asyncio.get_running_loop())
        self._add(job)
        done = job.done
        leaving = asyncio.ensure_future(client_left(request.receive))
        assert done is not None
        ends: set[asyncio.Future[Any]] = {done, leaving}
        try:
            await asyncio.wait(ends, timeout=self._max_seconds, return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                raise ClientDisconnect
            if done.done():
                return done.result()
            raise UnavailableError(
                f"reading this request takes more than {self._max_seconds:g} seconds"
            )
        finally:
            leaving.cancel()
            done.cancel()
            self._forget(job)
            # An error holds the frames that it passed, and they the request: if one of them led
            # back to the error, the request's body would stay until the collector comes by.
            job.done = None
            del job, done, leaving, ends

    def _add(self, job: _Job[Any]) -> None:
        with self._lock:
            if len(self._waiting) >= self._max_waiting:
                raise BusyError(len(self._waiting))
            if self._n_abandoned >= _MAX_ABANDONED:
                raise BusyError(self._n_abandoned)
            self._waiting.append(job)
            self._start()

    def _start(self) -> None:
        """Start another thread for waiting functions, if one is allowed."""
        if self._waiting and self.n_running < self._n_threads:
            self.n_running += 1
            self._pool.start(self._work)

    def _forget(self, job: _Job[Any]) -> None:
        """Forget ``job``, which its request no longer awaits."""
        with self._lock:
            if job.state == "waiting":
                job.state = "over"
                self._waiting.remove(job)
            elif job.state == "running":
                job.state = "abandoned"
                self._n_abandoned += 1
                self.n_running -= 1
                self._start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            tell = job.run()
            with self._lock:
                was_abandoned = job.state == "abandoned"
                job.state = "over"
                self._n_abandoned -= was_abandoned
            job.resolve(tell)  # last: the loop drops a job at its end
            del job, tell
            if was_abandoned:
                return  # another thread runs in place of this one

    def _next(self) -> _Job[Any] | None:
        with self._lock:
            if not self._waiting:
                self.n_running -= 1
                return None
            job = self._waiting.popleft()
            job.state = "running"
            return job


class PostReplyQueue:
    """A lane of functions without results, one after the other.

    Of more than `_MAX_POST_REPLY` that wait the oldest are left out. Their errors are logged.
    """

    def __init__(self, pool: RequestPool, close_seconds: float = _CLOSE_SECONDS) -> None:
        self._pool = pool
        self._close_seconds = close_seconds
        self._changed = threading.Condition()  # guards the members below
        self._waiting: deque[Callable[[], object]] = deque(maxlen=_MAX_POST_REPLY)
        self._is_running = self.is_closed = False

    def add(self, function: Callable[[], object]) -> None:
        """Run ``function`` soon, unless it is closed."""
        with self._changed:
            if self.is_closed:
                return
            self._waiting.append(function)
            starts = not self._is_running
            self._is_running = True
        if starts:
            self._pool.start(self._work)

    def close(self) -> None:
        """Start no more functions; wait for the running one, which uses the vocabulary, while it
        renders.
        """
        with self._changed:
            self.is_closed = True
            self._waiting.clear()
            self._changed.wait_for(lambda: not self._is_running, self._close_seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                function = self._waiting.popleft()
            try:
                function()
            except Exception:
                log.exception("work in the background failed")


class _Job(Generic[R]):
    """A job of a thread: ``done`` belongs to the event loop, ``state`` to the pool: waiting,
    running, abandoned or over.
    """

    def __init__(self, function: Callable[[], R], loop: asyncio.AbstractEventLoop) -> None:
        self.state = "waiting"
        self.done: asyncio.Future[R] | None = loop.create_future()
        """None once the request no longer waits for it."""
        self._function = function
        self._loop = loop

    def run(self) -> Callable[[asyncio.Future[R]], None]:
        """Call the function; return the argument of `tell`."""
        try:
            result = self._function()
        except BaseException as error:
            return lambda done, error=error: done.set_exception(error)  # type: ignore[misc]
        return lambda done: done.set_result(result)

    def resolve(self, tell: Callable[[asyncio.Future[R]], None]) -> None:
        """Have the event loop end the job."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(self._end, tell)

    def _end(self, tell: Callable[[asyncio.Future[R]], None]) -> None:
        if self.done is not None and not self.done.done():
            tell(self.done)


async def client_left(receive: Receive) -> None:
    """Return when the client of a request, whose body has been read, has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_until_disconnect(receive: Receive, work: Awaitable[object]) -> bool:
    """Wait for ``work``, which is cancelled when the client disconnects; return whether it ended by
    itself.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(client_left(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait((task, gone))
    if not task.cancelled():
        task.result()
    return not task.cancelled()
