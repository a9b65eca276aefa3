"""Bodies of requests: bounded in size, and decoded (``Content-Encoding``, RFC 9110 section 8.4)
before anything reads them.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import zstandard
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyctl.errors import BusyError, ContentCodingError, RequestError, TooLargeError
from pyctl.server.http import error_form, error_response
from pyctl.settings.limit import limit

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_IMAGES_BODY_BYTES",
    "BodyLimitMiddleware",
    "ContentCodingMiddleware",
    "create_decoder",
]

# -- the size
# ----------------------------------------------------------------------------------

MAX_BODY_BYTES = limit(32 * 2**20, "body of a request", "413", "request", "bytes")
"""About three times what a prompt of a million tokens takes as JSON, with every character escaped.
"""

MAX_IMAGES_BODY_BYTES = limit(
    256 * 2**20, "body of a request to a model with vision", "413", "request", "bytes"
)
"""Room for a long conversation with many screenshots, all of which come again with each message."""

_MAX_TOGETHER_BYTES = limit(
    512 * 2**20, "all large bodies together", "503 with Retry-After", "process", "bytes"
)

_DRAIN_BYTES = 8 * MAX_BODY_BYTES


class BodyLimitMiddleware:
    """The middleware that bounds bodies. Reading a body of more than ``limit`` bytes raises
    TooLargeError in the application. One of more than ``small`` bytes raises BusyError if it has
    more than ``together`` with other large ones, which are not answered yet.

    The rest of the body is read and dropped before, since most clients look for an answer only
    after they have sent everything; a client that first sends Expect: 100-continue gets the answer
    at once. ``prefix`` stands before every path.
    """

    def __init__(
        self,
        app: ASGIApp,
        limit: int = MAX_BODY_BYTES,
        prefix: str = "",
        small: int = MAX_BODY_BYTES,
        together: int = _MAX_TOGETHER_BYTES,
    ) -> None:
        self._small = small
        self._together = together
        self._app = app
        self._limit = limit
        self._prefix = prefix
        self._large: dict[object, int] = {}  # bytes of the large bodies that are not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the bytes of the body while the application reads it.

        A body above the limit, or above the sum of large bodies, raises in the application's read
        after the rest was drained. With Expect: 100-continue the refusal comes before the body.
        """
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if "expect" in headers and length.isdecimal() and int(length) > self._limit:
            form = error_form(scope["path"].removeprefix(self._prefix))
            return await error_response(self._error(), form)(scope, receive, send)
        n_bytes = 0
        this = object()

        async def limited() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            error: Exception | None = self._error() if n_bytes > self._limit else None
            if error is None and n_bytes > self._small:
                self._large[this] = n_bytes
                if sum(self._large.values()) > self._together:
                    error = BusyError(len(self._large) - 1)
            if error is None:
                return message
            while message.get("more_body", False) and n_bytes < self._limit + _DRAIN_BYTES:
                message = await receive()
                n_bytes += len(message.get("body", b""))
            raise error

        try:
            await self._app(scope, limited, send)
        finally:
            self._large.pop(this, None)

    def _error(self) -> TooLargeError:
        return TooLargeError(f"the body is larger than {self._limit} bytes")


# -- the coding
# ----------------------------------------------------------------------------------

_PIECE_BYTES = 2**20
"""Decoded at a time; between two pieces, other requests are served."""

_ZSTD_INPUT_BYTES = 64
"""Compressed bytes decoded at a time: a block has four bytes or more and is 128 KiB at most (RFC
8878, section 3.1.1.2), so that they make 2 MiB.
"""

_MAX_WINDOW_BYTES = limit(
    8 * 2**20, "memory to decode a body compressed by zstd (RFC 9659)", "400", "request", "bytes"
)

_DRAIN_BYTES = 256 * 2**20
"""Read and dropped after an error: most clients look for an answer only after they have sent
everything.
"""


class Decoder(Protocol):
    """A decoder of one body, which comes in parts."""

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yield the pieces that ``data`` adds, each of a bounded size. Raises RequestError if it
        cannot be decoded.
        """

    @property
    def is_complete(self) -> bool:
        """True if the end of the compressed data was read."""


class _Inflater:
    """A decoder of gzip (RFC 1952) and deflate: zlib's form (RFC 1950), or none, as some clients
    send it.
    """

    def __init__(self, *, is_gzip: bool) -> None:
        self._inflate = zlib.decompressobj(16 + zlib.MAX_WBITS) if is_gzip else None

    @property
    def is_complete(self) -> bool:
        return self._inflate is not None and self._inflate.eof

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yield the bytes of ``data``, in pieces of at most _PIECE_BYTES. Raises RequestError for
        damaged or trailing data.
        """
        if not data:
            return
        if self._inflate is None:
            has_header = (
                data[0] & 0x0F == zlib.DEFLATED
            )  # of zlib's form; no encoder starts a bare one so
            self._inflate = zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
        inflate = self._inflate
        while True:
            if inflate.eof and (data or inflate.unused_data):
                raise RequestError("bytes follow the end of the compressed body")
            try:
                piece = inflate.decompress(data, _PIECE_BYTES)
            except zlib.error as error:
                raise RequestError(f"the compressed body cannot be decoded: {error}") from error
            data = inflate.unconsumed_tail
            yield piece
            if not data and not inflate.unused_data and len(piece) < _PIECE_BYTES:
                return


class _ZstdDecoder:
    """A decoder of one frame of Zstandard (RFC 8878)."""

    def __init__(self) -> None:
        self._frame = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).decompressobj()

    @property
    def is_complete(self) -> bool:
        return self._frame.eof

    def decode(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), _ZSTD_INPUT_BYTES):
            if self._frame.eof:
                raise RequestError("bytes follow the end of the compressed body")
            try:
                piece = self._frame.decompress(data[start : start + _ZSTD_INPUT_BYTES])
            except zstandard.ZstdError as error:
                raise RequestError(f"the compressed body cannot be decoded: {error}") from error
            if self._frame.unused_data:
                raise RequestError("bytes follow the end of the compressed body")
            if piece:
                yield piece


_DECODERS: dict[str, Callable[[], Decoder]] = {
    "gzip": lambda: _Inflater(is_gzip=True),
    "x-gzip": lambda: _Inflater(is_gzip=True),
    "deflate": lambda: _Inflater(is_gzip=False),
    "zstd": _ZstdDecoder,
}


def create_decoder(coding: str) -> Decoder:
    """Return a decoder for a ``Content-Encoding``. Raises ContentCodingError for an unknown one and
    for several.
    """
    make = _DECODERS.get(coding.strip().lower())
    if make is None:
        raise ContentCodingError(coding)
    return make()


class ContentCodingMiddleware:
    """The middleware that gives the application decoded bodies; reading one that cannot be decoded
    raises an error there.

    A body counts against ``limit`` as it was sent, and once more, in the application, decoded.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        coding = ", ".join(Headers(scope=scope).getlist("content-encoding"))
        if coding.strip().lower() in ("", "identity"):
            await self._app(scope, receive, send)
        else:
            await self._app(scope, _DecodedBody(receive, coding, self._limit).receive, send)


class _DecodedBody:
    """The messages of a request whose body is decoded."""

    def __init__(self, receive: Receive, coding: str, limit: int) -> None:
        self._receive = receive
        self._coding = coding
        self._limit = limit
        self._decoder: Decoder | None = None
        self._pieces: Iterator[bytes] = iter(())
        self._has_more = True  # of the body as it was sent
        self._is_over = False
        self._n_sent = self._n_decoded = 0

    async def receive(self) -> Message:
        """Return the next message. Raises RequestError."""
        if self._is_over:
            return await self._receive()
        try:
            return await self._next()
        except RequestError:
            await self._drain()
            raise

    async def _next(self) -> Message:
        if self._decoder is None:
            self._decoder = create_decoder(self._coding)
        while (piece := next(self._pieces, None)) is None:
            if not self._has_more:
                self._is_over = True
                if not self._decoder.is_complete and self._n_decoded <= self._limit:
                    raise RequestError("the compressed body ends too early")
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._take(message, self._decoder)
        await asyncio.sleep(0)
        self._n_decoded += len(piece)
        return {"type": "http.request", "body": piece, "more_body": True}

    def _take(self, message: Message, decoder: Decoder) -> None:
        data = message.get("body", b"")
        self._has_more = message.get("more_body", False)
        self._n_sent += len(data)
        if self._n_sent > self._limit:
            raise TooLargeError(f"the compressed body is larger than {self._limit} bytes")
        # A body that is too large once decoded was refused with its last piece; the rest is
        # dropped.
        self._pieces = iter(()) if self._n_decoded > self._limit else decoder.decode(data)

    async def _drain(self) -> None:
        n_bytes = 0
        while self._has_more and n_bytes < _DRAIN_BYTES:
            message = await self._receive()
            self._has_more = message.get("more_body", False)
            n_bytes += len(message.get("body", b""))
        self._is_over = True
