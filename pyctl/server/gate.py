"""What clients get before the model is loaded."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from pyctl.errors import UnavailableError
from pyctl.server.cors import Cors, CorsMiddleware
from pyctl.server.errors import error_response

__all__ = ["Gate"]


class Gate:
    """Answers everything with 503 until it is opened; from then on passes everything to an application.

    `open` may be called from any thread.
    """

    def __init__(self, cors: Cors) -> None:
        self._app: ASGIApp = CorsMiddleware(_loading, cors)

    def open(self, app: ASGIApp) -> None:
        """Let requests through to ``app``."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _loading(scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(UnavailableError("Loading model"))(scope, receive, send)
