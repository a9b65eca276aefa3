"""Sends replies: the engine's events become one body, or a stream as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Event, Failed, Piece, Progress
from pyctl.errors import EngineError
from pyctl.requests.request_pool import run_until_disconnect
from pyctl.server.app_state import HttpService
from pyctl.server.http import JsonResponse, error_response, stream_head
from pyctl.server.middleware import may_read_prompts
from pyctl.server.reply import Reply
from pyctl.server.request_log import log_disconnect, log_done, log_error
from pyctl.server.request_span import RequestSpan, span_of

__all__ = ["ReplyResponse", "merged", "respond"]


def cache_header(known: Done | Progress) -> dict[str, str]:
    """Return the header ``x-pyctl-cache``: the source of the restored prompt, and tokens restored
    and evaluated.
    """
    if isinstance(known, Done):
        source = known.stats.source
        cached = known.stats.n_cached
        evaluated = known.stats.n_evaluated
    else:
        source = known.source
        cached = known.n_cached
        evaluated = known.n_prompt - known.n_cached
    return {"x-pyctl-cache": f"source={source}; cached={cached}; evaluated={evaluated}"}


async def merged(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """Yield (number of the handle, events that waited together) until all handles have ended."""
    if len(handles) == 1:  # by far the most common: nothing between the engine and the stream
        async for event in handles[0]:
            yield 0, [event, *handles[0].drain()]
        return
    arrivals: asyncio.Queue[tuple[int, list[Event]] | Exception | None] = asyncio.Queue()

    async def take(number: int, handle: RequestHandle) -> None:
        try:
            async for event in handle:
                arrivals.put_nowait((number, [event, *handle.drain()]))
            arrivals.put_nowait(None)
        except Exception as error:
            arrivals.put_nowait(error)

    tasks = [asyncio.ensure_future(take(number, handle)) for number, handle in enumerate(handles)]
    n_running = len(tasks)
    try:
        while n_running:
            item = await arrivals.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                n_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ReplyResponse:
    """An ASGI application that sends ``replies``, each made of the events of a handle; ``combine``
    makes one body of whole ones, in their order.

    When the client leaves, all work is cancelled. An error becomes a separate response as long as
    nothing has been sent, and an event after that. A stream starts with the first event, or after
    one ping interval without any.
    """

    def __init__(
        self,
        service: HttpService,
        replies: Sequence[Reply],
        handles: Sequence[RequestHandle],
        combine: Callable[[list[dict[str, Any]]], Any],
        span: RequestSpan,
    ) -> None:
        """Take replies that run already, with a handle for each; ``span`` gets their facts."""
        self._service = service
        self._replies = replies
        self._handles = handles
        self._combine = combine
        self._span = span
        self._running = service.shared.running
        ping = replies[0].options.ping_seconds
        default = service.shared.settings.ping_seconds
        self._ping_seconds = default if ping is None else ping
        self._sending_head = asyncio.Lock()
        self._begun = False
        self._has_head = False
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        reply = self._replies[0]
        if reply.id:
            self._running[reply.id] = (
                tuple(self._handles) if reply.options.reasoning_control else ()
            )
        make = self._stream if reply.options.stream else self._whole
        try:
            if not await run_until_disconnect(receive, make(path, scope, receive, send)):
                n_predicted = sum(max(each.n_predicted, len(each.tokens)) for each in self._replies)
                self._span.is_cancelled = True
                log_disconnect(path, reply.progress, n_predicted)
        finally:
            self._running.pop(reply.id, None)
            for handle in self._handles:
                handle.cancel()

    async def _whole(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            finals = [
                await _finished(*each) for each in zip(self._handles, self._replies, strict=True)
            ]
            bodies = [reply.whole(done) for reply, done in zip(self._replies, finals, strict=True)]
            headers = cache_header(finals[0]) if len(finals) == 1 else {}
            response: Response = JsonResponse(self._combine(bodies), headers=headers)
            for done in finals:
                self._span.replies.append(done)
                log_done(path, done, self._service)
        except Exception as error:
            self._span.error = error
            log_error(path, error)
            response = error_response(error, self._replies[-1].error_form)
        await response(scope, receive, send)

    async def _stream(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events of all replies as one stream.

        An error before the first byte is a response of its status; after that it is an event, and
        the last one.
        """
        self._last_sent = asyncio.get_running_loop().time()
        reply = self._replies[-1]
        pinger = asyncio.ensure_future(self._ping(send, self._ping_seconds))
        try:
            async with aclosing(self._batches(path)) as batches:
                async for batch in batches:
                    await self._send(send, batch)
            await self._send(send, reply.end)
        except Exception as error:
            pinger.cancel()
            self._span.error = error
            log_error(path, error)
            if not self._begun:
                return await error_response(error, reply.error_form)(scope, receive, send)
            await self._send(send, reply.error_event(error))
        finally:
            pinger.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _batches(self, path: str) -> AsyncGenerator[bytes, None]:
        """Yield frames as they come; frames of events that wait together are joined. Raises the
        error of a Failed.
        """
        async with aclosing(merged(self._handles)) as batches:
            async for number, events in batches:
                frames: list[bytes] = []
                reply = self._replies[number]
                for event in events:
                    if isinstance(event, Failed):
                        if any(frames):
                            yield b"".join(frames)
                        raise event.error
                    if isinstance(event, Progress) and event.queue_position:
                        if waiting := reply.waits(event):
                            frames.append(waiting)
                        continue
                    frames.append(_frames(reply, event))
                    if isinstance(event, Done):
                        self._span.replies.append(event)
                        log_done(path, event, self._service)
                if frames:  # nothing is sent before the headers have the counts of the cache
                    yield b"".join(frames)

    async def _send(self, send: Send, body: bytes) -> None:
        if not self._has_head:
            await self._send_head(send)
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})
        self._last_sent = asyncio.get_running_loop().time()

    async def _send_head(self, send: Send) -> None:
        """Send the head, or wait until the other one of stream and ping has sent it."""
        async with self._sending_head:
            if self._begun:
                return
            self._begun = True
            progress = self._replies[0].progress if len(self._replies) == 1 else None
            headers = cache_header(progress) if progress is not None else {}
            await send(stream_head(self._replies[0].media_type, headers))
            self._has_head = True

    async def _ping(self, send: Send, seconds: int) -> None:
        """Send a sign of life whenever the stream has been silent for ``seconds``; never if that is
        not above 0.
        """
        loop = asyncio.get_running_loop()
        while seconds > 0:
            rest = self._last_sent + seconds - loop.time()
            if rest > 0:
                await asyncio.sleep(rest)
            else:
                await self._send(send, self._replies[-1].ping())


def _frames(reply: Reply, event: Progress | Piece | Done) -> bytes:
    if isinstance(event, Piece):
        return reply.continued(event)
    return reply.progressed(event) if isinstance(event, Progress) else reply.ended(event)


async def _finished(handle: RequestHandle, reply: Reply) -> Done:
    """Take in all events; raise the error of a Failed."""
    event: Event
    async for event in handle:
        if isinstance(event, Piece):
            reply.collect(event)
        elif isinstance(event, Failed):
            raise event.error
        elif isinstance(event, Done):
            return event
    raise EngineError("the reply ended without a result")


def respond(
    service: HttpService,
    request: HttpRequest,
    replies: Sequence[Reply],
    combine: Callable[[list[dict[str, Any]]], Any] = lambda bodies: bodies[0],
) -> ReplyResponse:
    """Submit ``replies`` to the engine and answer ``request`` with them. Raises ContextSizeError,
    UnavailableError.

    All replies of all APIs start here, so this is where the client's right to read texts enters
    them.
    """
    handles: list[RequestHandle] = []
    may_see = may_read_prompts(request, service.shared.settings)
    span = span_of(request.scope)
    span.requests = [reply.request for reply in replies]
    span.is_streamed = replies[0].options.stream
    try:
        for reply in replies:
            reply.may_read_prompts = may_see
            sections = reply.request.prompt.sections
            before = service.shared.model_history.record(sections, service.model)
            reply.handle = service.worker.submit(
                replace(reply.request, may_read_prompts=may_see, model_before=before)
            )
            handles.append(reply.handle)
    except Exception:
        for handle in handles:
            handle.cancel()
        raise
    return ReplyResponse(service, replies, handles, combine, span)
