"""The page and its files, and Markdown as HTML, for which the page asks in addition to the APIs."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pyctl.errors import NotFoundError, RequestError
from pyctl.page import POLICY, Asset, asset, index, names
from pyctl.page.markdown_process import MOST_TEXTS
from pyctl.server.body import TextsBody, at_most
from pyctl.server.http import JsonResponse, error_response
from pyctl.server.server_settings import ServerSettings
from pyctl.server.service import Service

__all__ = ["files", "render", "routes"]


def routes(settings: ServerSettings) -> list[Route]:
    """GET / and GET /page/{name}, the page and its files; none with --no-ui or --path. They need no model."""
    if not settings.has_page:
        return []
    paths = {"/": _index, "/index.html": _index, "/page/{name}": _file}
    return [Route(settings.api_prefix + path, endpoint) for path, endpoint in paths.items()]


def files(settings: ServerSettings) -> frozenset[str]:
    """Names of the page's files; none with --no-ui or --path."""
    return names() if settings.has_page else frozenset()


async def _index(request: Request) -> Response:
    return _answer(request, index())


async def _file(request: Request) -> Response:
    return _answer(request, asset(request.path_params["name"]))


def _answer(request: Request, found: Asset | None) -> Response:
    if found is None:
        return error_response(NotFoundError("File Not Found"))
    headers = {
        "cache-control": "no-cache",  # asked for again, and mostly not sent
        "content-security-policy": POLICY,
        "etag": found.tag,
        "referrer-policy": "no-referrer",
        "vary": "Accept-Encoding",
        "x-content-type-options": "nosniff",
    }
    if request.headers.get("if-none-match") == found.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(found.compressed, headers=headers, media_type=found.media_type)
    return Response(found.body, headers=headers, media_type=found.media_type)


async def render(service: Service, request: Request) -> Response:
    """POST /page/markdown {"texts": [...]}: the HTML of each, harmless whatever the texts say."""
    texts = TextsBody.parse(await request.body()).texts
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError("'texts' must be a list of strings")
    at_most(MOST_TEXTS, len(texts), "texts", "texts")
    # Threads of its own: what takes long here keeps no request from the engine.
    return JsonResponse({"html": await service.shared.rendering.run(request, service.shared.markdown.render, texts)})
