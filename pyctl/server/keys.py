"""API keys: who may ask."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pyctl.errors import AuthenticationError
from pyctl.server.errors import error_response

__all__ = ["KeyMiddleware"]

_PUBLIC = ("/health", "/v1/health")


class KeyMiddleware:
    """Lets requests pass that carry one of ``keys``, as bearer token or as ``x-api-key``; all if there are none.

    Health is public; ``prefix`` stands before every path.
    """

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], prefix: str = "") -> None:
        self._app = app
        self._public = frozenset(prefix + path for path in _PUBLIC)
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or not self._keys
            or scope["path"] in self._public
            or self._known(Headers(scope=scope))
        ):
            await self._app(scope, receive, send)
        else:
            await error_response(AuthenticationError("Invalid API Key"))(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        given = headers.get("authorization") or headers.get("x-api-key") or ""
        key = given.removeprefix("Bearer ").encode("latin-1")
        return any(hmac.compare_digest(key, known) for known in self._keys)
