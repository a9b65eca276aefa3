"""Heads of requests that RFC 9112 has a server accept."""

from __future__ import annotations

from tests.process.server.child_server import (
    complaints,
    connect,
    line,
    server,
)

CLOSE = b"connection: close\r\n\r\n"


def test_empty_lines_and_absolute_targets() -> None:
    """Empty lines before a request (RFC 9112, 2.2) and targets in absolute form (3.2.2) are
    accepted; proxies and old clients send both.
    """
    with server() as process:
        address = line(process)
        host = address.removeprefix("http://").encode()
        for head in (
            b"\r\nGET /health HTTP/1.1\r\nhost: a\r\n" + CLOSE,
            b"\r\n\n\r\nGET /health HTTP/1.1\r\nhost: a\r\n" + CLOSE,
            b"GET http://" + host + b"/health HTTP/1.1\r\nhost: a\r\n" + CLOSE,
            b"GET HTTP://a/health?x=http://b HTTP/1.1\r\nhost: a\r\n" + CLOSE,
            b"GET http://a HTTP/1.1\r\nhost: a\r\n" + CLOSE,
        ):
            with connect(address) as client:
                client.sendall(head)
                assert client.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n", head
        with connect(address) as client:
            client.sendall(b"\r\n")
            client.sendall(b"\r\n\r\nGET /health HTTP/1.1\r\nhost: a\r\n" + CLOSE)
            assert client.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"
        complaints(process)
