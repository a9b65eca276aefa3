"""The bytes of answers: JSON bodies, server-sent events, and what errors look like in both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pyctl.errors import (
    AuthenticationError,
    BusyError,
    ContextSizeError,
    ForbiddenError,
    NotFoundError,
    NotSupportedError,
    PyctlError,
    RequestError,
    TooLargeError,
    UnavailableError,
)

__all__ = [
    "PING",
    "JsonResponse",
    "encode",
    "error_body",
    "error_event",
    "error_response",
    "frame",
    "http_exception",
    "named_frames",
    "retry_header",
]

encode = msgspec.json.Encoder().encode
"""Any plain value to JSON bytes; infinities become null."""

PING = b":\n\n"
"""A comment, which tells clients that a silent stream is alive."""


def frame(body: bytes) -> bytes:
    """``body`` as one server-sent event."""
    return b"data: " + body + b"\n\n"


def named_frames(events: Iterable[dict[str, Any]]) -> bytes:
    """``events`` as server-sent events that are named after their types."""
    return b"".join(b"event: " + event["type"].encode() + b"\n" + frame(encode(event)) for event in events)


class JsonResponse(Response):
    """A JSON body under llama-server's content type."""

    media_type = "application/json; charset=utf-8"

    def render(self, content: Any) -> bytes:
        return encode(content)


_KINDS: dict[type[BaseException], tuple[int, str]] = {
    RequestError: (400, "invalid_request_error"),
    ContextSizeError: (400, "exceed_context_size_error"),
    AuthenticationError: (401, "authentication_error"),
    ForbiddenError: (403, "permission_error"),
    NotFoundError: (404, "not_found_error"),
    TooLargeError: (413, "invalid_request_error"),
    NotSupportedError: (501, "not_supported_error"),
    UnavailableError: (503, "unavailable_error"),
    BaseException: (500, "server_error"),
}


def error_body(error: BaseException) -> dict[str, Any]:
    """``{"error": {"code", "message", "type"}}``; the text of an unexpected error is not shown."""
    code, kind = next(_KINDS[base] for base in type(error).__mro__ if base in _KINDS)
    message = str(error) if isinstance(error, PyctlError) else "internal error"
    body: dict[str, Any] = {"code": code, "message": message, "type": kind}
    if isinstance(error, ContextSizeError):
        body |= {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
    return {"error": body}


def error_response(error: BaseException) -> Response:
    """``error`` as the whole answer."""
    body = error_body(error)
    return JsonResponse(body, status_code=body["error"]["code"], headers=retry_header(error))


def retry_header(error: BaseException) -> dict[str, str]:
    """``Retry-After`` where another try may help."""
    return {"retry-after": str(error.retry_seconds)} if isinstance(error, BusyError) else {}


def error_event(error: BaseException) -> bytes:
    """``error`` as the last event of a stream that has begun."""
    return frame(encode(error_body(error)))


async def http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own errors in the same form; a wrong method is an unknown path, as it is to llama-server."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        error = NotFoundError("File Not Found")
    return error_response(error)
