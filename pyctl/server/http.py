"""The bytes of answers: JSON bodies, server-sent events, lines of JSON, and errors in the form of
each API.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from pyctl.errors import (
    AuthenticationError,
    ContentCodingError,
    ContextSizeError,
    ForbiddenError,
    LostThreadError,
    NotFoundError,
    NotSupportedError,
    PyctlError,
    RequestError,
    ThreadError,
    ThreadMismatchError,
    TooLargeError,
    UnavailableError,
)

__all__ = [
    "PING",
    "ErrorForm",
    "JsonResponse",
    "anthropic_error",
    "encode",
    "error_body",
    "error_form",
    "error_response",
    "frame",
    "http_exceptions",
    "json_lines",
    "named_frames",
    "ollama_error",
    "owner_of",
    "requested_key",
    "stream_head",
]

encode = msgspec.json.Encoder().encode
"""Any plain value to JSON bytes; infinities become null."""

PING = b":\n\n"
"""A comment, which shows clients that a silent stream is alive."""


def requested_key(headers: Headers) -> str:
    """Return the key that a client sent, as bearer token or as ``x-api-key``; empty without one.
    "bearer" has any case.
    """
    value = headers.get("authorization") or headers.get("x-api-key") or ""
    return value[7:].lstrip(" ") if value[:7].lower() == "bearer " else value


def owner_of(headers: Headers) -> bytes:
    """Return a digest of the key of a client, by which only it finds its earlier requests."""
    return hashlib.sha256(requested_key(headers).encode()).digest()


_LINE_ENDS = (
    (b"\xe2\x80\xa8", rb"\u2028"),
    (b"\xe2\x80\xa9", rb"\u2029"),
    (b"\xc2\x85", rb"\u0085"),
)
"""Characters in UTF-8 at which Unicode ends a line, and their escapes in JSON, which escapes all
others itself.
"""


def without_line_ends(body: bytes) -> bytes:
    """Return JSON text with escapes for Unicode's ends of lines, at which clients split streams
    (httpx's ``iter_lines``).
    """
    for end, escape in _LINE_ENDS:
        if end in body:
            body = body.replace(end, escape)
    return body


def frame(body: bytes) -> bytes:
    """Return ``body``, JSON text, as one server-sent event (WHATWG HTML, section 9.2)."""
    return b"data: " + without_line_ends(body) + b"\n\n"


def stream_head(
    media_type: str = "text/event-stream", more: Mapping[str, str] = MappingProxyType({})
) -> Message:
    """Return the start of a stream for ASGI, with ``more`` headers."""
    headers = {
        "content-type": media_type,
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        **more,
    }
    made = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": made}


def named_frames(events: Iterable[dict[str, Any]]) -> bytes:
    """Return ``events`` as server-sent events that are named after their types."""
    return b"".join(
        b"event: " + event["type"].encode() + b"\n" + frame(encode(event)) for event in events
    )


def json_lines(values: Iterable[dict[str, Any]]) -> bytes:
    """Return ``values`` as JSON, each on a separate line."""
    return b"".join(without_line_ends(encode(value)) + b"\n" for value in values)


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
    LostThreadError: (404, "not_found_error"),
    TooLargeError: (413, "invalid_request_error"),
    ContentCodingError: (415, "invalid_request_error"),
    NotSupportedError: (501, "not_supported_error"),
    UnavailableError: (503, "unavailable_error"),
    BaseException: (500, "server_error"),
}


ErrorForm: TypeAlias = Callable[[BaseException], dict[str, Any]]
"""An error as an API writes it."""


def _kind(error: BaseException) -> tuple[int, str]:
    """Return the status and llama-server's type of an error."""
    return next(_KINDS[base] for base in type(error).__mro__ if base in _KINDS)


def error_body(error: BaseException) -> dict[str, Any]:
    """Return ``{"error": {"code", "message", "type"}}``; the text of an unexpected error is not
    shown.
    """
    code, kind = _kind(error)
    message = str(error) if isinstance(error, PyctlError) else "internal error"
    body: dict[str, Any] = {"code": code, "message": message, "type": kind}
    if isinstance(error, ContextSizeError):
        body |= {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
    return {"error": body}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def anthropic_error(error: BaseException) -> dict[str, Any]:
    """Return ``error`` with Anthropic's types, and in its words where a prompt does not fit: agents
    then shorten it.
    """
    body = {"type": "error", **error_body(error)}
    body["error"]["type"] = _ANTHROPIC_TYPES.get(body["error"]["code"], "invalid_request_error")
    if isinstance(error, ContextSizeError):
        too_long = f"prompt is too long: {error.n_prompt_tokens} tokens > {error.n_ctx} maximum"
        body["error"]["message"] = f"{too_long}; {error}"
    details = _thread_details(error)
    if details:
        body["error"]["details"] = details
    return body


_THREAD_CODES: dict[type[BaseException], str] = {
    ThreadError: "thread_unsupported_request",
    ThreadMismatchError: "thread_fingerprint_mismatch",
    LostThreadError: "thread_not_found",
}
"""Anthropic's codes. By the first its SDK sends the whole conversation again without a thread, by
the last it does so and starts a new thread.
"""


def _thread_details(error: BaseException) -> dict[str, Any]:
    """Return the ``details`` of an error about a thread; empty for others."""
    code = _THREAD_CODES.get(type(error))
    if code is None:
        return {}
    if isinstance(error, ThreadError) and error.unsupported:
        return {"error_code": code, "unsupported": list(error.unsupported)}
    return {"error_code": code}


def ollama_error(error: BaseException) -> dict[str, Any]:
    """Return ``{"error": text}``."""
    return {"error": error_body(error)["error"]["message"]}


_FORMS: tuple[tuple[str, ErrorForm], ...] = (
    ("/v1/messages", anthropic_error),
    ("/api/", ollama_error),
)


def error_form(path: str) -> ErrorForm:
    """Return the form of errors at ``path``, which is without --api-prefix."""
    return next((form for start, form in _FORMS if path.startswith(start)), error_body)


def error_response(error: BaseException, form: ErrorForm = error_body) -> Response:
    """Return ``error`` as the whole answer, with ``Retry-After`` where another try may help."""
    headers: dict[str, str] = {}
    if isinstance(error, UnavailableError) and error.retry_seconds:
        headers["retry-after"] = str(error.retry_seconds)
    if isinstance(error, ContentCodingError):
        headers["accept-encoding"] = error.CODINGS
    if isinstance(error, NotSupportedError):
        # OpenAI's and Anthropic's SDKs try again after any status of 500 or more, unless told not
        # to.
        headers["x-should-retry"] = "false"
    return JsonResponse(form(error), status_code=_kind(error)[0], headers=headers)


_MAX_SHOWN = 200
"""Characters of a path in an error."""


def http_exceptions(prefix: str) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return Starlette's handlers of its errors; a wrong method is an unknown path, as in
    llama-server.
    """

    async def respond(request: Request, error: Exception) -> Response:
        path = request.url.path
        if isinstance(error, HTTPException) and error.status_code in (404, 405):
            method = f"{request.method} " if error.status_code == 405 else ""
            error = NotFoundError(f"no such endpoint: {method}{path[:_MAX_SHOWN]}")
        return error_response(error, error_form(path.removeprefix(prefix)))

    return respond
