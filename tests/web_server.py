"""A web server on this machine, for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

__all__ = ["Handler", "RedirectingHandler", "web_server"]


class Handler(BaseHTTPRequestHandler):
    """Says nothing about its requests."""

    def send(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        """Answer; ``length`` is the Content-Length if it is another, and one beyond ``body`` breaks
        the connection off.

        The names of ``headers`` have _ in place of -.
        """
        self.send_response(status)
        for name, value in {
            "Content-Length": str(len(body) if length is None else length),
            **headers,
        }.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = length is not None and length > len(body)

    def log_message(self, *_: object) -> None:
        pass


class RedirectingHandler(Handler):
    """Redirects to plain http on another machine, whose name cannot be resolved."""

    def do_GET(self) -> None:
        self.send(302, b"", Location="http://release.invalid/SHA256SUMS")


@contextmanager
def web_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the address of a server whose requests ``handler`` answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
