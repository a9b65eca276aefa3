"""Answers to requests whose model may have to be loaded first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyctl.requests.request_pool import client_left
from pyctl.server.app_state import HttpService
from pyctl.server.http import PING, frame, stream_head
from pyctl.server.models import Lease, Models, ServedModel, cancel_lease

__all__ = ["LoadingResponse"]


class LoadingResponse:
    """A response that waits until ``model`` is loaded, then sends the response of ``answer`` to its
    service; the model stays loaded for it.

    There is no time-out. A client that asked for a stream gets a comment every ``ping_seconds`` (0
    or less: none) while it waits; an error after the first one is an event of the stream, called
    ``error_event`` unless that is empty. A client that disconnects leaves the queue.
    """

    def __init__(
        self,
        models: Models,
        model: ServedModel,
        answer: Callable[[HttpService], Awaitable[ASGIApp]],
        as_response: Callable[[Exception], Response],
        *,
        ping_seconds: float = 0.0,
        error_event: bytes = b"",
    ) -> None:
        self._models = models
        self._model = model
        self._answer = answer
        self._as_response = as_response
        self._ping_seconds = ping_seconds
        self._error_event = error_event
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = self._models.acquire(self._model)
        lease = asyncio.wrap_future(asked)
        try:
            if not lease.done() and not await self._wait(lease, receive, send):
                return
            response = await self._response(lease)
            await response(scope, receive, self._after_comments(send) if self._begun else send)
            if self._begun:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            lease.cancel()
            cancel_lease(asked)

    async def _wait(self, lease: asyncio.Future[Lease], receive: Receive, send: Send) -> bool:
        """Wait for the model; return False if the client has disconnected."""
        gone = asyncio.ensure_future(client_left(receive))
        seconds = self._ping_seconds if self._ping_seconds > 0 else None
        try:
            while True:
                await asyncio.wait(
                    (lease, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if lease.done() or gone.done():
                    return lease.done()
                if not self._begun:
                    self._begun = True
                    await send(stream_head())
                await send({"type": "http.response.body", "body": PING, "more_body": True})
        finally:
            gone.cancel()

    async def _response(self, lease: asyncio.Future[Lease]) -> ASGIApp:
        try:
            return await self._answer((await lease).service)
        except Exception as error:
            return self._as_response(error)

    def _after_comments(self, send: Send) -> Send:
        """Send a response after the comments: its body only, as an event if it is an error."""
        is_error = False

        async def later(message: Message) -> None:
            nonlocal is_error
            if message["type"] == "http.response.start":
                is_error = message["status"] >= 400
                return
            body = message.get("body", b"")
            if is_error and body:
                name = b"event: " + self._error_event + b"\n" if self._error_event else b""
                body = name + frame(body)
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})

        return later
