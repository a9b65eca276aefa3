"""Cross-origin requests: which web pages may ask, by llama-server's rules."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Cors", "CorsMiddleware"]

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})
_EXPOSED = "x-pyctl-cache"


@dataclass(frozen=True)
class Cors:
    """``origins`` is ``*`` for all, ``localhost`` for pages of this machine, or a comma-separated list.

    ``methods`` and ``headers`` are comma-separated lists, too.
    """

    origins: str = "*"
    methods: str = "GET, POST, DELETE, OPTIONS"
    headers: str = "*"
    credentials: bool = True

    def allowed(self, origin: str) -> str:
        """The value of Access-Control-Allow-Origin for a page of ``origin``; empty for none."""
        if self.origins == "*":
            # A star would shut out requests with credentials, so the origin is named.
            return origin if self.credentials else "*"
        if self.origins == "localhost":
            return origin if _host(origin) in _LOCAL else ""
        return origin if origin in {each.strip() for each in self.origins.split(",")} else ""


class CorsMiddleware:
    """Adds the headers of ``cors`` to every response and answers OPTIONS itself, since browsers send it without a key.

    Where llama-server allows the headers ``*``, which browsers do not take for Authorization, the headers that the
    browser asks for are named.
    """

    def __init__(self, app: ASGIApp, cors: Cors) -> None:
        self._app, self._cors = app, cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        asked = Headers(scope=scope)
        added = self._headers(asked)
        if scope["method"] == "OPTIONS":
            headers = self._cors.headers
            if headers == "*":
                headers = asked.get("access-control-request-headers") or "*"
            added |= {
                "access-control-allow-credentials": "true" if self._cors.credentials else "false",
                "access-control-allow-methods": self._cors.methods,
                "access-control-allow-headers": headers,
            }
            return await Response(headers=added | {"content-type": "text/html"})(scope, receive, send)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(added)
            await send(message)

        await self._app(scope, receive, with_headers)

    def _headers(self, asked: Headers) -> dict[str, str]:
        allowed = self._cors.allowed(asked.get("origin", ""))
        if not allowed:
            return {}
        headers = {"access-control-allow-origin": allowed, "access-control-expose-headers": _EXPOSED}
        if self._cors.credentials:
            headers["access-control-allow-credentials"] = "true"
        if allowed != "*":
            headers["vary"] = "Origin"
        return headers


def _host(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""
