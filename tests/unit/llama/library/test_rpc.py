"""Errors of `--rpc` about addresses without a worker, a busy one, or one of another release."""

from __future__ import annotations

import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from pyctl.errors import ConfigError
from pyctl.llama.library import rpc

Answer = Callable[[socket.socket], object]

GREETING = 33
"""Bytes of a client's first message."""

CONNECT = """
import sys
from pyctl.errors import ConfigError
from pyctl.llama.library import rpc
rpc.HELLO_SECONDS = float(sys.argv[2])
try:
    rpc.connect_workers([sys.argv[1]])
except ConfigError as error:
    print(error)
"""


def said(endpoint: str, seconds: float = 60.0) -> str:
    """Return the line of a process that connects, since ggml keeps a connection that has failed."""
    command = [sys.executable, "-c", CONNECT, endpoint, str(seconds)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture
def serving() -> Iterator[Callable[[Answer], str]]:
    """serving(answer) -> host:port of a server that answers one greeting."""
    with ExitStack() as stack:

        def serve(answer: Answer) -> str:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run() -> None:
                with server.accept()[0] as client:
                    assert len(client.recv(GREETING, socket.MSG_WAITALL)) == GREETING
                    answer(client)

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            stack.callback(thread.join, 60)
            return f"127.0.0.1:{server.getsockname()[1]}"

        yield serve


@pytest.mark.parametrize(
    "answer",
    [
        lambda client: client.sendall(struct.pack("<QBBB25x", 28, 6, 0, 0)),
        lambda client: client.sendall(struct.pack("<QBBB25x", 2**40, 7, 0, 0)),
        lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        lambda client: client.sendall(b"abc"),
        lambda client: None,
    ],
    ids=["another release", "a wrong size", "HTTP", "cut off", "closed"],
)
def test_others_are_refused_in_one_line(serving: Callable[[Answer], str], answer: Answer) -> None:
    endpoint = serving(answer)
    line = said(endpoint)
    assert line.startswith(f"--rpc: cannot use the worker {endpoint}: ")
    assert line.endswith("both sides need the same release\n")


def test_one_that_does_not_answer_is_busy(serving: Callable[[Answer], str]) -> None:
    over = threading.Event()
    assert "it does not answer: it serves another server" in said(
        serving(lambda client: over.wait(60)), 0.5
    )
    over.set()


def test_an_address_where_nothing_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"cannot use the worker {endpoint}: Failed to connect to {endpoint}" in said(
            endpoint
        )


def test_a_worker_says_that_its_address_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host, port = taken.getsockname()
        with pytest.raises(
            ConfigError, match=re.escape(f"cannot listen on {host}:{port}: Address already in use")
        ):
            rpc.serve_devices(host, port, [], 1)
