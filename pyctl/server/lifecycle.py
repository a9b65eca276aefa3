"""What clients get before the model is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from pyctl.errors import ConfigError, UnavailableError
from pyctl.server.http import error_response
from pyctl.server.middleware import CorsMiddleware
from pyctl.server.server_settings import Cors

__all__ = ["LoadingApp", "bind", "serve"]


class LoadingApp:
    """Answers everything with 503 until it is opened; from then on passes everything to an application.

    `open` may be called from any thread.
    """

    def __init__(self, cors: Cors) -> None:
        self._app: ASGIApp = CorsMiddleware(_loading, cors)

    def open(self, app: ASGIApp) -> None:
        """Let requests through to ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(UnavailableError("Loading model"))(scope, receive, send)


_BACKLOG = 2048

_DRAIN_SECONDS = 15


@contextlib.contextmanager
def bind(host: str = "127.0.0.1", port: int = 8080) -> Iterator[socket.socket]:
    """Take the address: ``host`` (a UNIX socket if it ends in .sock) and ``port`` (0: any), for the time of the block.

    Clients are refused until `serve` listens. Raises ConfigError if the address cannot be had.
    """
    try:
        sock = _bind_unix(host) if host.endswith(".sock") else _bind(host, port)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
    try:
        yield sock
    finally:
        sock.close()
        if host.endswith(".sock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(host)


def serve(
    app: ASGIApp,
    sock: socket.socket,
    *,
    ssl_key_file: str = "",
    ssl_cert_file: str = "",
    grace_seconds: float = 2.0,
    on_ready: Callable[[str], None] | None = None,
    on_stop: Callable[[], None] | None = None,
) -> None:
    """Serve ``app`` on ``sock``, a bound socket; return after SIGTERM or SIGINT.

    ``on_ready`` gets the address as soon as requests are taken, on a thread of its own, where it may take its time;
    what it raises before a signal comes ends the server and is raised here. After a signal running replies have
    ``grace_seconds`` to end; then ``on_stop`` is called, on a thread of its own, and must make the rest end,
    ``on_ready`` included. Raises ConfigError if the certificate cannot be used.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        backlog=_BACKLOG,
        ssl_keyfile=ssl_key_file or None,
        ssl_certfile=ssl_cert_file or None,
        timeout_graceful_shutdown=int(grace_seconds) + _DRAIN_SECONDS,
    )
    try:
        config.load()
    except OSError as error:
        raise ConfigError(f"cannot use the certificate: {error}") from error
    address = _address(sock, "https" if ssl_cert_file else "http")
    begin = (lambda: on_ready(address)) if on_ready is not None else None
    server = _Server(config, grace_seconds, begin, on_stop)
    server.run(sockets=[sock])
    server.join()


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise OSError(errno.EEXIST, "a file of that name exists")
            os.unlink(path)  # left behind by a server that was killed
        sock.bind(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _address(sock: socket.socket, scheme: str) -> str:
    name = sock.getsockname()
    if isinstance(name, str):
        return f"unix://{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{scheme}://{host}:{name[1]}"


class _Server(uvicorn.Server):
    """uvicorn's server, which after a signal lets its caller go on, and ends running replies in good order."""

    def __init__(
        self,
        config: uvicorn.Config,
        grace_seconds: float,
        begin: Callable[[], None] | None,
        on_stop: Callable[[], None] | None,
    ) -> None:
        super().__init__(config)
        self._grace_seconds = grace_seconds
        self._begin = begin
        self._on_stop = on_stop
        self._beginning: threading.Thread | None = None
        self._failure: BaseException | None = None

    def join(self) -> None:
        """Wait for the thread that began; raises what it raised."""
        if self._beginning is not None:
            self._beginning.join()
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal. uvicorn would raise it again in the end, and kill what the caller still has to do."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._begin is not None and self.started:
            self._beginning = threading.Thread(target=self._run_begin, name="pyctl-start", daemon=True)
            self._beginning.start()

    def _run_begin(self) -> None:
        assert self._begin is not None
        try:
            self._begin()
        except BaseException as error:
            if not self.should_exit:
                self._failure = error
                self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.ensure_future(self._stop_replies())
        await super().shutdown(sockets)
        await stopping

    async def _stop_replies(self) -> None:
        end = asyncio.get_running_loop().time() + self._grace_seconds
        while self.server_state.tasks and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.05)
        if self._on_stop is not None:
            await asyncio.to_thread(self._on_stop)
