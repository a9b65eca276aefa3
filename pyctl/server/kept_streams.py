"""Streams that outlive their connections, by llama-server's interface: ``X-Conversation-Id`` and
/v1/stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeAlias

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyctl.errors import NotFoundError, RequestError
from pyctl.requests.json_text import decode
from pyctl.requests.request_pool import run_until_disconnect
from pyctl.server.http import error_response, requested_key
from pyctl.server.request_span import span_of
from pyctl.settings.limit import limit

__all__ = [
    "HEADER",
    "KeptResponse",
    "KeptStream",
    "KeptStreams",
    "keep_stream",
    "send_stream",
    "stream_key",
]

log = logging.getLogger(__name__)

HEADER = "x-conversation-id"
"""The header that names the conversation whose stream is kept."""

_MAX_STREAMS = limit(
    32,
    "streams that outlive their connections",
    "the oldest that has ended is removed; without one, the new one is refused",
    "reply",
)
_MAX_BYTES = limit(
    4 << 20, "kept bytes of such a stream", "the first bytes are dropped", "reply", "bytes"
)
_MAX_ID_CHARS = limit(256, "`X-Conversation-Id`", "400", "request", "characters")
_ENDED_SECONDS = limit(
    300.0, "keeping an ended stream that lost its connection", "404", "reply", "s"
)
_UNREAD_SECONDS = limit(
    600.0, "time that such a stream runs without a reader", "its reply ends", "reply", "s"
)

Key: TypeAlias = tuple[str, str]
"""The API key that asked, empty without one, and the client's id."""


def stream_key(request: Request, name: str) -> Key:
    """Return the key of this client's stream ``name``. Raises RequestError."""
    if not name:
        raise RequestError("Missing conversation id in path")
    if len(name) > _MAX_ID_CHARS:
        raise RequestError(f"an id of a conversation has at most {_MAX_ID_CHARS} characters")
    return requested_key(request.headers), name


class KeptStream:
    """The bytes of one answer, for any number of readers; the first ones go if there are more than
    ``max_bytes``.
    """

    def __init__(self, now: Callable[[], float], max_bytes: int = _MAX_BYTES) -> None:
        # Unix time; 0 while it runs
        self.started = now()
        self.ended = 0.0
        self.head: Message | None = None  # the start of the response
        self.n_dropped = 0
        self.cancelled = asyncio.Event()
        self._now = now
        self._max_bytes = max_bytes
        self._data = bytearray()
        self._news = asyncio.Event()  # set, and another one made, with each change
        self._n_readers = 0
        self._last_read = self.started

    @property
    def n_bytes(self) -> int:
        """Bytes that it has had so far."""
        return self.n_dropped + len(self._data)

    def append(self, part: bytes) -> None:
        """Add a part of the answer. A stream that had no reader for too long is cancelled."""
        self._data += part
        if (surplus := len(self._data) - self._max_bytes) > 0:
            del self._data[:surplus]
            self.n_dropped += surplus
        if not self._n_readers and self._now() - self._last_read > _UNREAD_SECONDS:
            self.cancelled.set()
        self.wake()

    def end(self) -> None:
        """End the stream: no bytes follow."""
        self.ended = self.ended or self._now()
        self.wake()

    def wake(self) -> None:
        """Notify those who wait that something has changed."""
        self._news.set()
        self._news = asyncio.Event()

    async def wait_for_headers(self) -> bool:
        """Wait for ``head``; return False if the answer ends without one."""
        while self.head is None and not self.ended:
            await self._news.wait()
        return self.head is not None

    async def read(self, start: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes from ``start`` on as they come. Ends early if a slow reader's bytes have
        been dropped.
        """
        self._n_readers += 1
        try:
            while start >= self.n_dropped:
                news = self._news
                part = bytes(self._data[start - self.n_dropped :])
                start += len(part)
                if part:
                    yield part
                elif self.ended:
                    return
                else:
                    await news.wait()
        finally:
            self._n_readers -= 1
            self._last_read = self._now()


class KeptStreams:
    """The streams by their keys, of ``max_bytes`` each, bounded in number and in seconds after
    their end. Only the event loop uses them.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.time,
        max_streams: int = _MAX_STREAMS,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self.now = now
        self.max_streams = max_streams
        self.max_bytes = max_bytes
        self._streams: dict[Key, KeptStream] = {}  # the oldest first
        self._working: set[asyncio.Future[None]] = set()

    def start(self, work: Awaitable[None]) -> asyncio.Future[None]:
        """Start ``work``, for which no connection waits."""
        task = asyncio.ensure_future(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return task

    def open(self, key: Key) -> KeptStream | None:
        """Return a new stream, which ends the one of the same key; None if too many run."""
        self.expire()
        self.drop(key)
        if len(self._streams) >= self.max_streams:
            oldest = next((old for old, stream in self._streams.items() if stream.ended), None)
            if oldest is None:
                return None
            del self._streams[oldest]
        stream = self._streams[key] = KeptStream(self.now, self.max_bytes)
        return stream

    def get(self, key: Key) -> KeptStream:
        """Return the stream of ``key``. Raises NotFoundError."""
        self.expire()
        if key not in self._streams:
            raise NotFoundError("Stream not found or expired")
        return self._streams[key]

    def find_variants(self, key: Key) -> list[tuple[str, KeptStream]]:
        """Return the streams of ``key`` and of its variants ``<id>::<model>``."""
        self.expire()
        owner, name = key
        return [
            (other, stream)
            for (their, other), stream in self._streams.items()
            if their == owner and (other == name or other.startswith(name + "::"))
        ]

    def drop(self, key: Key) -> None:
        """Forget the stream of ``key`` and end its work, if it is there."""
        if (stream := self._streams.pop(key, None)) is not None:
            stream.cancelled.set()

    def end(self, key: Key, stream: KeptStream) -> None:
        """Complete ``stream``. One that never started is forgotten, as llama-server does with
        refused requests.
        """
        stream.end()
        if stream.head is None and self._streams.get(key) is stream:
            del self._streams[key]
        asyncio.get_running_loop().call_later(_ENDED_SECONDS + 1, self.expire)

    def expire(self) -> None:
        """Forget the streams that ended too long ago."""
        now = self.now()
        for key, stream in tuple(self._streams.items()):
            if stream.ended and now - stream.ended > _ENDED_SECONDS:
                del self._streams[key]


class _StreamLookup(msgspec.Struct, frozen=True):
    stream: object = False


Answer: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]


async def keep_stream(streams: KeptStreams, answer: Answer, request: Request) -> ASGIApp:
    """Return the response of ``answer``, which raises nothing, to ``request``, which names a
    conversation; its stream is kept.
    """
    body = await request.body()
    try:
        streams_wanted = decode(body, _StreamLookup).stream is True
    except (msgspec.ValidationError, RequestError):
        streams_wanted = False
    key = stream_key(request, request.headers[HEADER])
    stream = streams.open(key) if streams_wanted else None
    return (
        await answer(request)
        if stream is None
        else KeptResponse(streams, key, stream, body, answer)
    )


class KeptResponse:
    """A response that sends the answer of ``answer`` to a request with ``body``, whose work
    continues when the client disconnects.

    To the work it looks as if the client left when ``stream`` is dropped. Answers that are no
    streams, such as errors, go to the client and are not kept.
    """

    def __init__(
        self, streams: KeptStreams, key: Key, stream: KeptStream, body: bytes, answer: Answer
    ) -> None:
        self._streams = streams
        self._key = key
        self._stream = stream
        self._body: bytes | None = body
        self._answer = answer
        self._others: list[Message] = []  # of an answer that is not a stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._streams.start(self._work(scope))
        await run_until_disconnect(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await self._stream.wait_for_headers():
            await send_stream(self._stream, 0, send)
        elif self._stream.cancelled.is_set():
            await error_response(RequestError("the request was cancelled"))(scope, receive, send)
        else:
            for message in self._others:
                await send(message)

    async def _work(self, scope: Scope) -> None:
        request = Request(scope, self._receive)
        try:
            with span_of(scope).hold():
                answer = await self._answer(request)
                await answer(scope, self._receive, self._store)
        except Exception:
            log.exception("a kept stream failed")
        finally:
            self._streams.end(self._key, self._stream)

    async def _receive(self) -> Message:
        body = self._body
        self._body = None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._stream.cancelled.wait()
        return {"type": "http.disconnect"}

    async def _store(self, message: Message) -> None:
        if (
            message["type"] == "http.response.start"
            and (b"content-type", b"text/event-stream") in message["headers"]
        ):
            self._stream.head = message
            self._stream.wake()
        elif self._stream.head is None:
            self._others.append(message)
        else:
            self._stream.append(message.get("body", b""))


async def send_stream(stream: KeptStream, start: int, send: Send) -> None:
    """Send a stream that has started as a response, from byte ``start`` on."""
    assert stream.head is not None
    await send(stream.head)
    async with aclosing(stream.read(start)) as parts:
        async for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})
