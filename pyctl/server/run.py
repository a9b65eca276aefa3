"""The run of a server: serving, signals and the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from pyctl.errors import ConfigError
from pyctl.server.guard import ConnectionGuard, GuardedHttpProtocol, raise_file_limit
from pyctl.server.server_settings import ListenSettings
from pyctl.settings.limit import limit

__all__ = ["exit_process", "serve"]

log = logging.getLogger("pyctl")

BACKLOG = limit(
    512, "connections that wait to be accepted", "the client's system retries", "connection"
)

HANDSHAKE_SECONDS = limit(10.0, "a TLS handshake", "closed", "connection", "s")

DRAIN_SECONDS = 3.0
"""The time that connections may take to end after the last reply."""

JOIN_SECONDS = 10.0
"""The time that loading may take to stop."""

END_SECONDS = limit(
    60.0, "the stop of the server after a signal or a failure", "exit code 1", "process", "s"
)

AGAIN_SECONDS = 0.5
"""A signal that comes sooner after the first is the same one, sent to a group and passed on by a
parent.
"""


def serve(
    app: ASGIApp,
    sockets: list[socket.socket],
    listen: ListenSettings,
    *,
    grace_seconds: float = 2.0,
    on_ready: Callable[[], None] = lambda: None,
    on_stop: Callable[[], object] | None = None,
) -> None:
    """Serve ``app`` on ``sockets``, which are bound; return after SIGTERM, SIGINT, or SIGHUP unless
    it is ignored.

    ``on_ready`` is called as soon as requests are taken, on a separate thread, and may last as long
    as the server. An error of it before a signal comes ends the server and is raised here. After a
    signal running replies have ``grace_seconds`` to end; then ``on_stop`` is called, on a separate
    thread, and must make the rest end, ``on_ready`` included. A second signal ends the process at
    once, and so does an end that takes too long, both with exit code 1. Raises ConfigError if the
    certificate of ``listen`` cannot be used.
    """
    maximum = raise_file_limit(listen.max_connections)
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        ssl_keyfile=listen.ssl_key_file or None,
        ssl_certfile=listen.ssl_cert_file or None,
        timeout_graceful_shutdown=int(grace_seconds + 2 * DRAIN_SECONDS),
    )
    try:
        for path in filter(None, (listen.ssl_cert_file, listen.ssl_key_file)):
            Path(path).read_bytes()  # unlike ssl's, the error names the file
        config.load()
    except ssl.SSLError as error:
        files = f"--ssl-cert-file {listen.ssl_cert_file} with --ssl-key-file {listen.ssl_key_file}"
        raise ConfigError(f"{files}: not a PEM certificate with its key") from error
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error
    server = _Server(config, ConnectionGuard(maximum), grace_seconds, on_ready, on_stop)
    with server.signals():
        try:
            server.run(sockets)
            server.join()
        finally:
            server.timer.cancel()


def exit_process(code: int) -> int:
    """End the process, and wait for no thread that still works; logged and printed lines get
    out.
    """
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


class _Server(uvicorn.Server):
    """The server of uvicorn, which after a signal returns to its caller, and ends running replies
    in good order.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        guard: ConnectionGuard,
        grace_seconds: float,
        begin: Callable[[], None],
        on_stop: Callable[[], object] | None,
    ) -> None:
        """Prepare the thread that calls ``begin`` and the timer that ends a process whose shutdown
        takes too long.
        """
        super().__init__(config)
        self._guard = guard
        self._grace_seconds = grace_seconds
        self._begin = begin
        self._on_stop = on_stop
        self._beginning = threading.Thread(target=self._run_begin, name="pyctl-watch", daemon=True)
        self._failure: BaseException | None = None
        self._signalled_at = 0.0
        self.timer = threading.Timer(END_SECONDS, _too_late)
        self.timer.daemon = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        # Unlike asyncio.run it waits for no thread of a pool, which may still be at work.
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(self._guard.failed)
        try:
            loop.run_until_complete(self._serve(sockets))
            loop.run_until_complete(_cancel_rest())
        finally:
            loop.close()

    def join(self) -> None:
        """Wait for the thread that started; raise its exception."""
        if self._beginning.ident is not None:
            self._beginning.join(JOIN_SECONDS)
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Stop on a signal. uvicorn would raise it again in the end, and kill the work that the
        caller still has to do.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as below nohup
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._signalled_at:
            self._signalled_at = now
            if not self.should_exit:
                self._end()
        elif now - self._signalled_at > AGAIN_SECONDS:
            log.error("second signal: exiting at once; pending cache writes are lost")
            exit_process(1)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        config = self.config
        self.servers = [
            await loop.create_server(
                partial(GuardedHttpProtocol, self._guard, config, self.server_state),
                sock=sock,
                ssl=config.ssl,
                backlog=BACKLOG,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if config.ssl else None,
            )
            for sock in sockets or ()
        ]
        self.started = True
        self._beginning.start()

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            self._guard.close_slow_clients(self.server_state.connections)
        return await super().on_tick(counter)

    def _end(self) -> None:
        """End in good order, or at once if that takes too long."""
        self.should_exit = True
        self.timer.start()

    def _run_begin(self) -> None:
        try:
            self._begin()
        except BaseException as error:
            if not self.should_exit:
                self._failure = error
                self._end()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.ensure_future(self._stop_replies())
        await super().shutdown(sockets)
        await stopping

    async def _stop_replies(self) -> None:
        await self._until_served(self._grace_seconds)
        stopped = _on_thread(self._on_stop) if self._on_stop is not None else None
        await self._until_served(DRAIN_SECONDS)
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()  # a client that neither sends nor takes anything
        if stopped is not None:
            await stopped

    async def _until_served(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while self.server_state.tasks and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)


def _too_late() -> None:
    log.critical("the server did not end within %.0f s: unwritten snapshots are lost", END_SECONDS)
    exit_process(1)


def _on_thread(function: Callable[[], object]) -> asyncio.Future[None]:
    """Call ``function`` on a new daemon thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            function()
        except Exception:
            log.exception("shutdown failed")
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is gone
                loop.call_soon_threadsafe(done.set_result, None)

    threading.Thread(target=run, name="pyctl-stop", daemon=True).start()
    return done


async def _cancel_rest() -> None:
    """Cancel the tasks that remain, as asyncio.run does."""
    rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in rest:
        task.cancel()
    if rest:  # asyncio.wait refuses an empty list
        await asyncio.wait(rest, timeout=DRAIN_SECONDS)
