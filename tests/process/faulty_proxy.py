"""A proxy in front of an HTTP server that changes answers as a test says: storms, bodies held or cut, other objects."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

__all__ = ["Answer", "Asked", "FaultyProxy", "faulty_proxy"]

MOST_BYTES = 2**26

OF_CONNECTION = ("connection", "content-length", "date", "keep-alive", "server", "transfer-encoding")


@dataclass(frozen=True)
class Asked:
    """A request: ``path`` without its query."""

    method: str
    path: str
    query: str = ""


@dataclass(frozen=True)
class Answer:
    """An answer of the proxy.

    ``promised`` is what Content-Length says, if that is a lie. From byte ``held_from`` on the body waits until the
    proxy's gate opens; it never comes if the proxy cuts it.
    """

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    promised: int | None = None
    held_from: int | None = None


@dataclass
class FaultyProxy:
    """Forwards to ``port`` and answers with what ``fault`` makes of each answer; `held` is set while a body waits."""

    port: int
    fault: Callable[[Asked, Answer], Answer] = lambda asked, answer: answer
    asked: list[Asked] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)
    waiting: list[object] = field(default_factory=list)  # whose bodies are held
    is_cut: bool = False
    url: str = ""

    def n_asked(self, method: str, ending: str) -> int:
        """Requests so far."""
        return sum(each.method == method and each.path.endswith(ending) for each in self.asked)

    def fetch(self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
        """The answer of the server behind the proxy; OSError or HTTPException without one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, target, body or None, headers or {})
            response = connection.getresponse()
            data = response.read(MOST_BYTES)
            told = ((name.lower(), value) for name, value in response.getheaders())
            return Answer(response.status, data, tuple(each for each in told if each[0] not in OF_CONNECTION))
        finally:
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultyProxy

    def handle_any(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        assert length <= MOST_BYTES
        body = self.rfile.read(length)
        split = urlsplit(self.path)
        asked = Asked(self.command, split.path, split.query)
        self.proxy.asked.append(asked)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in OF_CONNECTION}
        try:
            answer = self.proxy.fault(asked, self.proxy.fetch(self.command, self.path, body, headers))
            self._send(answer)
        except (OSError, http.client.HTTPException):  # the server or the client is gone
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def _send(self, answer: Answer) -> None:
        length = len(answer.body) if answer.promised is None else answer.promised
        self.send_response(answer.status)
        for name, value in answer.headers:
            self.send_header(name, value)
        self.send_header("content-length", str(length))
        self.end_headers()
        first = len(answer.body) if answer.held_from is None else answer.held_from
        self.wfile.write(answer.body[:first])
        self.wfile.flush()
        if answer.held_from is not None:
            self.proxy.held.set()
            self.proxy.waiting.append(self)
            assert self.proxy.gate.wait(120)
            self.proxy.waiting.remove(self)
            if self.proxy.is_cut:
                self.close_connection = True
                return
            self.wfile.write(answer.body[first:])
        self.close_connection = length != len(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        return


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False


@contextmanager
def faulty_proxy(port: int) -> Iterator[FaultyProxy]:
    """A proxy in front of the server at ``port`` of this machine, on a port of its own."""
    proxy = FaultyProxy(port)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    with _Server(("127.0.0.1", 0), handler) as server:
        proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.gate.set()
            server.shutdown()
            thread.join(60)
