"""Errors of `--rpc` about addresses without a worker, a busy one, or one of another release."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pyctl.errors import ConfigError
from pyctl.llama import rpc

Answer = Callable[[socket.socket], object]

HEADER = Path(__file__).resolve().parents[3] / "vendor/llama.cpp/ggml/include/ggml-rpc.h"


@pytest.fixture
def serving() -> Iterator[Callable[[Answer], str]]:
    """serving(answer) -> host:port of a server that answers one greeting."""
    with ExitStack() as stack:

        def serve(answer: Answer) -> str:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run() -> None:
                with server.accept()[0] as client:
                    assert client.recv(33, socket.MSG_WAITALL) == struct.pack("<BQ24x", 14, 24)
                    answer(client)

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            stack.callback(thread.join, 60)
            return f"127.0.0.1:{server.getsockname()[1]}"

        yield serve


def hello(*version: int, size: int = 28) -> Answer:
    return lambda client: client.sendall(struct.pack("<QBBB25x", size, *version))


def test_a_worker_of_this_release_is_taken(serving: Callable[[Answer], str]) -> None:
    endpoint = serving(hello(*rpc.PROTOCOL))
    assert rpc._greet(endpoint) == ("127.0.0.1", int(endpoint.partition(":")[2]))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (hello(7, 1, 0), "speaks protocol 7.1.0, this llama.cpp 7.0.0: both need the same release"),
        (hello(6, 0, 0), "speaks protocol 6.0.0"),
        (hello(7, 0, 0, size=2**40), "speaks another protocol"),
        (lambda client: client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "speaks another protocol"),
        (lambda client: client.sendall(b"abc"), "it has closed the connection"),
        (lambda client: None, "it has closed the connection"),
    ],
)
def test_others_are_refused_in_one_line(serving: Callable[[Answer], str], answer: Answer, says: str) -> None:
    endpoint = serving(answer)
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        rpc.connect_workers([endpoint])
    assert endpoint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_that_does_not_answer_is_busy(serving: Callable[[Answer], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "HELLO_SECONDS", 0.05)
    over = threading.Event()
    with pytest.raises(ConfigError, match="it does not answer: it serves another server"):
        rpc.connect_workers([serving(lambda client: over.wait(60))])
    over.set()


def test_an_address_where_nothing_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot reach the worker {endpoint}: Connection refused"):
            rpc.connect_workers([endpoint])


def test_a_worker_says_that_its_address_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host, port = taken.getsockname()
        with pytest.raises(ConfigError, match=f"cannot listen on {host}:{port}: Address already in use"):
            rpc.start_worker((host, port), [], 1, None, lambda: None)


def test_the_protocol_is_that_of_the_pinned_release() -> None:
    if not HEADER.exists():
        pytest.skip("llama.cpp's headers are not unpacked under vendor/llama.cpp; the build does that")
    names = ("MAJOR", "MINOR", "PATCH")
    text = HEADER.read_text(encoding="utf-8")
    found = tuple(int(re.findall(rf"RPC_PROTO_{name}_VERSION +(\d+)", text)[0]) for name in names)
    assert found == rpc.PROTOCOL
