"""The server's paths: what llama-server has, as far as it is there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from pyctl.chat.format import ChatFormat
from pyctl.chat.tokenizer import Tokenizer
from pyctl.server import (
    absent,
    anthropic,
    cache,
    completions,
    counts,
    embeddings,
    facts,
    lora,
    metrics,
    responses,
    slots,
    tokens,
)
from pyctl.server.cors import CorsMiddleware
from pyctl.server.errors import error_response, http_exception
from pyctl.server.journal import failed
from pyctl.server.keys import KeyMiddleware
from pyctl.server.limits import BodyLimitMiddleware, depth_error
from pyctl.server.settings import Service, Settings, WorkerLike

__all__ = ["create_app"]

Handler: TypeAlias = Callable[[Service, Request], Awaitable[ASGIApp]]

_GET: dict[str, Handler] = {
    "/health": facts.health,
    "/v1/health": facts.health,
    "/models": facts.models,
    "/v1/models": facts.models,
    "/props": facts.props,
    "/metrics": metrics.show,
    "/slots": slots.show,
    "/lora-adapters": lora.show,
    "/v1/stream": absent.resume_stream,
    "/tools": absent.disabled,
    "/cors-proxy": absent.disabled,
    "/cache": cache.show,
    "/v1/responses/{id}": responses.retrieve,
}

_POST: dict[str, Handler] = {
    "/chat/completions": completions.chat_completions,
    "/v1/chat/completions": completions.chat_completions,
    "/v1/completions": completions.completions,
    "/completion": completions.native_completion,
    "/completions": completions.native_completion,
    "/infill": completions.infill,
    "/tokenize": tokens.tokenize,
    "/detokenize": tokens.detokenize,
    "/apply-template": tokens.apply_template,
    "/props": facts.change_props,
    "/slots/{id}": slots.act,
    "/lora-adapters": lora.change,
    "/embedding": embeddings.native,
    "/embeddings": embeddings.native,
    "/v1/embeddings": embeddings.openai,
    **dict.fromkeys(("/rerank", "/reranking", "/v1/rerank", "/v1/reranking"), absent.rerank),
    **dict.fromkeys(("/audio/transcriptions", "/v1/audio/transcriptions"), absent.transcribe),
    "/v1/chat/completions/control": absent.control,
    "/v1/streams/lookup": absent.find_streams,
    "/tools": absent.disabled,
    "/cors-proxy": absent.disabled,
    "/cache/pin": cache.pin,
    "/v1/messages": anthropic.messages,
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/responses": responses.create,
    "/v1/responses": responses.create,
    "/chat/completions/input_tokens": counts.chat_input_tokens,
    "/v1/chat/completions/input_tokens": counts.chat_input_tokens,
    "/responses/input_tokens": responses.input_tokens,
    "/v1/responses/input_tokens": responses.input_tokens,
}

_DELETE: dict[str, Handler] = {
    "/v1/stream": absent.end_stream,
    "/cache": cache.clear,
    "/v1/responses/{id}": responses.delete,
}


def create_app(worker: WorkerLike, chat: ChatFormat, tokenizer: Tokenizer, settings: Settings) -> Starlette:
    """The ASGI application that answers with ``worker``; it owns neither the worker nor its thread."""
    service = Service(worker, chat, tokenizer, settings)
    return Starlette(
        routes=[
            Route(settings.api_prefix + path, _endpoint(service, handlers), methods=list(handlers))
            for path, handlers in _by_path({"GET": _GET, "POST": _POST, "DELETE": _DELETE}).items()
        ],
        middleware=[
            Middleware(CorsMiddleware, cors=settings.cors),
            Middleware(KeyMiddleware, keys=settings.api_keys, prefix=settings.api_prefix),
            Middleware(BodyLimitMiddleware),
        ],
        exception_handlers={HTTPException: http_exception},
    )


def _by_path(methods: Mapping[str, Mapping[str, Handler]]) -> dict[str, dict[str, Handler]]:
    """The handlers of each path by method; one route per path answers 405 for all others."""
    paths: dict[str, dict[str, Handler]] = {}
    for method, handlers in methods.items():
        for path, handler in handlers.items():
            paths.setdefault(path, {})[method] = handler
    return paths


def _endpoint(service: Service, handlers: Mapping[str, Handler]) -> Callable[[Request], Awaitable[ASGIApp]]:
    """The handler of a request's method with its errors turned into responses."""

    async def endpoint(request: Request) -> ASGIApp:
        try:
            return await handlers["GET" if request.method == "HEAD" else request.method](service, request)
        except ClientDisconnect:
            return Response(status_code=400)
        except RecursionError:
            return error_response(depth_error())
        except Exception as error:
            failed(request.url.path, error)
            return error_response(error)

    return endpoint
