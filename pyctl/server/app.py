"""The application: the paths of all endpoints, the page, and the choice of a request's model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import msgspec
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
from pyctl.pdf_file import pdf_text
from pyctl.server import ServerSettings
from pyctl.server.api import (
    anthropic,
    completions,
    embeddings,
    info,
    match,
    metrics,
    ollama,
    prefix_cache,
    responses,
    sequences,
    streams,
    token_counts,
    tools,
)
from pyctl.server.api import models as model_list
from pyctl.server.body import Body, at_most, parse_json
from pyctl.server.held import HeldResponse
from pyctl.server.http import (
    ErrorForm,
    JsonResponse,
    anthropic_error,
    error_response,
    form_of,
    http_exceptions,
    ollama_error,
)
from pyctl.server.kept_streams import HEADER, outlive
from pyctl.server.middleware import (
    MAX_BODY_BYTES,
    MAX_IMAGES_BODY_BYTES,
    BodyLimitMiddleware,
    CorsMiddleware,
    KeyMiddleware,
    check_origin,
    depth_error,
)
from pyctl.server.models import Models
from pyctl.server.request_log import log_error
from pyctl.server.service import Service

__all__ = ["create_app", "create_loading_app"]


class _TextsBody(Body, frozen=True):
    """POST /page/markdown"""

    texts: Any = None


async def _render(models: Models, request: Request) -> Response:
    """POST /page/markdown {"texts": [...]}: the HTML of each, harmless whatever the texts say."""
    texts = _TextsBody.parse(await request.body()).texts
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError("'texts' must be a list of strings")
    at_most(MOST_TEXTS, len(texts), "texts", "texts")
    shared = models.shared
    return JsonResponse({"html": await shared.pool.rendering.run(request, shared.markdown.render, texts)})


async def _read_pdf(models: Models, request: Request) -> Response:
    """POST /page/pdf: the text of the PDF file that is the body."""
    return JsonResponse({"text": await models.shared.pool.rendering.run(request, pdf_text, await request.body())})


Handler: TypeAlias = Callable[[Service, Request], Awaitable[ASGIApp]]
"""An endpoint of one model."""

ProcessHandler: TypeAlias = Callable[[Models, Request], Awaitable[ASGIApp]]
"""An endpoint of the process, for which no model is chosen."""

Endpoint: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]

_OF_PROCESS: dict[str, dict[str, ProcessHandler]] = {
    "GET": {
        "/health": model_list.health,
        "/v1/health": model_list.health,
        "/models": model_list.show,
        "/v1/models": model_list.show,
        "/v1/models/{id:path}": model_list.retrieve,
        "/v1/stream": streams.resume,
        "/tools": tools.show,
        "/cors-proxy": tools.disabled,
        "/api/tags": ollama.tags,
        "/api/ps": ollama.loaded_models,
        "/api/version": ollama.version,
        "/api/{name:path}": ollama.refuse,
    },
    "POST": {
        **dict.fromkeys(("/audio/transcriptions", "/v1/audio/transcriptions"), info.transcribe),
        "/v1/chat/completions/control": completions.control,
        "/v1/streams/lookup": streams.find,
        "/tools": tools.call,
        "/cors-proxy": tools.disabled,
        "/page/markdown": _render,
        "/page/pdf": _read_pdf,
        "/api/{name:path}": ollama.refuse,
    },
    "DELETE": {
        "/v1/stream": streams.end,
        "/api/{name:path}": ollama.refuse,
    },
}

_OF_ROUTER: dict[str, dict[str, ProcessHandler]] = {
    "GET": {"/models/sse": model_list.events},
    "POST": {"/models/load": model_list.load, "/models/unload": model_list.unload},
}
"""Endpoints of a process with several models."""

_OF_MODEL: dict[str, dict[str, Handler]] = {
    "GET": {
        "/props": info.props,
        "/metrics": metrics.show,
        "/slots": sequences.show,
        "/lora-adapters": info.adapters,
        "/cache": prefix_cache.show,
    },
    "POST": {
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
        "/cache/pin": prefix_cache.pin,
        "/cache/match": match.match,
        "/cache/warm": prefix_cache.warm,
        "/v1/messages": anthropic.messages,
        "/v1/messages/count_tokens": anthropic.count_tokens,
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
    },
    "DELETE": {
        "/cache": prefix_cache.clear,
        "/cache/{id}": prefix_cache.drop,
    },
}

_KEPT: frozenset[object] = frozenset(
    (
        completions.chat_completions,
        completions.completions,
        completions.native_completion,
        completions.infill,
        anthropic.messages,
        responses.create,
    )
)
"""Endpoints whose streams may outlive their connections."""

_TOOLS: frozenset[object] = frozenset((tools.show, tools.call))
"""Endpoints for which an origin has to be named: any page of this machine is too many."""

_OWN_PAGES: frozenset[object] = frozenset(
    (
        prefix_cache.show,
        match.match,
        prefix_cache.pin,
        prefix_cache.drop,
        prefix_cache.clear,
        info.change_props,
        sequences.act,
        info.change_adapters,
        model_list.load,
        model_list.unload,
        _read_pdf,
        *_TOOLS,
    )
)
"""Endpoints that pages of other origins may not use, though they may generate: these show or change shared state,
or start processes."""

_WITHOUT_WEIGHTS: frozenset[Handler] = frozenset(
    (
        *_OF_MODEL["GET"].values(),
        *_OF_MODEL["DELETE"].values(),
        match.match,
        prefix_cache.pin,
        info.change_props,
        info.change_adapters,
        token_counts.tokenize,
        token_counts.detokenize,
        token_counts.apply_template,
        token_counts.chat_input_tokens,
        anthropic.count_tokens,
        responses.input_tokens,
        ollama.show,
    )
)
"""Endpoints that need the vocabulary or the cache of a model at most, which stay when it is unloaded."""

_WITHOUT_NAME: dict[Handler, ProcessHandler] = {info.props: info.router_props, metrics.show: metrics.show_all}
"""Handlers for requests that name no model, where there are several."""


def create_app(models: Models) -> Starlette:
    """The ASGI application that answers with ``models``; it owns neither their workers nor their threads."""
    settings = models.shared.settings
    paths: dict[str, dict[str, tuple[object, Endpoint]]] = {}
    for method, handlers in _OF_MODEL.items():
        for path, handler in handlers.items():
            paths.setdefault(path, {})[method] = handler, partial(_answer, models, handler, form_of(path))
    # After those of models: the first path that fits counts, and "/api/{name:path}" fits many.
    tables = (_OF_PROCESS,) if models.only is not None else (_OF_PROCESS, _OF_ROUTER)
    for method, process_handlers in (item for table in tables for item in table.items()):
        for path, process_handler in process_handlers.items():
            paths.setdefault(path, {})[method] = process_handler, partial(process_handler, models)
    routes: list[BaseRoute] = [
        Route(settings.api_prefix + path, _endpoint(models, answers, form_of(path)), methods=list(answers))
        for path, answers in paths.items()
    ]
    routes += page_routes(settings)
    limit = MAX_IMAGES_BODY_BYTES if models.sees_images else MAX_BODY_BYTES
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


def _endpoint(models: Models, answers: Mapping[str, tuple[object, Endpoint]], form: ErrorForm) -> Endpoint:
    """One endpoint for all methods of a path; a route for each path answers 405 for all others.

    Each has its handler, which decides about the check of origins, and the answer. Errors are answered in ``form``.
    """
    settings, streams = models.shared.settings, models.shared.streams

    async def endpoint(request: Request) -> ASGIApp:
        handler, answer = answers["GET" if request.method == "HEAD" else request.method]
        try:
            if handler in _OWN_PAGES or (handler is sequences.show and settings.slots_debug):
                check_origin(request.headers, settings, by_name=handler in _TOOLS)
            if handler in _KEPT and request.headers.get(HEADER):
                return await outlive(streams, answer, partial(_response_to, form), request)
            return await answer(request)
        except Exception as error:
            return _response_to(form, request, error)

    return endpoint


def _response_to(form: ErrorForm, request: Request, error: Exception) -> Response:
    """The response to ``error`` in ``form``."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)
    if isinstance(error, RecursionError):
        return error_response(depth_error(), form)
    log_error(request.url.path, error)
    return error_response(error, form)


# -- the model of a request --------------------------------------------------------------------------------------------


class _RoutedBody(msgspec.Struct, frozen=True):
    """The fields of a body that select its model."""

    model: Any = None
    name: Any = None
    stream: Any = False


async def _answer(models: Models, handler: Handler, form: ErrorForm, request: Request) -> ASGIApp:
    """What ``handler`` answers with the model of ``request``, the only place where that is chosen."""
    if models.only is not None:
        return await handler(models.only, request)
    body = _RoutedBody() if request.method in ("GET", "HEAD", "DELETE") else _routed(await request.body())
    given = body.model or body.name if handler is ollama.show else body.model  # older clients of Ollama
    name = given if isinstance(given, str) else request.query_params.get("model", "")
    if not name and handler in _WITHOUT_NAME:
        return await _WITHOUT_NAME[handler](models, request)
    model = models.last_used if not name and handler is prefix_cache.show else None
    model = model or models.named(name)
    if model.service is not None and handler in _WITHOUT_WEIGHTS:
        return await handler(model.service, request)
    autoload = request.query_params.get("autoload", "")
    if not (models.order.is_loaded(model.name) or (autoload in ("true", "1") if autoload else models.autoload)):
        raise RequestError("model is not loaded")
    return HeldResponse(
        models,
        model,
        lambda service: handler(service, request),
        partial(_response_to, form, request),
        ping_seconds=models.shared.settings.ping_seconds if body.stream is True and form is not ollama_error else 0,
        error_event=b"error" if form is anthropic_error else b"",
    )


def _routed(raw: bytes) -> _RoutedBody:
    """The members of a body that matter here. Raises RequestError if it is not JSON."""
    try:
        return msgspec.json.decode(raw or b"{}", type=_RoutedBody)
    except msgspec.ValidationError:  # no object: the query has to name the model
        return _RoutedBody()
    except msgspec.DecodeError:
        parse_json(raw)
        return _RoutedBody()


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
        "cache-control": "no-cache",  # revalidated, and mostly not sent again
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
