"""The page, and what it asks for besides the APIs: Markdown as HTML."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pyctl.errors import NotFoundError, RequestError
from pyctl.page import assets
from pyctl.page.assets import Asset
from pyctl.page.markdown_process import MOST_TEXTS
from pyctl.server.body import TextsBody, at_most
from pyctl.server.http import JsonResponse
from pyctl.server.service import Service

__all__ = ["file", "index", "render"]


async def index(service: Service, request: Request) -> Response:
    """GET /: the page, unless there is a --path or --no-ui."""
    return _answer(service, request, assets.index())


async def file(service: Service, request: Request) -> Response:
    """GET /page/{name}: a file of it."""
    return _answer(service, request, assets.asset(request.path_params["name"]))


def _answer(service: Service, request: Request, found: Asset | None) -> Response:
    if found is None or not service.settings.show_page:
        raise NotFoundError("File Not Found")
    headers = {
        "cache-control": "no-cache",  # asked for again, and mostly not sent
        "content-security-policy": assets.POLICY,
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
    return JsonResponse({"html": await service.rendering.run(request, service.markdown.render, texts)})
