"""What the page asks for besides the APIs: Markdown as HTML."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pyctl.errors import RequestError
from pyctl.page.markdown_process import MOST_TEXTS
from pyctl.server.body import TextsBody, at_most
from pyctl.server.http import JsonResponse
from pyctl.server.service import Service

__all__ = ["render"]


async def render(service: Service, request: Request) -> Response:
    """POST /page/markdown {"texts": [...]}: the HTML of each, harmless whatever the texts say."""
    texts = TextsBody.parse(await request.body()).texts
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError("'texts' must be a list of strings")
    at_most(MOST_TEXTS, len(texts), "texts", "texts")
    # Threads of its own: what takes long here keeps no request from the engine.
    return JsonResponse({"html": await service.rendering.run(request, service.markdown.render, texts)})
