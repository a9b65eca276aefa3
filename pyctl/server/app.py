"""The application: the paths of all endpoints, the page, and the choice of a request's model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

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
from pyctl.files.pdf_file import pdf_text
from pyctl.page import asset, names, policy
from pyctl.page.markdown_process import MAX_TEXTS
from pyctl.requests.body_reader import at_most
from pyctl.requests.json_text import decode, parse_object
from pyctl.server.api import (
    anthropic,
    cache_routes,
    completions,
    embeddings,
    info,
    metrics,
    model_routes,
    ollama,
    ollama_models,
    responses,
    sequences,
    streams,
    token_counts,
)
from pyctl.server.api import mcp_routes as tool_routes
from pyctl.server.app_state import AppState, HttpService
from pyctl.server.http import (
    ErrorForm,
    JsonResponse,
    anthropic_error,
    error_form,
    error_response,
    http_exceptions,
    ollama_error,
)
from pyctl.server.kept_streams import HEADER, keep_stream
from pyctl.server.loading_response import LoadingResponse
from pyctl.server.middleware import (
    CorsMiddleware,
    KeyMiddleware,
    check_origin,
    depth_error,
)
from pyctl.server.models import Models
from pyctl.server.request_body import (
    MAX_BODY_BYTES,
    MAX_IMAGES_BODY_BYTES,
    BodyLimitMiddleware,
    ContentCodingMiddleware,
)
from pyctl.server.request_log import log_error
from pyctl.server.request_span import span_of
from pyctl.server.server_settings import ServerSettings

__all__ = ["create_app", "create_loading_app", "early_paths"]


_MARKDOWN_PATH = "/page/markdown"


async def _render_markdown(shared: AppState, request: Request) -> Response:
    """Answer POST /page/markdown {"texts": [...]}: the HTML of each, harmless for any texts. It
    needs no model.
    """
    texts = parse_object(await request.body()).get("texts")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RequestError("'texts' must be a list of strings")
    at_most(MAX_TEXTS, len(texts), "texts", "texts")
    return JsonResponse(
        {"html": await shared.pool.rendering.run(request, shared.markdown.render, texts)}
    )


async def _render(models: Models, request: Request) -> Response:
    return await _render_markdown(models.shared, request)


async def _read_pdf(models: Models, request: Request) -> Response:
    """Answer POST /page/pdf: the text of the PDF file that is the body."""
    return JsonResponse(
        {"text": await models.shared.pool.rendering.run(request, pdf_text, await request.body())}
    )


Answer: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]

S = TypeVar("S", HttpService, Models)


@dataclass(frozen=True)
class Operation(Generic[S]):
    """An endpoint: ``answer``, of one model or of the process, to requests of ``method`` to one of
    ``paths``.

    Pages of other origins may not use one that ``is_own``, though they may generate: those show or
    change shared state, or start processes. With ``by_name`` an origin has to be named: any page of
    this machine is too many. Streams of one that ``is_detachable`` may outlive their connections.
    One that ``is_light`` needs the vocabulary or the cache of a model at most, which stay when it
    is unloaded. Of several models, ``unnamed`` answers requests that name none.

    One that is ``debugged`` shows prompts with --slots-debug, and is own then. With
    ``takes_last_used``, the model that was used last answers requests that name none. With
    ``takes_name``, the model may come under "name", as older clients of Ollama send it.
    """

    method: str
    answer: Callable[[S, Request], Awaitable[ASGIApp]]
    paths: tuple[str, ...]
    is_own: bool = False
    by_name: bool = False
    is_detachable: bool = False
    is_light: bool = False
    debugged: bool = False
    takes_last_used: bool = False
    takes_name: bool = False
    unnamed: Callable[[Models, Request], Awaitable[ASGIApp]] | None = None


_OF_MODEL: tuple[Operation[HttpService], ...] = (
    Operation("GET", info.props, ("/props",), is_light=True, unnamed=info.router_props),
    Operation(
        "GET", metrics.show, ("/metrics",), is_own=True, is_light=True, unnamed=metrics.show_all
    ),
    Operation("GET", sequences.show, ("/slots",), is_light=True, debugged=True),
    Operation("GET", info.adapters, ("/lora-adapters",), is_light=True),
    Operation(
        "GET",
        cache_routes.show,
        ("/cache",),
        is_own=True,
        is_light=True,
        takes_last_used=True,
    ),
    Operation(
        "GET",
        cache_routes.check,
        ("/cache/check",),
        is_own=True,
        is_light=True,
        takes_last_used=True,
    ),
    Operation(
        "POST",
        completions.chat_completions,
        ("/chat/completions", "/v1/chat/completions"),
        is_detachable=True,
    ),
    Operation("POST", completions.completions, ("/v1/completions",), is_detachable=True),
    Operation(
        "POST", completions.native_completion, ("/completion", "/completions"), is_detachable=True
    ),
    Operation("POST", completions.infill, ("/infill",), is_detachable=True),
    Operation("POST", token_counts.tokenize, ("/tokenize",), is_light=True),
    Operation("POST", token_counts.detokenize, ("/detokenize",), is_light=True),
    Operation("POST", token_counts.apply_template, ("/apply-template",), is_light=True),
    Operation("POST", info.change_props, ("/props",), is_own=True, is_light=True),
    Operation("POST", sequences.act, ("/slots/{id}",), is_own=True),
    Operation("POST", info.change_adapters, ("/lora-adapters",), is_own=True, is_light=True),
    Operation("POST", embeddings.native, ("/embedding", "/embeddings")),
    Operation("POST", embeddings.openai, ("/v1/embeddings",)),
    Operation("POST", embeddings.rank, ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")),
    Operation("POST", cache_routes.pin, ("/cache/pin",), is_own=True, is_light=True),
    Operation("POST", cache_routes.prewarm, ("/cache/prewarm", "/cache/warm")),
    Operation("POST", anthropic.messages, ("/v1/messages",), is_detachable=True),
    Operation("POST", anthropic.count_tokens, ("/v1/messages/count_tokens",), is_light=True),
    Operation("POST", responses.create, ("/responses", "/v1/responses"), is_detachable=True),
    Operation(
        "POST",
        responses.input_tokens,
        ("/responses/input_tokens", "/v1/responses/input_tokens"),
        is_light=True,
    ),
    Operation(
        "POST",
        token_counts.chat_input_tokens,
        ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"),
        is_light=True,
    ),
    Operation("POST", ollama.chat, ("/api/chat",)),
    Operation("POST", ollama.generate, ("/api/generate",)),
    Operation("POST", ollama_models.show, ("/api/show",), is_light=True, takes_name=True),
    Operation("POST", ollama.embed, ("/api/embed",)),
    Operation("DELETE", cache_routes.clear, ("/cache",), is_own=True, is_light=True),
    Operation(
        "DELETE", cache_routes.stop, ("/cache/requests/{id:int}",), is_own=True, is_light=True
    ),
    Operation("DELETE", cache_routes.drop, ("/cache/{id}",), is_own=True, is_light=True),
)

_OF_PROCESS: tuple[Operation[Models], ...] = (
    Operation("GET", model_routes.health, ("/health", "/v1/health")),
    Operation("GET", model_routes.show, ("/models", "/v1/models")),
    Operation("GET", model_routes.retrieve, ("/v1/models/{id:path}",)),
    Operation("GET", streams.resume, ("/v1/stream",)),
    Operation("DELETE", streams.end, ("/v1/stream",)),
    Operation("POST", streams.find, ("/v1/streams/lookup",)),
    Operation("GET", tool_routes.show, ("/tools",), is_own=True, by_name=True),
    Operation("POST", tool_routes.call, ("/tools",), is_own=True, by_name=True),
    Operation("GET", tool_routes.disabled, ("/cors-proxy",)),
    Operation("POST", tool_routes.disabled, ("/cors-proxy",)),
    Operation("POST", info.decide, ("/v1/systemone",)),
    Operation("POST", info.transcribe, ("/audio/transcriptions", "/v1/audio/transcriptions")),
    Operation("POST", completions.control, ("/v1/chat/completions/control",)),
    Operation("POST", _render, (_MARKDOWN_PATH,)),
    Operation("POST", _read_pdf, ("/page/pdf",), is_own=True),
    Operation("GET", ollama_models.tags, ("/api/tags",)),
    Operation("GET", ollama_models.loaded_models, ("/api/ps",)),
    Operation("GET", ollama.version, ("/api/version",)),
    *(
        Operation[Models](method, ollama.reject_path, ("/api/{name:path}",))
        for method in ("GET", "POST", "DELETE")
    ),
)

_OF_ROUTER: tuple[Operation[Models], ...] = (
    Operation("GET", model_routes.events, ("/models/sse",)),
    Operation("POST", model_routes.load, ("/models/load",), is_own=True),
    Operation("POST", model_routes.unload, ("/models/unload",), is_own=True),
)
"""Endpoints of a process with several models."""


def create_app(models: Models) -> Starlette:
    """Return the ASGI application that answers with ``models``; it owns neither their workers nor
    their threads.
    """
    settings = models.shared.settings
    paths: dict[str, dict[str, tuple[Operation[HttpService] | Operation[Models], Answer]]] = {}
    for endpoint in _OF_MODEL:
        for path in endpoint.paths:
            answer = partial(_answer, models, endpoint, error_form(path))
            paths.setdefault(path, {})[endpoint.method] = (endpoint, answer)
    # After the models' routes: the first path that fits counts, and "/api/{name:path}" fits many.
    of_process = _OF_PROCESS
    if models.only is None:
        of_process += _OF_ROUTER
    for operation in of_process:
        for path in operation.paths:
            own_answer = partial(operation.answer, models)
            paths.setdefault(path, {})[operation.method] = (operation, own_answer)
    routes: list[BaseRoute] = [
        Route(
            settings.api_prefix + path,
            _checked(models, answers, error_form(path)),
            methods=list(answers),
        )
        for path, answers in paths.items()
    ]
    routes += page_routes(settings)
    limit = MAX_IMAGES_BODY_BYTES if models.supports_images else MAX_BODY_BYTES
    files = names() if settings.has_page else ()
    if settings.static_path:
        routes.append(
            Mount(settings.api_prefix, StaticFiles(directory=settings.static_path, html=True))
        )
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(CorsMiddleware, cors=settings.cors),
            Middleware(
                KeyMiddleware, keys=settings.api_keys, prefix=settings.api_prefix, files=files
            ),
            Middleware(ContentCodingMiddleware, limit=limit),
            Middleware(BodyLimitMiddleware, limit=limit, prefix=settings.api_prefix),
        ],
        exception_handlers={HTTPException: http_exceptions(settings.api_prefix)},
    )


def create_loading_app(shared: AppState) -> Starlette:
    """Return the application until the model is loaded: the page with its Markdown, and 503 to
    everything else.
    """
    settings = shared.settings

    async def loading(request: Request, error: Exception) -> Response:
        return error_response(
            LoadingError(), error_form(request.url.path.removeprefix(settings.api_prefix))
        )

    return Starlette(
        routes=[*_early_routes(shared), *page_routes(settings)],
        middleware=[
            Middleware(CorsMiddleware, cors=settings.cors),
        ],
        exception_handlers={HTTPException: loading},
    )


def early_paths(settings: ServerSettings) -> tuple[str, ...]:
    """Return the paths of POST requests that `create_loading_app` answers; all others wait for the
    model.
    """
    return (settings.api_prefix + _MARKDOWN_PATH,) if settings.has_page else ()


def _early_routes(shared: AppState) -> list[Route]:
    settings = shared.settings

    async def render(request: Request) -> Response:
        try:
            return await _render_markdown(shared, request)
        except Exception as error:
            return _response_to(error_form(_MARKDOWN_PATH), request, error)

    checks = [
        Middleware(KeyMiddleware, keys=settings.api_keys, prefix=settings.api_prefix),
        Middleware(BodyLimitMiddleware, prefix=settings.api_prefix),
    ]
    return [
        Route(path, render, methods=["POST"], middleware=checks) for path in early_paths(settings)
    ]


def _checked(
    models: Models,
    answers: Mapping[str, tuple[Operation[HttpService] | Operation[Models], Answer]],
    form: ErrorForm,
) -> Answer:
    """Return the answer for all methods of a path, after the check of origins. A separate route of
    the path answers 405 to all other methods. Errors are answered in ``form``.
    """
    settings = models.shared.settings
    streams = models.shared.streams

    async def answered(answer: Answer, request: Request) -> ASGIApp:
        try:
            return await answer(request)
        except Exception as error:
            return _response_to(form, request, error)

    async def checked(request: Request) -> ASGIApp:
        endpoint, answer = answers["GET" if request.method == "HEAD" else request.method]
        if endpoint.is_own or (endpoint.debugged and settings.slots_debug):
            check_origin(request.headers, settings, by_name=endpoint.by_name)
        if endpoint.is_detachable and request.headers.get(HEADER):
            return await keep_stream(streams, partial(answered, answer), request)
        return await answer(request)

    return partial(answered, checked)


def _response_to(form: ErrorForm, request: Request, error: Exception) -> Response:
    """Return the response to ``error`` in ``form``."""
    span = span_of(request.scope)
    if isinstance(error, ClientDisconnect):
        span.is_cancelled = True
        return Response(status_code=400)
    span.error = error
    if isinstance(error, RecursionError):
        return error_response(depth_error(), form)
    log_error(request.url.path, error)
    return error_response(error, form)


# -- the model of a request
# ----------------------------------------------------------------------------------


class _RoutedBody(msgspec.Struct, frozen=True):
    """The fields of a body that select its model."""

    model: Any = None
    name: Any = None
    stream: Any = False


async def _answer(
    models: Models, endpoint: Operation[HttpService], form: ErrorForm, request: Request
) -> ASGIApp:
    """Return the answer of ``endpoint`` with the model of ``request``. Only this function chooses
    the model.
    """

    async def answer_with(service: HttpService) -> ASGIApp:
        span_of(request.scope).model = service.model
        return await endpoint.answer(service, request)

    if models.only is not None:
        return await answer_with(models.only)
    body = (
        _RoutedBody()
        if request.method in ("GET", "HEAD", "DELETE")
        else _routed(await request.body())
    )
    given = body.model
    if endpoint.takes_name:
        given = given or body.name
    name = given if isinstance(given, str) else request.query_params.get("model", "")
    if not name and endpoint.unnamed is not None:
        return await endpoint.unnamed(models, request)
    model = None
    if not name and endpoint.takes_last_used:
        model = models.last_used
    if model is None:
        model = models.get(name)
    if model.service is not None and endpoint.is_light:
        return await answer_with(model.service)
    choice = request.query_params.get("autoload", "")
    loads = choice in ("true", "1") if choice else models.autoload
    if not loads and not models.order.is_loaded(model.name):
        raise RequestError("model is not loaded")
    # Ollama's streams are lines of JSON, which have no comments.
    has_pings = body.stream is True and form is not ollama_error
    return LoadingResponse(
        models,
        model,
        answer_with,
        partial(_response_to, form, request),
        ping_seconds=models.shared.settings.ping_seconds if has_pings else 0,
        error_event=b"error" if form is anthropic_error else b"",
    )


def _routed(raw: bytes) -> _RoutedBody:
    """Return the members of a body that select a model. Raises RequestError if it is not JSON."""
    try:
        return decode(raw or b"{}", _RoutedBody)
    except msgspec.ValidationError:  # no object: the query has to name the model
        return _RoutedBody()


def page_routes(settings: ServerSettings) -> list[Route]:
    """Return GET / and GET /page/{name}, the page and its files; none with --no-ui or --path. They
    need no model.
    """
    if not settings.has_page:
        return []
    return [
        Route(settings.api_prefix + path, _page_file)
        for path in ("/", "/index.html", "/page/{name}")
    ]


async def _page_file(request: Request) -> Response:
    """Answer GET /page/{name}: the file, packed if the browser takes gzip, or 304 if it has that
    version.
    """
    file = asset(**request.path_params)
    if file is None:
        return error_response(NotFoundError("File Not Found"))
    headers = {
        "cache-control": "no-cache",  # revalidated, and mostly not sent again
        "content-security-policy": policy(),
        "etag": file.tag,
        "referrer-policy": "no-referrer",
        "vary": "Accept-Encoding",
        "x-content-type-options": "nosniff",
    }
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(file.compressed, headers=headers, media_type=file.media_type)
    return Response(file.body, headers=headers, media_type=file.media_type)
