"""Connections and their limits: how many there are, and how slow a client may be."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from h11._writers import ChunkedWriter
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from pyctl.settings.limit import limit

__all__ = ["ConnectionGuard", "GuardedHttpProtocol", "raise_file_limit"]

log = logging.getLogger("pyctl")

HEAD_SECONDS = limit(
    20.0,
    "sending a request's head, counted from the connection or its first byte",
    "closed, 408",
    "connection",
    "s",
)

KEPT_SECONDS = limit(75.0, "an idle connection after a reply", "closed", "connection", "s")
"""Longer than clients keep one (httpx 5 s, aiohttp 15, nginx 60): whose end closes first must not
matter to a request that is on its way.
"""

BODY_SECONDS = limit(
    60.0, "sending a body, besides the time for its bytes", "closed, 408", "connection", "s"
)

BODY_RATE = limit(
    4096,
    "rate of a body that takes longer than that",
    "closed, 408",
    "connection",
    "bytes a second",
)

WRITE_SECONDS = limit(300.0, "a client that does not read its reply", "closed", "connection", "s")

RESET_SECONDS = 0.05
"""The time from the end of a client's sending to the first check for its reset;
`ConnectionGuard.close_slow_clients` makes the next ones.
"""

OWN_FILES = 128
"""Open files that are not connections: the cache, the model, the log."""

MAX_FILES = 2**16

CLOSE_HEADER = (b"connection", b"close")
"""The header of a request that makes the response the last of its connection."""

LINE_SECONDS = 10.0
"""The minimum time between two lines of the log about the same trouble."""


def raise_file_limit(max_connections: int) -> int:
    """Allow this process as many open files as the system lets it; return the connections that this
    allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_files = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < n_files:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (n_files, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    possible = max_connections if soft == resource.RLIM_INFINITY else max(soft - OWN_FILES, 8)
    if possible < max_connections:
        log.warning(
            "--max-connections is %d instead of %d: the limit of open files is %d",
            possible,
            max_connections,
            soft,
        )
    return min(possible, max_connections)


class ConnectionGuard:
    """The guard of all connections. It records when each one started to send its head or its body,
    and closes those that take too long.

    Of ``maximum`` connections at once, one that has sent no request yet makes room for a new one,
    the oldest first; if all have, the new one gets 503.
    """

    def __init__(self, maximum: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without connections; ``clock`` gives monotonic seconds."""
        self.maximum = maximum
        self._heads: dict[
            GuardedHttpProtocol, None
        ] = {}  # those whose head is awaited, the oldest first
        self._clock = clock
        self._last_look = clock()
        self._next_line = 0.0
        self._n_unsaid = 0

    def admit(self, connection: GuardedHttpProtocol) -> bool:
        """Return whether there is room for ``connection``, if need be after closing another one."""
        if len(connection.connections) <= self.maximum:
            return True
        if not self._heads:
            self.warn_throttled(
                "no more than %d connections (--max-connections): a client gets 503", self.maximum
            )
            return False
        self.warn_throttled(
            "no more than %d connections (--max-connections): one that sends nothing is closed",
            self.maximum,
        )
        connection_out = next(iter(self._heads))
        self.drop(connection_out)
        connection.connections.discard(connection_out)
        connection_out.transport.abort()
        return True

    def awaits_head(self, connection: GuardedHttpProtocol) -> None:
        """Note that the next bytes from ``connection`` are a head."""
        self._heads.pop(connection, None)
        self._heads[connection] = None

    def drop(self, connection: GuardedHttpProtocol) -> None:
        """Note that no head is awaited from ``connection`` any longer."""
        self._heads.pop(connection, None)

    def close_slow_clients(self, connections: set[Any]) -> None:
        """Close connections that take too long; to be called every second or so."""
        now = self._clock()
        passed = min(now - self._last_look, 5.0)
        self._last_look = now
        for connection in tuple(connections):
            connection.check(passed, now)

    def warn_throttled(self, text: str, *args: object) -> None:
        """Log a warning, but of several within some seconds only the first."""
        now = self._clock()
        if now < self._next_line:
            self._n_unsaid += 1
            return
        more = f" ({self._n_unsaid} more such lines were left out)" if self._n_unsaid else ""
        self._next_line = now + LINE_SECONDS
        self._n_unsaid = 0
        log.warning(text + "%s", *args, more)

    def failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle the event loop's exceptions that no task waits for: a refused connection gets one
        short line.
        """
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (
            errno.EMFILE,
            errno.ENFILE,
            errno.ENOBUFS,
            errno.ENOMEM,
        ):
            self.warn_throttled("a connection cannot be taken: %s", error.strerror)
        else:
            loop.default_exception_handler(context)


def _has_two_lengths(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether a request has Content-Length and Transfer-Encoding, and is not yet marked to
    be the last.

    RFC 9112, 6.3: the second counts, and the connection is closed after the response.
    """
    return {b"content-length", b"transfer-encoding"} <= {
        name for name, _ in headers
    } and CLOSE_HEADER not in headers


class StreamConnection(h11.Connection):
    """h11's connection, without its state machine for the parts of a chunked body, which do not
    change the state: a stream has a part for each token.
    """

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        writer = self._writer
        if type(event) is not h11.Data or type(writer) is not ChunkedWriter:
            return super().send(event)
        pieces: list[bytes] = []
        writer.send_data(event.data, pieces.append)
        return b"".join(pieces)


class GuardedHttpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, watched by ``guard``."""

    def __init__(self, guard: ConnectionGuard, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self.conn = StreamConnection(h11.SERVER)
        # uvicorn only adds it to a time.
        self.timeout_keep_alive = KEPT_SECONDS  # type: ignore[assignment]
        self._guard = guard
        self._phase: Any = None
        self._since = 0.0
        self._waited = 0.0
        self._n_bytes = 0
        self._unsent = 0
        self._stuck = 0.0
        self._is_half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._guard.admit(self):
            self._update_phase()
        else:
            self._answer(503, "too many connections", retry=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.drop(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is h11.IDLE and not self.conn.trailing_data[0]:
            data = data.lstrip(b"\r\n")  # empty lines before a request (RFC 9112, section 2.2)
            if not data:
                return
        if self._is_kept():
            self._since = time.monotonic()
            self._waited = 0.0
        self._n_bytes += len(data)
        super().data_received(data)
        self._update_phase()

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn's closes every connection
        """Keep the connection if the client, which sends no more, may still read the reply that it
        awaits.

        A client that is gone looks the same until something is written to it: its system answers by
        a reset. 100 (Continue), which clients skip, is written for that. Once the reply has
        started, its client counts as gone; HTTP/1.0 has no such status, and asyncio cannot keep
        half of TLS.
        """
        is_whole = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE)
        awaits = self.cycle is not None and not self.cycle.response_started
        if (
            not (is_whole and awaits)
            or self.conn.their_http_version != b"1.1"
            or self.scheme == "https"
        ):
            return False
        self._is_half_closed = True
        proceed = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
        self.transport.write(self.conn.send(proceed) or b"")
        self.loop.call_later(RESET_SECONDS, self._check_reset)
        return True

    def handle_events(self) -> None:
        super().handle_events()
        # A proxy in front may have seen another end of such a request: the bytes after it on the
        # connection are not served.
        if self.cycle is not None and _has_two_lengths(self.headers):
            self.headers.append(CLOSE_HEADER)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if (
            self._is_half_closed and self.conn.their_state is h11.IDLE
        ):  # no pipelined request is left
            self.transport.close()
        self._update_phase()

    def check(self, passed: float, now: float) -> None:
        """Close the connection if its client took too long, or is gone: ``passed`` more seconds
        until ``now``.
        """
        self._check_reset()
        self._check_write(passed)
        if self.transport.is_closing() or self.flow.read_paused:
            return  # we do not read: the client waits for us
        self._waited += min(
            passed, now - self._since
        )  # the awaited thread may have started since the last look
        if self._is_kept():
            return  # uvicorn closes it after KEPT_SECONDS
        if self._phase is h11.IDLE and self._waited > HEAD_SECONDS:
            self._end(self._n_bytes > 0)
        elif (
            self._phase is h11.SEND_BODY and self._waited > BODY_SECONDS + self._n_bytes / BODY_RATE
        ):
            self._guard.warn_throttled(
                "a body arrived too slowly: %d bytes in %.0f s", self._n_bytes, self._waited
            )
            self._end(not (self.cycle.response_started or self.cycle.response_complete))
        elif self._phase in (h11.ERROR, h11.CLOSED) and self._waited > HEAD_SECONDS:
            self.transport.abort()

    def _is_kept(self) -> bool:
        """Return whether a request was answered, and no byte of another one has arrived."""
        return self._phase is h11.IDLE and self.cycle is not None and not self.conn.trailing_data[0]

    def _check_reset(self) -> None:
        """Close a half-closed connection if its client has reset it, which asyncio does not
        notice.
        """
        if not self._is_half_closed or self.transport.is_closing():
            return
        sock = self.transport.get_extra_info("socket")
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()

    def _check_write(self, passed: float) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._stuck = self._stuck + passed if unsent and unsent >= self._unsent > 0 else 0.0
        self._unsent = unsent
        if self._stuck > WRITE_SECONDS:
            self._guard.warn_throttled("a client took nothing of its reply for %.0f s", self._stuck)
            self.transport.abort()

    def _update_phase(self) -> None:
        """Note the phase that the connection is in now."""
        phase = self.conn.their_state
        if phase is self._phase:
            return
        self._phase = phase
        self._since = time.monotonic()
        self._waited = 0.0
        self._n_bytes = 0
        if phase is h11.IDLE:
            self._guard.awaits_head(self)
        else:
            self._guard.drop(self)

    def _end(self, told: bool) -> None:
        if told:
            self._answer(408, "the request did not arrive in time")
        else:
            self.transport.abort()

    def _answer(self, status: int, message: str, *, retry: bool = False) -> None:
        """Send the reason, whatever HTTP had started, and close."""
        kind = "unavailable_error" if status == 503 else "invalid_request_error"
        body = json.dumps({"error": {"code": status, "message": message, "type": kind}}).encode()
        phrase = "Service Unavailable" if status == 503 else "Request Timeout"
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\ncontent-length: "
            f"{len(body)}\r\n"
        )
        head += "retry-after: 5\r\n" if retry else ""
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()
