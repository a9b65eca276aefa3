"""Compressed bodies of requests."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator

import pytest
import zstandard

from pyctl.errors import RequestError
from pyctl.server.content_coding import create_decoder
from pyctl.server.middleware import MAX_BODY_BYTES
from tests.client import HI, Client
from tests.unit.server.fake import Bench, play


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
