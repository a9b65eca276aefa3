"""The targets of requests."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["AbsoluteFormMiddleware"]

_SCHEMES = ("http://", "https://")


class AbsoluteFormMiddleware:
    """The middleware that takes ``GET http://HOST/path``, as clients of a proxy write it, for ``GET
    /path`` with HOST as its Host header.

    RFC 9112, section 3.2.2: a server must accept this form, and ignore another Host header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].lower().startswith(_SCHEMES):
            scope = _in_origin_form(scope)
        await self._app(scope, receive, send)


def _in_origin_form(scope: Scope) -> Scope:
    host, _, path = scope["raw_path"].partition(b"//")[2].partition(b"/")
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    return {
        **scope,
        "path": "/" + scope["path"].partition("//")[2].partition("/")[2],
        "raw_path": b"/" + path,
        "headers": [(b"host", host), *headers],
    }
