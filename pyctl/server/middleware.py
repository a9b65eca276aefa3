"""The checks before an endpoint: a gate until the model is loaded, then keys, and origins by
llama-server's rules.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Collection
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyctl.errors import AuthenticationError, ForbiddenError, RequestError
from pyctl.server.http import error_form, error_response, requested_key
from pyctl.server.request_target import in_origin_form
from pyctl.server.server_settings import Cors, ServerSettings
from pyctl.settings.limit import limit

__all__ = [
    "CorsMiddleware",
    "KeyMiddleware",
    "LoadingApp",
    "check_origin",
    "depth_error",
    "is_own",
    "may_read_prompts",
]

log = logging.getLogger("pyctl")

HELD_SECONDS = limit(
    600.0, "a request that waits for the model to be loaded", "503 with Retry-After", "request", "s"
)

MAX_HELD = limit(
    256, "requests that wait for the only model to be loaded", "503 with Retry-After", "process"
)


class LoadingApp:
    """An application that passes requests to one application until `open`, and to another from then
    on.

    An earlier POST is held until then, ``max_held`` at once and up to ``seconds``, since client
    libraries try again only twice. A GET is answered at once, and so is a POST to one of ``early``
    paths. `open` and `close` are thread-safe.
    """

    def __init__(
        self,
        loading: ASGIApp,
        seconds: float = HELD_SECONDS,
        early: Collection[str] = (),
        max_held: int = MAX_HELD,
    ) -> None:
        self._app = loading
        self._seconds = seconds
        self._early = early
        self._max_held = max_held
        self._is_waiting = True
        self._opened = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.n_held = 0

    def open(self, app: ASGIApp) -> None:
        """Let requests through to ``app``."""
        self._app = app
        self.close()

    def close(self) -> None:
        """Stop holding requests."""
        self._is_waiting = False
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is gone
                self._loop.call_soon_threadsafe(self._opened.set)

    async def _wait_for_model(self) -> None:
        """Wait until requests are held no more, or for the maximum time."""
        if self.n_held >= self._max_held:
            return
        self._loop = (
            asyncio.get_running_loop()
        )  # first: `close`, on another thread, looks for it last
        if not self._is_waiting:
            return
        self.n_held += 1
        try:
            await asyncio.wait_for(self._opened.wait(), self._seconds)
        except asyncio.TimeoutError:
            pass
        finally:
            self.n_held -= 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            scope = in_origin_form(scope)
            if self._is_waiting and scope["method"] == "POST" and scope["path"] not in self._early:
                await self._wait_for_model()
            await self._app(scope, receive, send)
        except asyncio.CancelledError:  # only at the very end: requests are not cancelled before
            log.warning("%s: abandoned, the server is shutting down", scope.get("path", ""))


_PUBLIC = ("/health", "/v1/health", "/", "/index.html")


class KeyMiddleware:
    """The middleware that lets requests pass that carry one of ``keys``, as bearer token or as
    ``x-api-key``; all if there are none.

    Health is public, and so are the ``files`` of the page; ``prefix`` stands before every path.
    """

    def __init__(
        self, app: ASGIApp, keys: tuple[str, ...], prefix: str = "", files: Collection[str] = ()
    ) -> None:
        self._app = app
        self._prefix = prefix
        self._public = frozenset(prefix + path for path in _PUBLIC)
        self._files = frozenset(f"{prefix}/page/{name}" for name in files)
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            not self._keys
            or scope["path"] in self._public
            or (scope["method"] in ("GET", "HEAD") and scope["path"] in self._files)
            or self._has_key(Headers(scope=scope))
        ):
            await self._app(scope, receive, send)
        else:
            form = error_form(scope["path"].removeprefix(self._prefix))
            await error_response(AuthenticationError("Invalid API Key"), form)(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        key = requested_key(headers).encode("latin-1")
        return any(hmac.compare_digest(key, accepted) for accepted in self._keys)


_EXPOSED = "x-pyctl-cache"

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


def allowed_origin(cors: Cors, origin: str) -> str:
    """Return the value of Access-Control-Allow-Origin for a page of ``origin``; empty for none."""
    if cors.origins == "*":
        # A star would shut out requests with credentials, so the origin is named.
        return origin if cors.credentials else "*"
    if cors.origins == "localhost":
        return origin if _name_in(origin) in _LOCAL else ""
    return origin if origin in {allowed.strip() for allowed in cors.origins.split(",")} else ""


class CorsMiddleware:
    """The middleware that adds the headers of ``cors`` to every response and answers OPTIONS
    itself, since browsers send it without a key.

    Where llama-server allows the headers ``*``, which browsers do not take for Authorization, the
    headers that the browser requests are named.
    """

    def __init__(self, app: ASGIApp, cors: Cors) -> None:
        self._app = app
        self._cors = cors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer OPTIONS, or add the headers to the response of the application."""
        request_headers = Headers(scope=scope)
        added = self._headers(request_headers)
        if scope["method"] == "OPTIONS":
            headers = self._cors.headers
            if headers == "*":
                headers = request_headers.get("access-control-request-headers") or "*"
            added |= {
                "access-control-allow-credentials": "true" if self._cors.credentials else "false",
                "access-control-allow-methods": self._cors.methods,
                "access-control-allow-headers": headers,
            }
            return await Response(headers=added | {"content-type": "text/html"})(
                scope, receive, send
            )

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(added)
            await send(message)

        await self._app(scope, receive, with_headers)

    def _headers(self, request_headers: Headers) -> dict[str, str]:
        allowed = allowed_origin(self._cors, request_headers.get("origin", ""))
        if not allowed:
            return {}
        headers = {
            "access-control-allow-origin": allowed,
            "access-control-expose-headers": _EXPOSED,
        }
        if self._cors.credentials:
            headers["access-control-allow-credentials"] = "true"
        if allowed != "*":
            headers["vary"] = "Origin"
        return headers


_OWN_NAMES = (".localhost", ".local", ".internal", ".lan", ".home.arpa")
"""Endings of names that no registrar sells."""


def is_public_hostname(host: str) -> bool:
    """Return whether the Host header ``host`` is a public name, which its owner may have pointed at
    this machine.

    In a browser, the owner's pages would then be pages of this server (DNS rebinding). It takes a
    public name: addresses, names without a dot and names of local networks are not.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return True
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return False
    return "." in name and not name.endswith(_OWN_NAMES)


def check_origin(headers: Headers, settings: ServerSettings, *, by_name: bool = False) -> None:
    """Raise ForbiddenError for a page of another origin, unless --cors-origins names it: a star is
    not enough.

    With ``by_name``, "localhost" is not enough either. Everything but a browser's page has no
    origin, but for a page's GET: there a browser names the relation of the two sites, as for an
    image or a link of any page. A page under a name that may be rebound has to have a key.
    """
    origin = headers.get("origin")
    if origin is None and headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ForbiddenError(
            "only pages of this server and of --cors-origins may send this request"
        )
    too_many = ("*", "localhost") if by_name else ("*",)
    if origin is None or (
        settings.cors.origins not in too_many and allowed_origin(settings.cors, origin)
    ):
        return
    host = headers.get("host", "")
    if not host or origin.partition("://")[2] != host:
        raise ForbiddenError(
            "only pages of this server and of --cors-origins may send this request"
        )
    if not settings.api_keys and is_public_hostname(host):
        raise ForbiddenError(
            "pages of this server may send this request with an API key, or if --cors-origins "
            f"names {origin}"
        )


def is_own(headers: Headers, settings: ServerSettings) -> bool:
    """Return whether a request is not from a page of another origin, nor of one under a name that
    may be rebound.

    Pages leave out the origin of their GET, so that a key has to identify them.
    """
    try:
        check_origin(headers, settings)
    except ForbiddenError:
        return False
    return bool(settings.api_keys) or not is_public_hostname(headers.get("host", ""))


_PASSED_ON = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-proto",
    "x-real-ip",
)
"""Headers by which a proxy can be told."""


def may_read_prompts(request: Request, settings: ServerSettings) -> bool:
    """Return whether the client may read texts of other clients: with a key, from this machine, or
    with --show-prompts.

    A proxied request is not from this machine, and a page under a name that may be rebound needs a
    key. Pages of other origins may generate, but see no texts of other clients.
    """
    if settings.api_keys:
        return True
    if not is_own(request.headers, settings):
        return False
    host = request.headers.get("host", "")
    is_passed_on = any(name in request.headers for name in _PASSED_ON)
    is_here = (
        request.client is not None
        and _is_loopback(request.client.host)
        and _is_loopback(_name_in(f"//{host}"))
    )
    return settings.show_prompts or (is_here and not is_passed_on)


def _name_in(address: str) -> str:
    """Return the host name in ``address``, empty if there is none."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")


def depth_error() -> RequestError:
    """Return the client's error for a RecursionError while reading a request."""
    return RequestError("the body is nested too deeply")
