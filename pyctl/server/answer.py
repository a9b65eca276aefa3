"""One HTTP answer made of the engine's events, streamed or whole, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyctl.engine.request import Done, Event, Failed, Piece, Progress
from pyctl.errors import EngineError
from pyctl.server.journal import TextOf, cache_header, ended, failed, left
from pyctl.server.json import JsonResponse
from pyctl.server.merging import merged
from pyctl.server.reply import Reply
from pyctl.server.settings import TicketLike

__all__ = ["Answer", "Run"]


@dataclass(frozen=True)
class Run:
    """A request on its way through the engine, and the reply that is made of its events."""

    ticket: TicketLike
    reply: Reply


class Answer:
    """An ASGI application that sends the replies of ``runs``; ``combine`` makes one body of whole ones, in their order.

    When the client leaves, all work is cancelled. An error becomes a response of its own as long as nothing has been
    sent, and an event after that. A stream begins with the first event, or after one ping interval without any.
    ``text_of`` shows tokens in the log.
    """

    def __init__(self, runs: Sequence[Run], combine: Callable[[list[dict[str, Any]]], Any], text_of: TextOf) -> None:
        self._runs = runs
        self._combine = combine
        self._text_of = text_of
        self._options = runs[0].reply.options
        self._sending = asyncio.Lock()
        self._begun = False
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        make = self._stream if self._options.stream else self._whole
        work = asyncio.ensure_future(make(path, scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for run in self._runs:
                run.ticket.cancel()
            if not work.done():
                left(path, [run.reply for run in self._runs])
                work.cancel()
            gone.cancel()
            await asyncio.wait((work, gone))
        if not work.cancelled():
            work.result()

    async def _whole(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            finals = [await _finished(run) for run in self._runs]
            bodies = [run.reply.whole(done) for run, done in zip(self._runs, finals, strict=True)]
            headers = cache_header(finals[0]) if len(finals) == 1 else {}
            response: Response = JsonResponse(self._combine(bodies), headers=headers)
            for done in finals:
                ended(path, done, self._text_of)
        except Exception as error:
            failed(path, error)
            response = self._runs[-1].reply.error_response(error)
        await response(scope, receive, send)

    async def _stream(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._last_sent = asyncio.get_running_loop().time()
        reply = self._runs[-1].reply
        pinger = asyncio.ensure_future(self._ping(send, self._options.ping_seconds))
        try:
            async with aclosing(self._batches(path)) as batches:
                async for batch in batches:
                    await self._send(send, batch)
            await self._send(send, reply.end)
        except Exception as error:
            pinger.cancel()
            failed(path, error)
            if not self._begun:
                return await reply.error_response(error)(scope, receive, send)
            await self._send(send, reply.error_event(error))
        finally:
            pinger.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _batches(self, path: str) -> AsyncGenerator[bytes, None]:
        """What can be sent, as it comes; events that wait together are sent together. Raises what a Failed holds."""
        async with aclosing(merged([run.ticket for run in self._runs])) as found:
            async for number, events in found:
                frames: list[bytes] = []
                for each in events:
                    if isinstance(each, Failed):
                        if any(frames):
                            yield b"".join(frames)
                        raise each.error
                    frames.append(_frames(self._runs[number].reply, each))
                    if isinstance(each, Done):
                        ended(path, each, self._text_of)
                yield b"".join(frames)

    async def _send(self, send: Send, body: bytes) -> None:
        async with self._sending:
            if not self._begun:
                self._begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self._headers()})
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        self._last_sent = asyncio.get_running_loop().time()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        progress = self._runs[0].reply.progress if len(self._runs) == 1 else None
        headers = {
            "content-type": "text/event-stream",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **(cache_header(progress) if progress is not None else {}),
        }
        return [(name.encode(), value.encode()) for name, value in headers.items()]

    async def _ping(self, send: Send, seconds: int) -> None:
        """Send a sign of life whenever the stream has been silent for ``seconds``; never if that is not above 0."""
        loop = asyncio.get_running_loop()
        while seconds > 0:
            rest = self._last_sent + seconds - loop.time()
            if rest > 0:
                await asyncio.sleep(rest)
            else:
                await self._send(send, self._runs[-1].reply.ping())


def _frames(reply: Reply, event: Progress | Piece | Done) -> bytes:
    if isinstance(event, Piece):
        return reply.continued(event)
    return reply.progressed(event) if isinstance(event, Progress) else reply.ended(event)


async def _finished(run: Run) -> Done:
    """Take in all events; raises what a Failed holds."""
    event: Event
    async for event in run.ticket:
        if isinstance(event, Piece):
            run.reply.keep(event)
        elif isinstance(event, Failed):
            raise event.error
        elif isinstance(event, Done):
            return event
    raise EngineError("the reply ended without a result")


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
