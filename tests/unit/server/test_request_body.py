"""Bodies of requests: bounded, and decoded."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
import zstandard
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from pyctl.errors import PyctlError, RequestError, TooLargeError
from pyctl.server.http import JsonResponse, error_response
from pyctl.server.request_body import MAX_BODY_BYTES, BodyLimitMiddleware, create_decoder
from tests.client import HI, Client
from tests.unit.server.fake import Bench, play
from tests.unit.server.parts import in_loop


def bare(data: bytes) -> bytes:
    """Return deflated ``data`` without the header of zlib."""
    deflate = zlib.compressobj(wbits=-15)
    return deflate.compress(data) + deflate.flush()


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def zstd_stream(data: bytes) -> bytes:
    """Return a frame without its size, as of a stream."""
    encoder = zstandard.ZstdCompressor().compressobj()
    return encoder.compress(data) + encoder.flush()


CODINGS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("GZIP", gzip.compress),
    ("x-gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", bare),
    ("zstd", zstd),
    ("zstd", zstd_stream),
    ("identity", bytes),
]
BODY = json.dumps({"messages": HI, "max_tokens": 3}).encode()


@pytest.fixture
def client() -> Client:
    return Bench(play("x")).client


def post(
    client: Client, data: bytes, coding: str, path: str = "/v1/chat/completions"
) -> tuple[int, str]:
    response = client.post(path, content=data, headers={"content-encoding": coding})
    return response.status_code, response.text


@pytest.mark.parametrize(("coding", "compress"), CODINGS)
def test_a_compressed_body_is_read(
    client: Client, coding: str, compress: Callable[[bytes], bytes]
) -> None:
    status, text = post(client, compress(BODY), coding)
    assert status == 200, text


@pytest.mark.parametrize(
    "path", ["/v1/messages", "/v1/responses", "/api/chat", "/tokenize", "/page/markdown"]
)
def test_every_path_reads_compressed_bodies(client: Client, path: str) -> None:
    body = json.dumps({"messages": HI, "input": "x", "content": "x", "texts": []}).encode()
    assert post(client, gzip.compress(body), "gzip", path)[0] == 200


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, gzip", "aes128gcm"])
def test_an_unknown_coding_is_named(client: Client, coding: str) -> None:
    response = client.post("/v1/messages", content=BODY, headers={"content-encoding": coding})
    assert response.status_code == 415
    assert response.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert coding in response.json()["error"]["message"]


@pytest.mark.parametrize(("coding", "compress"), CODINGS[:-1])
@pytest.mark.parametrize(
    "harm", [lambda data: data[:-3], lambda data: data + b"x", lambda data: b"\0\1" + data]
)
def test_a_damaged_body_is_the_clients_error(
    client: Client, coding: str, compress: Callable[[bytes], bytes], harm: Callable[[bytes], bytes]
) -> None:
    status, text = post(client, harm(compress(BODY)), coding)
    assert status == 400, text
    assert "compressed body" in text, text


@pytest.mark.parametrize(("coding", "compress"), CODINGS[:-1])
def test_a_body_is_decoded_in_bounded_pieces_up_to_its_limit(
    client: Client, coding: str, compress: Callable[[bytes], bytes]
) -> None:
    bomb = compress(bytes(2 * MAX_BODY_BYTES))
    assert len(bomb) < MAX_BODY_BYTES / 500
    status, text = post(client, bomb, coding)
    assert status == 413
    assert "larger than" in text
    pieces = list(create_decoder(coding).decode(bomb))
    assert sum(map(len, pieces)) == 2 * MAX_BODY_BYTES
    assert max(map(len, pieces)) <= 2 * 2**20


@pytest.mark.parametrize(("coding", "compress"), CODINGS[:-1])
def test_a_body_may_come_byte_by_byte(coding: str, compress: Callable[[bytes], bytes]) -> None:
    data = compress(BODY)
    decoder = create_decoder(coding)
    assert (
        b"".join(piece for i in range(len(data)) for piece in decoder.decode(data[i : i + 1]))
        == BODY
    )
    assert decoder.is_complete


def test_a_body_that_is_too_large_as_sent_is_refused(client: Client) -> None:
    def empty_blocks() -> Iterator[bytes]:
        deflate = zlib.compressobj(wbits=-15)
        empty = deflate.flush(zlib.Z_FULL_FLUSH)
        while True:
            yield empty * 10_000

    blocks = empty_blocks()
    data = b"".join(next(blocks) for _ in range(MAX_BODY_BYTES // 50_000 + 1))
    status, text = post(client, data, "deflate")
    assert status == 413
    assert "compressed body is larger" in text


def test_a_window_of_many_megabytes_is_not_allocated() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    encoder = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = encoder.compress(bytes(100)) + encoder.flush()
    with pytest.raises(RequestError, match="cannot be decoded"):
        list(create_decoder("zstd").decode(data))


LIMIT = 1000


async def counting(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the size of the body."""
    n_bytes = 0
    more = True
    try:
        while more:
            message = await receive()
            n_bytes += len(message.get("body", b""))
            more = message.get("more_body", False)
    except TooLargeError as error:
        return await error_response(error)(scope, receive, send)
    await JsonResponse({"n": n_bytes})(scope, receive, send)


async def chunks(n_bytes: int, size: int) -> AsyncIterator[bytes]:
    for start in range(0, n_bytes, size):
        yield b"x" * min(size, n_bytes - start)


def post_bytes(n_bytes: int, size: int) -> httpx.Response:
    return Client.to_app(BodyLimitMiddleware(counting, LIMIT)).post(
        "/", content=chunks(n_bytes, size)
    )


@pytest.mark.parametrize("size", [1, 333, 5000])
def test_a_body_of_the_limit_passes_and_one_byte_more_does_not(size: int) -> None:
    assert post_bytes(LIMIT, size).json() == {"n": LIMIT}
    response = post_bytes(LIMIT + 1, size)
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"


@in_loop
async def test_large_bodies_share_what_they_may_take() -> None:
    """A body that does not fit beside those that are still being answered comes again later; small
    ones always pass.
    """
    read = asyncio.Event()
    answered = asyncio.Event()

    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = await request.body()
        except PyctlError as error:
            return await error_response(error)(scope, receive, send)
        if scope["path"] == "/slow":
            read.set()
            await answered.wait()
        await JsonResponse({"n": len(body)})(scope, receive, send)

    transport = httpx.ASGITransport(BodyLimitMiddleware(waiting, 800, small=100, together=1000))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        slow = asyncio.ensure_future(client.post("/slow", content=chunks(700, 50)))
        await read.wait()
        found = [
            (await client.post("/", content=chunks(n, 50))).status_code for n in (100, 300, 301)
        ]
        answered.set()
        found.append((await slow).status_code)
        found += [(await client.post("/", content=chunks(n, 50))).status_code for n in (800, 801)]
    assert found == [200, 200, 503, 200, 200, 413]


def test_a_client_that_asks_before_it_sends_is_refused_unread() -> None:
    sent: list[int] = []

    async def scarce() -> AsyncIterator[bytes]:
        sent.append(1)
        yield b"x"

    headers = {"expect": "100-continue", "content-length": str(LIMIT + 1)}
    client = Client.to_app(BodyLimitMiddleware(counting, LIMIT))
    assert client.post("/", content=scarce(), headers=headers).status_code == 413
    assert not sent
