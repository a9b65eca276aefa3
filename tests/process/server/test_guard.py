"""Silent and slow clients do not block other clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from pyctl.server.app import create_loading_app
from pyctl.server.app_state import AppState
from pyctl.server.guard import KEPT_SECONDS, ConnectionGuard, GuardedHttpProtocol
from pyctl.server.server_settings import ServerSettings
from tests.process.server.child_server import (
    closed_after,
    complaints,
    connect,
    is_healthy,
    line,
    server,
    silent,
)
from tests.unit.engine.drive import ManualClock

BODY = b'{"prompt": "a", "n_predict": 1}'


@pytest.mark.parametrize("hard", [1024, 4096], ids=["no more files", "more files if it asks"])
def test_1100_silent_connections_lock_nobody_out(hard: int) -> None:
    with server(files=(1024, hard)) as process:
        address = line(process)
        with silent(address, 1100):
            for _ in range(5):
                assert is_healthy(address)
        text = complaints(process)
    assert len(text) < 5000, text[:5000]


def test_more_connections_than_files_are_few_lines_of_log() -> None:
    # The limit of connections is never reached: the guard, too, has to do without files.
    with server(files=(150, 150), constants=["OWN_FILES=-1000000"], maximum=1000) as process:
        address = line(process)
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)  # most will never be taken
                client.connect_ex((urlsplit(address).hostname, urlsplit(address).port))
            assert process.stderr is not None
            text = process.stderr.readline()
            while text and "a connection cannot be taken: " not in text:
                text += process.stderr.readline()
            time.sleep(1.5)  # asyncio tries again after a second; more tries must not be more lines
        text += complaints(process)
    assert 0 < len(text) < 2000, text[:5000]


def test_beyond_the_limit_silent_ones_make_room_and_busy_ones_do_not() -> None:
    """A new connection beyond the limit closes the oldest one that has sent nothing; if all have
    begun a request, the new one gets 503. A crowd of silent clients must not lock others out.
    """
    head = (
        b"POST /completion HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: "
        b"400\r\n\r\n"
    )
    with server(maximum=8) as process:
        address = line(process)
        with silent(address, 20) as all_silent:
            assert is_healthy(address)
            assert all_silent[0].recv(10) == b"", "the oldest was closed"
        with silent(address, 8) as busy:
            for each in busy:
                each.sendall(head)
                assert each.recv(1000).startswith(b"HTTP/1.1 100 "), "it was read"
            with connect(address) as one_more:
                answer = closed_after(one_more)
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after" in answer
            assert b"unavailable_error" in answer
        complaints(process)


def test_a_request_with_two_lengths_is_the_last_of_its_connection() -> None:
    """A proxy in front may take what follows it for the rest of its body (RFC 9112, 6.3)."""
    both = (
        b"GET /health HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: "
        b"chunked\r\n\r\n0\r\n\r\n"
    )
    with server() as process:
        address = line(process)
        with connect(address) as connection:
            connection.sendall(both + b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            answer = closed_after(connection)
        assert answer.count(b"HTTP/1.1 200 ") == 1
        assert b"connection: close" in answer.lower()
        complaints(process)


SLOW_BODY = b"POST /completion HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n"


def test_what_is_not_said_in_time_ends_the_connection() -> None:
    """A head or body that comes too slowly ends its connection with 408, however it drips: a client
    cannot hold a connection open by sending a byte at a time.
    """
    # Each has some seconds for the first thing it says: this process may have to wait for its turn.
    constants = ["HEAD_SECONDS=4", "BODY_SECONDS=4", "BODY_RATE=1000"]
    with server(constants=constants) as process, ThreadPoolExecutor() as side_by_side:
        address = line(process)

        def received(said: bytes, drip: bytes = b"") -> bytes:
            with connect(address) as connection:
                connection.sendall(said)
                return closed_after(connection, drip)

        nothing = side_by_side.submit(received, b"")
        part_of_a_head = side_by_side.submit(received, b"GET /health HTTP/1.1\r\nx-", b"a")
        slow_body = side_by_side.submit(received, SLOW_BODY, b" ")
        after_a_reply = side_by_side.submit(received, b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nG")
        assert nothing.result() == b""
        assert part_of_a_head.result().startswith(b"HTTP/1.1 408 ")
        assert b"HTTP/1.1 408 " in slow_body.result()
        assert after_a_reply.result().startswith(b"HTTP/1.1 200 ")
        assert is_healthy(address)
        assert "Traceback" not in complaints(process)


def test_who_was_answered_may_take_longer_to_ask_again() -> None:
    """A connection that had a reply is kept for KEPT_SECONDS, a new one for HEAD_SECONDS; as soon
    as the next head has begun, the shorter limit applies to it again.
    """
    request = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"

    def answer(connection: socket.socket) -> bytes:
        received = b""
        while not received.endswith(b"}"):
            part = connection.recv(1000)
            assert part, "closed"
            received += part
        return received

    def answered(address: str) -> socket.socket:
        connection = connect(address)
        connection.sendall(request)
        assert answer(connection).startswith(b"HTTP/1.1 200 ")
        return connection

    with server(constants=["HEAD_SECONDS=3", "KEPT_SECONDS=90"]) as process:
        address = line(process)
        with answered(address) as kept, answered(address) as late, connect(address) as silent_one:
            assert closed_after(silent_one) == b"", "longer than a head may take"
            kept.sendall(request)
            assert answer(kept).startswith(b"HTTP/1.1 200 ")
            late.sendall(request[:9])
            assert closed_after(late).startswith(b"HTTP/1.1 408 "), (
                "of a head that has begun, the rest is due"
            )
        complaints(process)
    with server(constants=["HEAD_SECONDS=90", "KEPT_SECONDS=1"]) as process:
        with answered(line(process)) as left:
            assert closed_after(left) == b""
        complaints(process)


def test_a_new_connection_has_all_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new connection is not charged for the time that passed before it, and a process that was
    held up still has to read its bytes.
    """
    monkeypatch.setattr("pyctl.server.guard.HEAD_SECONDS", 4.0)

    async def look() -> bool:
        app = create_loading_app(AppState(ServerSettings()))
        clock = ManualClock()
        guard = ConnectionGuard(8, clock)
        config = uvicorn.Config(app, log_config=None)
        config.load()
        here, there = socket.socketpair()
        with there:
            transport, protocol = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: GuardedHttpProtocol(guard, config, ServerState()), here
            )
            clock.advance(60.0)
            guard.close_slow_clients({protocol})
            is_closed = transport.is_closing()
            transport.abort()
        return is_closed

    assert not asyncio.run(look())


def test_clients_give_up_kept_connections_before_the_server_does() -> None:
    # Else a request that was just sent meets a closed connection, and the client cannot know
    # whether to repeat it.
    assert KEPT_SECONDS > 60 > (httpx.Limits().keepalive_expiry or 0) > 0, (
        "nginx keeps one for 60 s"
    )


def test_long_replies_and_fast_bodies_are_left_alone() -> None:
    """The limits end slow clients alone: a large body that comes quickly is read, and a stream
    stays open beyond all limits, until the server ends it with an error.
    """
    constants = ["HEAD_SECONDS=3", "BODY_SECONDS=3", "BODY_RATE=1000"]
    with server(constants=constants) as process:
        address = line(process)
        body = {"messages": [{"role": "user", "content": "x" * 8_000_000}], "stream": True}
        assert (
            httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).status_code == 400
        )
        body["messages"] = [{"role": "user", "content": "hi"}]
        with httpx.stream(
            "POST", f"{address}/v1/chat/completions", json=body, timeout=60
        ) as response:
            chunks = response.iter_bytes()
            next(chunks)
            with connect(address) as silent_one, connect(address) as slow:
                slow.sendall(SLOW_BODY)
                assert closed_after(silent_one) == b""
                assert b"HTTP/1.1 408 " in closed_after(slow)
            process.terminate()
            assert b"unavailable_error" in b"".join(chunks), (
                "the stream was open for longer than any limit"
            )


def test_a_client_that_takes_nothing_of_its_reply_is_left() -> None:
    """A client that reads none of its replies loses its connection after WRITE_SECONDS, else it
    would hold the memory of its replies for ever.
    """
    with server(constants=["WRITE_SECONDS=2"]) as process:
        address = line(process)
        parts = urlsplit(address)
        with socket.socket() as greedy:
            greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            greedy.connect((parts.hostname, parts.port))
            greedy.settimeout(90)
            request = b"GET /props HTTP/1.1\r\nhost: a\r\n\r\n"

            def ask_for_ever() -> (
                None
            ):  # the client reads no answers, so the server soon stops reading requests
                while True:
                    greedy.sendall(request * 100)

            with pytest.raises(ConnectionError):
                ask_for_ever()
        assert is_healthy(address)
        assert "a client took nothing of its reply" in complaints(process)


# -- where it listens
# ----------------------------------------------------------------------------------
