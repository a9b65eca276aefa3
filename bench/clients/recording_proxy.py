"""A proxy between a program and pyctl: it records each request, and binds the reply of the model.

A model of random weights calls no tools. The proxy adds fields to a request that bind the reply to
one call or one text; the prompt stays as the program sent it.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

__all__ = ["Recorded", "RecordingProxy", "recording_proxy"]

_OF_CONNECTION = frozenset(
    {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
)

_TIMEOUT = 600
"""The maximum wait for a part of an answer, in seconds: busy machines evaluate long prompts."""

_CHUNK = 65_536


@dataclass(frozen=True)
class Recorded:
    """A request of a program, and the head of its answer.

    Attributes:
        path: The path, without its query.
        body: The body as the program sent it; None if it is not an object of JSON.
        headers: The headers of the request, with names in lower case.
        status: The status of the answer.
        n_cached: The tokens of the prompt that were restored; None if the answer has no such count.
        n_evaluated: The tokens of the prompt that were evaluated, likewise.
    """

    path: str
    body: dict[str, Any] | None
    headers: dict[str, str]
    status: int
    n_cached: int | None = None
    n_evaluated: int | None = None


@dataclass
class RecordingProxy:
    """Forwards to the server at ``target``.

    Attributes:
        target: The address of pyctl.
        binding: Returns the fields to add to a request, by its path and body.
        recorded: The requests, in the order of their answers.
        url: The address of the proxy.
    """

    target: str
    binding: Callable[[str, dict[str, Any]], dict[str, Any]]
    recorded: list[Recorded] = field(default_factory=list)
    url: str = ""
    _lock: Lock = field(default_factory=Lock)

    def bound(self, path: str, body: dict[str, Any]) -> bytes:
        """Return ``body`` as JSON with the fields that bind its reply."""
        with self._lock:
            added = self.binding(path, body)
        return json.dumps({**body, **added}).encode()

    def add(self, recorded: Recorded) -> None:
        """Append a request."""
        with self._lock:
            self.recorded.append(recorded)


class _Handler(BaseHTTPRequestHandler):
    proxy: RecordingProxy

    def handle_any(self) -> None:
        """Forward the request, and the answer part by part."""
        sent = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = urlsplit(self.path).path
        body = _object(sent)
        headers = {name.lower(): value for name, value in self.headers.items()}
        kept = {name: value for name, value in headers.items() if name not in _OF_CONNECTION}
        payload = sent if body is None else self.proxy.bound(path, body)
        address = urlsplit(self.proxy.target).netloc
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT)
        try:
            connection.request(self.command, self.path, payload or None, kept)
            answer = connection.getresponse()
            cache = _cache_counts(answer.getheader("x-pyctl-cache") or "")
            self.proxy.add(Recorded(path, body, headers, answer.status, *cache))
            self._forward(answer)
        except OSError:  # one of the two is gone
            self.close_connection = True
        finally:
            connection.close()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def _forward(self, answer: http.client.HTTPResponse) -> None:
        """Send an answer without its length: the end of the connection ends it."""
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in _OF_CONNECTION:
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        while part := answer.read1(_CHUNK):
            self.wfile.write(part)
            self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _cache_counts(header: str) -> tuple[int | None, int | None]:
    """Return the restored and evaluated tokens of a prompt from the header of pyctl."""
    counts = dict(part.split("=", 1) for part in header.split("; ") if "=" in part)
    if "cached" not in counts or "evaluated" not in counts:
        return None, None
    return int(counts["cached"]), int(counts["evaluated"])


@contextmanager
def recording_proxy(
    target: str, binding: Callable[[str, dict[str, Any]], dict[str, Any]]
) -> Iterator[RecordingProxy]:
    """Yield a proxy in front of the server at ``target``, which ends with the block."""
    proxy = RecordingProxy(target, binding)
    handler = type("_ProxyHandler", (_Handler,), {"proxy": proxy})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        proxy.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()
