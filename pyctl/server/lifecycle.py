"""The lifecycle of a server: addresses, connections and their limits, loading, serving, and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from pyctl.errors import ConfigError
from pyctl.limit import limit
from pyctl.server import ListenSettings

__all__ = ["ConnectionGuard", "GuardedProtocol", "LoadingApp", "bind", "leave", "serve"]

log = logging.getLogger("pyctl")

# -- addresses ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bind(hosts: Sequence[str] = ("127.0.0.1",), port: int = 8080) -> Iterator[list[socket.socket]]:
    """Take the addresses ``hosts`` (UNIX sockets where they end in .sock) and ``port``, for the time of the block.

    Port 0 is any free one, the same for all. Until the server listens, clients are refused; at UNIX sockets they wait.
    Raises ConfigError if an address cannot be had.
    """
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for host in hosts:
            try:
                if host.endswith(".sock"):
                    sock = stack.enter_context(contextlib.closing(_bind_unix(host)))
                    stack.callback(_unlink, host, _identity(host))
                else:
                    sock = stack.enter_context(contextlib.closing(_bind(host, port, only_v6=len(hosts) > 1)))
                    port = sock.getsockname()[1]
            except (OSError, OverflowError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
            sockets.append(sock)
        yield sockets


def _bind(host: str, port: int, *, only_v6: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and only_v6:  # else "::" takes the port of 0.0.0.0, too
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.lexists(path):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise OSError(errno.EEXIST, "a file of that name exists")
            if _is_alive(path):
                raise OSError(errno.EADDRINUSE, "the address is in use")
            os.unlink(path)  # left by a server that was killed
        sock.bind(path)
        sock.listen()  # at once: clients take a closed port for a dead server
    except BaseException:
        sock.close()
        raise
    return sock


def _is_alive(path: str) -> bool:
    """Whether a server listens at the socket ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except BlockingIOError:  # it has a queue, and that is full
            return True
        except PermissionError:
            return True
        except OSError:
            return False
        return True


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


def _unlink(path: str, identity: tuple[int, int]) -> None:
    """Remove the socket ``path`` if it is still the one that was made here."""
    with contextlib.suppress(OSError):
        if _identity(path) == identity:
            os.unlink(path)


def address_of(sockets: Sequence[socket.socket], scheme: str) -> str:
    """For people: the addresses of ``sockets``, separated by commas."""
    return ", ".join(_address(sock, scheme) for sock in sockets)


def _address(sock: socket.socket, scheme: str) -> str:
    name = sock.getsockname()
    if isinstance(name, str):
        return f"unix://{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{scheme}://{host}:{name[1]}"


# -- connections -------------------------------------------------------------------------------------------------------

HEAD_SECONDS = limit(
    20.0, "sending a request's head, counted from the connection or its first byte", "closed, 408", "connection", "s"
)

KEPT_SECONDS = limit(75.0, "an idle connection after a reply", "closed", "connection", "s")
"""Longer than clients keep one (httpx 5 s, aiohttp 15, nginx 60): whose end closes first must not matter to a request
that is on its way."""

BODY_SECONDS = limit(60.0, "sending a body, in addition to the time for its bytes", "closed, 408", "connection", "s")

BODY_RATE = limit(4096, "slowest body after that time", "closed, 408", "connection", "bytes a second")

WRITE_SECONDS = limit(300.0, "a client that does not read its reply", "closed", "connection", "s")

OWN_FILES = 128
"""Open files that are not connections: the cache, the model, the log."""

MAX_FILES = 2**16

LINE_SECONDS = 10.0
"""Between two lines of the log about the same trouble."""


def raise_file_limit(max_connections: int) -> int:
    """Let this process have as many open files as it may; returns how many connections that allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    possible = max_connections if soft == resource.RLIM_INFINITY else max(soft - OWN_FILES, 8)
    if possible < max_connections:
        log.warning(
            "--max-connections is %d instead of %d: the limit of open files is %d", possible, max_connections, soft
        )
    return min(possible, max_connections)


class ConnectionGuard:
    """Knows since when each connection has been sending its head or its body, and closes those that take too long.

    Of ``most`` connections at once, one that has sent no request yet makes room for a new one, the oldest first; if
    all have, the new one gets 503.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._heads: dict[GuardedProtocol, None] = {}  # those whose head is awaited, the oldest first
        self._last_look = time.monotonic()
        self._next_line = 0.0
        self._n_unsaid = 0

    def admit(self, connection: GuardedProtocol) -> bool:
        """Whether there is room for ``connection``, perhaps because another one was closed."""
        if len(connection.connections) <= self.most:
            return True
        if not self._heads:
            self.say("no more than %d connections (--max-connections): a client gets 503", self.most)
            return False
        self.say("no more than %d connections (--max-connections): one that says nothing is closed", self.most)
        connection_out = next(iter(self._heads))
        self.drop(connection_out)
        connection.connections.discard(connection_out)
        connection_out.transport.abort()
        return True

    def awaits_head(self, connection: GuardedProtocol) -> None:
        """The next thing that comes from ``connection`` is a head."""
        self._heads.pop(connection, None)
        self._heads[connection] = None

    def drop(self, connection: GuardedProtocol) -> None:
        """It is no longer a head that is awaited of ``connection``."""
        self._heads.pop(connection, None)

    def look(self, connections: set[Any]) -> None:
        """Close what takes too long; to be called every second or so."""
        now = time.monotonic()
        passed, self._last_look = min(now - self._last_look, 5.0), now
        for connection in tuple(connections):
            connection.check(passed, now)

    def say(self, text: str, *args: object) -> None:
        """Log a warning, of all that come within some seconds only the first."""
        now = time.monotonic()
        if now < self._next_line:
            self._n_unsaid += 1
            return
        more = f" ({self._n_unsaid} more such lines were left out)" if self._n_unsaid else ""
        self._next_line, self._n_unsaid = now + LINE_SECONDS, 0
        log.warning(text + "%s", *args, more)

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's handler of exceptions that no task waits for: a refused connection is one thin line."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            self.say("a connection cannot be taken: %s", error.strerror)
        else:
            loop.default_exception_handler(context)


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, watched by ``guard``."""

    def __init__(self, guard: ConnectionGuard, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self.timeout_keep_alive = KEPT_SECONDS  # type: ignore[assignment]  # uvicorn only adds it to a time
        self._guard = guard
        self._phase: Any = None
        self._since, self._waited = 0.0, 0.0
        self._n_bytes = 0
        self._unsent, self._stuck = 0, 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._guard.admit(self):
            self._note()
        else:
            self._answer(503, "too many connections", retry=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.drop(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_kept():
            self._since, self._waited = time.monotonic(), 0.0
        self._n_bytes += len(data)
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def check(self, passed: float, now: float) -> None:
        """``passed`` more seconds until ``now``: close the connection if its client took too many."""
        self._check_write(passed)
        if self.transport.is_closing() or self.flow.read_paused:
            return  # we do not read: the client waits for us
        self._waited += min(passed, now - self._since)  # what is awaited may have begun since the last look
        if self._is_kept():
            return  # uvicorn closes it after KEPT_SECONDS
        if self._phase is h11.IDLE and self._waited > HEAD_SECONDS:
            self._end(self._n_bytes > 0)
        elif self._phase is h11.SEND_BODY and self._waited > BODY_SECONDS + self._n_bytes / BODY_RATE:
            self._guard.say("a body came too slowly: %d bytes in %.0f s", self._n_bytes, self._waited)
            self._end(not (self.cycle.response_started or self.cycle.response_complete))
        elif self._phase in (h11.ERROR, h11.CLOSED) and self._waited > HEAD_SECONDS:
            self.transport.abort()

    def _is_kept(self) -> bool:
        """Whether a request was answered, and nothing of another one has come."""
        return self._phase is h11.IDLE and self.cycle is not None and not self.conn.trailing_data[0]

    def _check_write(self, passed: float) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._stuck = self._stuck + passed if unsent and unsent >= self._unsent > 0 else 0.0
        self._unsent = unsent
        if self._stuck > WRITE_SECONDS:
            self._guard.say("a client took nothing of its reply for %.0f s", self._stuck)
            self.transport.abort()

    def _note(self) -> None:
        """Note the phase that the connection is in now."""
        phase = self.conn.their_state
        if phase is self._phase:
            return
        self._phase, self._since, self._waited, self._n_bytes = phase, time.monotonic(), 0.0, 0
        if phase is h11.IDLE:
            self._guard.awaits_head(self)
        else:
            self._guard.drop(self)

    def _end(self, told: bool) -> None:
        if told:
            self._answer(408, "the request did not come in time")
        else:
            self.transport.abort()

    def _answer(self, status: int, message: str, *, retry: bool = False) -> None:
        """Say why, past whatever HTTP had begun, and close."""
        kind = "unavailable_error" if status == 503 else "invalid_request_error"
        body = json.dumps({"error": {"code": status, "message": message, "type": kind}}).encode()
        phrase = "Service Unavailable" if status == 503 else "Request Timeout"
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head += "retry-after: 5\r\n" if retry else ""
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


HELD_SECONDS = limit(600.0, "a request that waits for the model to be loaded", "503 with Retry-After", "request", "s")

MOST_HELD = limit(256, "requests that wait for the model to be loaded", "503 with Retry-After", "process")


class LoadingApp:
    """Passes requests to one application until `open`, and to another from then on.

    An earlier POST is held until then, up to ``seconds``, since client libraries try again only twice. A GET is
    answered at once. `open` and `close` are thread-safe.
    """

    def __init__(self, loading: ASGIApp, seconds: float = HELD_SECONDS) -> None:
        self._app, self._seconds = loading, seconds
        self._lock = threading.Lock()  # guards what follows
        self._is_waiting = True
        self._held: set[asyncio.Future[None]] = set()

    def open(self, app: ASGIApp) -> None:
        """Let requests through to ``app``."""
        self._app = app
        self.close()

    def close(self) -> None:
        """Hold no request any more."""
        with self._lock:
            self._is_waiting, held = False, tuple(self._held)
        for waiting in held:
            with contextlib.suppress(RuntimeError):  # the loop is gone
                waiting.get_loop().call_soon_threadsafe(_release, waiting)

    async def _hold(self) -> None:
        """Wait until requests are held no more, or for so long."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if not self._is_waiting or len(self._held) >= MOST_HELD:
                return
            self._held.add(waiting)
        try:
            await asyncio.wait((waiting,), timeout=self._seconds)
        finally:
            with self._lock:
                self._held.discard(waiting)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._is_waiting and scope["type"] == "http" and scope["method"] == "POST":
                await self._hold()
            await self._app(scope, receive, send)
        except asyncio.CancelledError:  # only at the very end: requests are not cancelled before
            log.warning("%s: abandoned, the server is shutting down", scope.get("path", ""))


def _release(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


BACKLOG = limit(512, "connections that wait to be accepted", "the client's system retries", "connection")

HANDSHAKE_SECONDS = limit(10.0, "a TLS handshake", "closed", "connection", "s")

DRAIN_SECONDS = 3.0
"""How long connections may take to end when nothing is being served any more."""

JOIN_SECONDS = 10.0
"""How long loading may take to stop."""

END_SECONDS = limit(60.0, "the stop of the server after a signal or a failure", "exit code 1", "process", "s")

AGAIN_SECONDS = 0.5
"""A signal that comes sooner after the first is the same one, sent to a group and passed on by a parent."""


def serve(
    app: ASGIApp,
    sockets: list[socket.socket],
    listen: ListenSettings,
    *,
    grace_seconds: float = 2.0,
    on_ready: Callable[[str], None] = lambda address: None,
    on_stop: Callable[[], object] | None = None,
) -> None:
    """Serve ``app`` on ``sockets``, which are bound; return after SIGTERM, SIGINT, or SIGHUP unless it is ignored.

    ``on_ready`` gets the address as soon as requests are taken, on a thread of its own, and may last as long as the
    server. An error of it before a signal comes ends the server and is raised here. After a signal running replies have
    ``grace_seconds`` to end; then ``on_stop`` is called, on a thread of its own, and must make the rest end,
    ``on_ready`` included. A second signal ends the process at once, and so does an end that takes too long, both with
    exit code 1. Raises ConfigError if the certificate of ``listen`` cannot be used.
    """
    most = raise_file_limit(listen.max_connections)
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
    address = address_of(sockets, "https" if listen.ssl_cert_file else "http")
    server = _Server(config, ConnectionGuard(most), grace_seconds, lambda: on_ready(address), on_stop)
    with server.signals():
        try:
            server.run(sockets)
            server.join()
        finally:
            server.timer.cancel()


def leave(code: int) -> int:
    """End the process, and wait for no thread that still does something; what was logged and printed gets out."""
    with contextlib.suppress(Exception):
        logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


class _Server(uvicorn.Server):
    """uvicorn's server, which after a signal lets its caller go on, and ends running replies in good order."""

    def __init__(
        self,
        config: uvicorn.Config,
        guard: ConnectionGuard,
        grace_seconds: float,
        begin: Callable[[], None],
        on_stop: Callable[[], object] | None,
    ) -> None:
        super().__init__(config)
        self._guard = guard
        self._grace_seconds = grace_seconds
        self._begin = begin
        self._on_stop = on_stop
        self._beginning = threading.Thread(target=self._run_begin, name="pyctl-start", daemon=True)
        self._failure: BaseException | None = None
        self._ending_since = 0.0
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
        """Wait for the thread that began; raises what it raised."""
        if self._beginning.ident is not None:
            self._beginning.join(JOIN_SECONDS)
        if self._failure is not None:
            raise self._failure

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Stop on a signal. uvicorn would raise it again in the end, and kill what the caller still has to do."""
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
        if not self.should_exit:
            self._end()
        elif time.monotonic() - self._ending_since > AGAIN_SECONDS:
            log.error("second signal: exiting at once; pending cache writes are lost")
            leave(1)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        loop, config = asyncio.get_running_loop(), self.config
        self.servers = [
            await loop.create_server(
                lambda: GuardedProtocol(self._guard, config, self.server_state),
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
            self._guard.look(self.server_state.connections)
        return await super().on_tick(counter)

    def _end(self) -> None:
        """End in good order, or at once if that takes too long."""
        self._ending_since = time.monotonic()
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
    log.critical("the server did not end within %.0f s: what was not written to disk yet is lost", END_SECONDS)
    leave(1)


def _on_thread(function: Callable[[], object]) -> asyncio.Future[None]:
    """Have ``function`` called on a daemon thread."""
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
    """Cancel the tasks that are left over, as asyncio.run does."""
    rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in rest:
        task.cancel()
    await asyncio.wait(rest, timeout=DRAIN_SECONDS) if rest else None
