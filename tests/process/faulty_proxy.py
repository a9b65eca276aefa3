"""A proxy in front of an HTTP server that changes answers as a test says: other bytes, bodies held
or cut.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["Answer", "FaultyProxy", "faulty_proxy"]

OF_CONNECTION = (
    "connection",
    "content-length",
    "date",
    "keep-alive",
    "server",
    "transfer-encoding",
)


@dataclass(frozen=True)
class Answer:
    """An answer of the proxy, to a request of ``method`` and ``path``, with its query.

    ``promised`` is the Content-Length, if that is a lie. A body that ``is_held`` stops in its
    middle until the proxy's gate opens.
    """

    method: str
    path: str
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    promised: int | None = None
    is_held: bool = False


@dataclass
class FaultyProxy:
    """Forwards to ``port`` and answers with what ``fault`` makes of each answer; `held` is set
    while a body waits.
    """

    port: int
    fault: Callable[[Answer], Answer] = lambda answer: answer
    asked: list[str] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def fetch(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Return the answer of the server behind the proxy; OSError or HTTPException without
        one.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            told = ((name.lower(), value) for name, value in response.getheaders())
            kept = tuple(each for each in told if each[0] not in OF_CONNECTION)
            return Answer(method, path, response.status, response.read(), kept)
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.proxy.asked.append(f"{self.command} {self.path}")
        headers = {
            name: value for name, value in self.headers.items() if name.lower() not in OF_CONNECTION
        }
        try:
            self._send(self.proxy.fault(self.proxy.fetch(self.command, self.path, body, headers)))
        except (OSError, http.client.HTTPException):  # the server or the client is gone
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def _send(self, answer: Answer) -> None:
        length = len(answer.body) if answer.promised is None else answer.promised
        self.send_response(answer.status)
        for name, value in (*answer.headers, ("content-length", str(length))):
            self.send_header(name, value)
        self.end_headers()
        first = len(answer.body) // 2 if answer.is_held else len(answer.body)
        self.wfile.write(answer.body[:first])
        self.wfile.flush()
        if answer.is_held:
            self.proxy.held.set()
            assert self.proxy.gate.wait(120)
            self.wfile.write(answer.body[first:])
        self.close_connection = length != len(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        return


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False


@contextmanager
def faulty_proxy(port: int) -> Iterator[FaultyProxy]:
    """Yield a proxy in front of the server at ``port`` of this machine, on a port of its own."""
    proxy = FaultyProxy(port)
    with _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": proxy})) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        thread.start()
        try:
            yield proxy
        finally:
            proxy.gate.set()
            server.shutdown()
            thread.join(60)
