"""Abusive clients: afterwards the server is healthy, its memory flat, and its answers are the
same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.client import CHAT
from tests.process.conftest import Server

QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the answer?"}],
    "max_tokens": 24,
    "temperature": 0,
}
REFUSED = range(400, 500)
GROWTH_MIB = 24
"""Maximum growth of the server in the second half of the disconnects; a leak of 16 KiB each would
be more.
"""


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start("tiny-hybrid", "--exact", "-np", "2", "--prefix-cache-slots", "16")


@pytest.fixture(autouse=True)
def healthy_as_before(server: Server) -> Iterator[None]:
    """The reference answer, cold and cached, before and after; then both sequences at once."""
    before = answers(server)
    n_logged = len(server.log())
    yield
    assert server.process.poll() is None, server.log()[-2000:]
    assert answers(server) == before
    assert all(code == 200 for code in asyncio.run(post_all(server, [(CHAT, QUESTION)] * 4)))
    assert "Traceback" not in server.log()[n_logged:]


def answers(server: Server) -> list[str]:
    """Return the reference answer, cold and cached."""
    client = server.client
    assert client.get_json("/health") == {"status": "ok"}
    return [client.chat(**QUESTION, cache_prompt=cached).text for cached in (False, True)]


async def post_all(server: Server, requests: list[tuple[str, Any]]) -> list[int]:
    """Return the status of each request, by 64 clients."""
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

        async def post(path: str, body: Any) -> int:
            if body is None:
                return (await client.get(path)).status_code
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return (await client.post(path, content=content)).status_code

        return await asyncio.gather(*(post(path, body) for path, body in requests))


def resident_mib(server: Server) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="utf-8")
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) / 1024


def test_64_clients_at_once(server: Server) -> None:
    """Good and bad requests of all kinds side by side get the status that each gets alone."""
    kinds: list[tuple[str, Any, range]] = [
        (CHAT, QUESTION, range(200, 201)),
        (CHAT, {**QUESTION, "stream": True}, range(200, 201)),
        ("/completion", {"prompt": "Once upon a time", "n_predict": 9}, range(200, 201)),
        (
            "/v1/completions",
            {"prompt": ["a", "b"], "max_tokens": 5, "stream": True},
            range(200, 201),
        ),
        ("/tokenize", {"content": "word " * 2000}, range(200, 201)),
        ("/apply-template", QUESTION, range(200, 201)),
        ("/props", None, range(200, 201)),
        ("/v1/models", None, range(200, 201)),
        (CHAT, b"{", REFUSED),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 9000}]}, REFUSED),
        ("/nowhere", {}, REFUSED),
    ]
    chosen = [kinds[i % len(kinds)] for i in range(4 * 64)]
    found = asyncio.run(post_all(server, [(path, body) for path, body, _ in chosen]))
    for (path, _, expected), status in zip(chosen, found, strict=True):
        assert status in expected, path


def heaps_of_threads(server: Server) -> int:
    """Return regions as glibc makes them for threads: 64 MiB at a multiple of that, of which the
    rest is not yet in use.
    """
    maps = Path(f"/proc/{server.process.pid}/maps").read_text(encoding="utf-8")
    found = re.findall(r"^(\w+)-(\w+) rw-p 0+ 00:00 0 *\n(\w+)-(\w+) ---p", maps, re.MULTILINE)
    regions = [[int(address, 16) for address in each] for each in found]
    size = 64 * 2**20
    return sum(
        end == rest and start % size == 0 and last == start + size
        for start, end, rest, last in regions
    )


def test_threads_share_their_heaps(server: Server) -> None:
    # Threads for requests beside those of the engine, the event loop, drafts and llama.cpp.
    assert set(asyncio.run(post_all(server, [("/apply-template", QUESTION)] * 64))) == {200}
    # The heap that they share beside the first may have had several regions.
    assert heaps_of_threads(server) <= 3, (
        "each thread has a heap of its own, and keeps what its largest request took"
    )


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode()


@pytest.mark.parametrize("leave", [True, False], ids=["that go away", "that stay"])
def test_half_sent_requests(server: Server, leave: bool) -> None:
    """Connections with a part of a request, or with bytes that are none, cost other clients
    nothing, whether they are closed or stay open.
    """
    body = json.dumps({**QUESTION, "stream": True}).encode()
    parts = (
        b"",
        b"POST",
        b"POST /v1/chat/completions HT",
        head(CHAT, len(body))[:-2],
        head(CHAT, len(body)),
    )
    parts += (
        head(CHAT, len(body)) + body[:-1],
        head(CHAT, 10**12) + body,
        head(CHAT, len(body)) + body[:1],
    )
    parts += (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\r\n" * 100,
        b"GET " + b"/" * 70000,
    )
    parts += (
        head(CHAT, -1) + body,
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x00" * 5000,
    )
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            for part in parts:
                connection = connect(server)
                if not leave:
                    stack.enter_context(connection)
                # the server may have answered 400 and closed before all was sent
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(part)
                if leave:
                    connection.close()
        assert len(answers(server)) == 2, "served while the others are still there"


def test_a_slow_request_is_served(server: Server) -> None:
    body = json.dumps({**QUESTION, "max_tokens": 2}).encode()
    message = head(CHAT, len(body)) + body
    with connect(server) as connection:
        for start in range(0, len(message), 16):
            connection.sendall(message[start : start + 16])
            time.sleep(0.005)
        assert connection.recv(64).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(
            CHAT,
            lambda: b'{"messages":[{"role":"user","content":"' + b"a" * (50 << 20),
            id="a chat",
        ),
        pytest.param("/completion", lambda: b'{"prompt":[' + b"40," * (17 << 20), id="token ids"),
        pytest.param("/tokenize", lambda: b"\xff" * (50 << 20), id="garbage"),
        pytest.param("/nowhere", lambda: b"x" * (50 << 20), id="an unknown path"),
    ],
)
def test_bodies_of_50_megabytes(server: Server, path: str, body: Callable[[], bytes]) -> None:
    before = resident_mib(server)
    response = server.client.post(path, content=body())
    assert response.status_code in (404, 413)
    assert resident_mib(server) - before < 100


def nested(depth: int) -> Iterator[tuple[str, str]]:
    """Yield (path, body) for each field of a request that may be nested, ``depth`` levels deep."""
    lists = "[" * depth + "]" * depth
    objects = '{"a":' * depth + "1" + "}" * depth
    chat = json.dumps({**QUESTION, "max_tokens": 1})[:-1]
    yield CHAT, lists
    for name in (
        "messages",
        "tools",
        "tool_choice",
        "stop",
        "logit_bias",
        "response_format",
        "samplers",
        "unknown",
    ):
        yield CHAT, f'{chat},"{name}":{lists}}}'
    for name in ("chat_template_kwargs", "json_schema", "response_format", "stream_options"):
        yield CHAT, f'{chat},"{name}":{objects}}}'
    tool = f'{{"type":"function","function":{{"name":"f","parameters":{objects}}}}}'
    yield CHAT, f'{chat},"tools":[{tool}]}}'
    yield (
        CHAT,
        json.dumps(
            {**QUESTION, "max_tokens": 1, "grammar": f"root ::= {'(' * depth}'a'{')' * depth}"}
        ),
    )
    yield (
        CHAT,
        json.dumps(
            {**QUESTION, "max_tokens": 1, "grammar": f'root ::= {"(" * depth}"a"{")" * depth}'}
        ),
    )
    for arguments in (objects, json.dumps(objects)):
        call = f'{{"id":"c","type":"function","function":{{"name":"f","arguments":{arguments}}}}}'
        message = f'{{"role":"assistant","content":"","tool_calls":[{call}]}}'
        yield CHAT, f'{{"max_tokens":1,"messages":[{{"role":"user","content":"a"}},{message}]}}'
    yield "/completion", f'{{"prompt":{lists},"n_predict":1}}'
    yield "/tokenize", f'{{"content":{lists}}}'


@pytest.mark.parametrize("depth", [200, 990, 100_000])
def test_deep_json(server: Server, depth: int) -> None:
    for path, body in nested(depth):
        response = server.client.post(path, content=body)
        assert response.status_code < 500 or response.status_code == 501, body[:80]


def test_numbers_and_text_that_are_none(server: Server) -> None:
    """A number that JSON or a float cannot hold, or text that is no UTF-8, gets a client error and
    never one of the server.
    """
    chat = json.dumps(QUESTION)[:-1]
    values = (
        "NaN",
        "Infinity",
        "-Infinity",
        "1e999",
        "1" + "0" * 400,
        "1e-400",
        "-9223372036854775809",
        "1.5",
    )
    values += ('"\\ud800"', '"\\u0000"', '"' + "\\u0000" * 50 + '"', "{}", "[[]]", "false")
    names = (
        "temperature",
        "top_k",
        "top_p",
        "seed",
        "max_tokens",
        "n_probs",
        "min_keep",
        "repeat_last_n",
        "id_slot",
    )
    names += (
        "logit_bias",
        "stop",
        "model",
        "n",
        "t_max_predict_ms",
        "mirostat_tau",
        "dry_base",
        "messages",
        "prompt",
    )
    requests: list[tuple[str, bytes]] = []
    for value in values:
        requests += [(CHAT, f'{chat},"max_tokens":1,"{name}":{value}}}'.encode()) for name in names]
        requests.append(("/completion", f'{{"prompt":{value},"n_predict":1}}'.encode()))
        requests.append(("/completion", f'{{"prompt":[40,{value}],"n_predict":1}}'.encode()))
        requests.append(("/detokenize", f'{{"tokens":[{value}]}}'.encode()))
    for raw in (
        b"\xff",
        b'{"prompt":"\xff\xfe"}',
        b'{"prompt":"\xc3"}',
        b"\x00" * 99,
        "{}".encode("utf-16"),
    ):
        requests += [
            (path, raw)
            for path in (CHAT, "/completion", "/tokenize", "/detokenize", "/apply-template")
        ]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for path, content in requests:
            status = client.post(path, content=content).status_code
            assert status < 500 or status == 501, content[-120:]


def test_thousands_of_disconnects(server: Server) -> None:
    rng = random.Random(6)
    asyncio.run(disconnects(server, rng, 500))
    before = resident_mib(server)
    asyncio.run(disconnects(server, rng, 1500))
    assert resident_mib(server) - before < GROWTH_MIB


async def disconnects(server: Server, rng: random.Random, count: int) -> None:
    """Run ``count`` clients, 16 at a time, that leave somewhere between the connection and the
    middle of the stream.
    """
    host, port = server.url.removeprefix("http://").split(":")
    limit = asyncio.Semaphore(16)

    async def one(stream: bool, words: int, sent: float, n_read: int, seconds: float) -> None:
        messages = [{"role": "user", "content": "word " * words}]
        fields = {"messages": messages, "stream": stream, "max_tokens": 5000, "ignore_eos": True}
        body = json.dumps(fields).encode()
        message = head(CHAT, len(body)) + body
        async with limit:
            reader, writer = await asyncio.open_connection(host, int(port))
            with contextlib.suppress(ConnectionError, TimeoutError):
                writer.write(message[: int(len(message) * sent)])
                await writer.drain()
                if sent == 1 and stream:
                    await asyncio.wait_for(reader.read(n_read), seconds)
                else:
                    await asyncio.sleep(seconds)
            writer.transport.abort() if rng.random() < 0.5 else writer.close()

    choices = [
        (
            rng.random() < 0.7,
            rng.choice((3, 100, 700)),
            rng.choice((1, 1, 1, rng.random())),
            rng.choice((1, 900, 9000)),
        )
        for _ in range(count)
    ]
    await asyncio.gather(*(one(*choice, seconds=rng.random() * 0.05) for choice in choices))
