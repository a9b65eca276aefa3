"""How large and how deep a request may be."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyctl.errors import RequestError, TooLargeError
from pyctl.server.errors import error_response

__all__ = ["MAX_BODY_BYTES", "BodyLimitMiddleware", "depth_error"]

MAX_BODY_BYTES = 32 * 2**20
"""About three times what a prompt of a million tokens takes as JSON, with every character escaped."""

_DRAIN_BYTES = 8 * MAX_BODY_BYTES


class BodyLimitMiddleware:
    """Reading a body of more than ``limit`` bytes raises TooLargeError in the application.

    The rest of the body is read and dropped before, since most clients look for an answer only after they have sent
    everything; a client that asks first (Expect: 100-continue) gets the answer at once.
    """

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if "expect" in headers and length.isdecimal() and int(length) > self._limit:
            return await error_response(self._error())(scope, receive, send)
        n_bytes = 0

        async def limited() -> Message:
            nonlocal n_bytes
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if n_bytes <= self._limit:
                return message
            while message.get("more_body", False) and n_bytes < _DRAIN_BYTES:
                message = await receive()
                n_bytes += len(message.get("body", b""))
            raise self._error()

        await self._app(scope, limited, send)

    def _error(self) -> TooLargeError:
        return TooLargeError(f"the body is larger than {self._limit} bytes")


def depth_error() -> RequestError:
    """What a RecursionError while reading a request means to the client."""
    return RequestError("the body is nested too deeply")
