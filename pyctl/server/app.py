"""The application: the paths of all endpoints, the page, and where the model of a request is chosen."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from pyctl.errors import LoadingError, NotFoundError, RequestError
from pyctl.page import POLICY, Asset, asset, index, names
from pyctl.page.markdown_process import MOST_TEXTS
from pyctl.server import ServerSettings
from pyctl.server.api import (
    anthropic,
    completions,
    embeddings,
    info,
    metrics,
    ollama,
    prefix_cache,
    responses,
    sequences,
    token_counts,
)
from pyctl.server.body import Body, at_most
from pyctl.server.http import ErrorForm, JsonResponse, error_response, form_of, http_exceptions
from pyctl.server.middleware import (
    MAX_BODY_BYTES,
    MAX_IMAGES_BODY_BYTES,
    BodyLimitMiddleware,
    CorsMiddleware,
    KeyMiddleware,
    check_origin,
    depth_error,
)
from pyctl.server.reply import log_error
from pyctl.server.service import Service

__all__ = ["create_app", "create_loading_app"]


class _TextsBody(Body, frozen=True):
    """POST /page/markdown"""

    texts: Any = None


async def _render(service: Service, request: Request) -> Response:
    """POST /page/markdown {"texts": [...]}: the HTML of each, harmless whatever the texts say."""
    texts = _TextsBody.parse(await request.body()).texts
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError("'texts' must be a list of strings")
    at_most(MOST_TEXTS, len(texts), "texts", "texts")
    # Threads of its own: what takes long here keeps no request from the engine.
    return JsonResponse({"html": await service.shared.rendering.run(request, service.shared.markdown.render, texts)})


Handler: TypeAlias = Callable[[Service, Request], Awaitable[ASGIApp]]

_GET: dict[str, Handler] = {
    "/health": info.health,
    "/v1/health": info.health,
    "/models": info.models,
    "/v1/models": info.models,
    "/v1/models/{id:path}": info.model,
    "/props": info.props,
    "/metrics": metrics.show,
    "/slots": sequences.show,
    "/lora-adapters": info.adapters,
    "/v1/stream": info.resume_stream,
    "/tools": info.disabled,
    "/cors-proxy": info.disabled,
    "/cache": prefix_cache.show,
    "/v1/responses/{id}": responses.retrieve,
    "/v1/conversations/{id}": responses.retrieve_conversation,
    "/api/tags": ollama.tags,
    "/api/ps": ollama.loaded_models,
    "/api/version": ollama.version,
    "/api/blobs/{digest}": ollama.manage,
}

_POST: dict[str, Handler] = {
    "/chat/completions": completions.chat_completions,
    "/v1/chat/completions": completions.chat_completions,
    "/v1/completions": completions.completions,
    "/completion": completions.native_completion,
    "/completions": completions.native_completion,
    "/infill": completions.infill,
    "/tokenize": token_counts.tokenize,
    "/detokenize": token_counts.detokenize,
    "/apply-template": token_counts.apply_template,
    "/props": info.change_props,
    "/slots/{id}": sequences.act,
    "/lora-adapters": info.change_adapters,
    "/embedding": embeddings.native,
    "/embeddings": embeddings.native,
    "/v1/embeddings": embeddings.openai,
    **dict.fromkeys(("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), embeddings.rank),
    **dict.fromkeys(("/audio/transcriptions", "/v1/audio/transcriptions"), info.transcribe),
    "/v1/chat/completions/control": completions.control,
    "/v1/streams/lookup": info.find_streams,
    "/tools": info.disabled,
    "/cors-proxy": info.disabled,
    "/cache/pin": prefix_cache.pin,
    "/page/markdown": _render,
    "/cache/warm": prefix_cache.warm,
    "/v1/messages": anthropic.messages,
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/v1/conversations": responses.create_conversation,
    "/v1/conversations/{id}": responses.change_conversation,
    "/responses": responses.create,
    "/v1/responses": responses.create,
    "/chat/completions/input_tokens": token_counts.chat_input_tokens,
    "/v1/chat/completions/input_tokens": token_counts.chat_input_tokens,
    "/responses/input_tokens": responses.input_tokens,
    "/v1/responses/input_tokens": responses.input_tokens,
    "/api/chat": ollama.chat,
    "/api/generate": ollama.generate,
    "/api/show": ollama.show,
    "/api/embed": ollama.embed,
    "/api/embeddings": ollama.embeddings,
    **dict.fromkeys((f"/api/{name}" for name in ("pull", "push", "create", "copy", "blobs/{digest}")), ollama.manage),
}

_DELETE: dict[str, Handler] = {
    "/v1/stream": info.end_stream,
    "/cache": prefix_cache.clear,
    "/cache/{id}": prefix_cache.drop,
    "/v1/responses/{id}": responses.delete,
    "/v1/conversations/{id}": responses.delete_conversation,
    "/api/delete": ollama.manage,
}


_OWN_PAGES: frozenset[Handler] = frozenset(
    (
        prefix_cache.show,
        prefix_cache.pin,
        prefix_cache.drop,
        prefix_cache.clear,
        info.change_props,
        sequences.act,
        info.change_adapters,
    )
)
"""Endpoints that pages of other origins may not use, though they may generate: these show or change shared state."""


def create_app(service: Service) -> Starlette:
    """The ASGI application that answers with ``service``; it owns neither the worker nor its thread."""
    settings = service.shared.settings
    routes: list[BaseRoute] = [
        Route(settings.api_prefix + path, _endpoint(service, handlers, form_of(path)), methods=list(handlers))
        for path, handlers in _by_path({"GET": _GET, "POST": _POST, "DELETE": _DELETE}).items()
    ]
    routes += page_routes(settings)
    limit = MAX_IMAGES_BODY_BYTES if service.info.vision else MAX_BODY_BYTES
    if settings.static_path:
        routes.append(Mount(settings.api_prefix, StaticFiles(directory=settings.static_path, html=True)))
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(CorsMiddleware, cors=settings.cors),
            Middleware(KeyMiddleware, keys=settings.api_keys, prefix=settings.api_prefix, files=_page_files(settings)),
            Middleware(BodyLimitMiddleware, limit=limit, prefix=settings.api_prefix),
        ],
        exception_handlers={HTTPException: http_exceptions(settings.api_prefix)},
    )


def create_loading_app(settings: ServerSettings) -> Starlette:
    """The application until the model is loaded: the page, which waits for it, and 503 to everything else."""

    async def loading(request: Request, error: Exception) -> Response:
        return error_response(LoadingError(), form_of(request.url.path.removeprefix(settings.api_prefix)))

    return Starlette(
        routes=page_routes(settings),
        middleware=[Middleware(CorsMiddleware, cors=settings.cors)],
        exception_handlers={HTTPException: loading},
    )


def _by_path(methods: Mapping[str, Mapping[str, Handler]]) -> dict[str, dict[str, Handler]]:
    """The handlers of each path by method; one route per path answers 405 for all others."""
    paths: dict[str, dict[str, Handler]] = {}
    for method, handlers in methods.items():
        for path, handler in handlers.items():
            paths.setdefault(path, {})[method] = handler
    return paths


def _endpoint(
    service: Service, handlers: Mapping[str, Handler], form: ErrorForm
) -> Callable[[Request], Awaitable[ASGIApp]]:
    """The handler of a request's method with its errors turned into responses in ``form``."""

    async def endpoint(request: Request) -> ASGIApp:
        handler = handlers["GET" if request.method == "HEAD" else request.method]
        try:
            if handler in _OWN_PAGES or (handler is sequences.show and service.shared.settings.slots_debug):
                check_origin(request.headers, service.shared.settings)
            return await handler(service, request)
        except ClientDisconnect:
            return Response(status_code=400)
        except RecursionError:
            return error_response(depth_error(), form)
        except Exception as error:
            log_error(request.url.path, error)
            return error_response(error, form)

    return endpoint


def page_routes(settings: ServerSettings) -> list[Route]:
    """GET / and GET /page/{name}, the page and its files; none with --no-ui or --path. They need no model."""
    if not settings.has_page:
        return []
    paths = {"/": _index, "/index.html": _index, "/page/{name}": _page_file}
    return [Route(settings.api_prefix + path, endpoint) for path, endpoint in paths.items()]


def _page_files(settings: ServerSettings) -> frozenset[str]:
    """Names of the page's files; none with --no-ui or --path."""
    return names() if settings.has_page else frozenset()


async def _index(request: Request) -> Response:
    return _sent(request, index())


async def _page_file(request: Request) -> Response:
    return _sent(request, asset(request.path_params["name"]))


def _sent(request: Request, found: Asset | None) -> Response:
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
