"""The models of a process: their list, and llama-server's endpoints to load and unload them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pyctl.errors import NotFoundError, RequestError, UnavailableError
from pyctl.requests.body_reader import Body
from pyctl.server.app_state import HttpService
from pyctl.server.http import PING, JsonResponse, encode, error_response, frame
from pyctl.server.middleware import check_origin, is_own
from pyctl.server.models import Models, ServedModel
from pyctl.settings.limit import limit

__all__ = ["events", "health", "load", "retrieve", "show", "unload"]

_MAX_EVENTS = limit(
    256,
    "events of models that a client of /models/sse has not taken yet",
    "it is closed",
    "connection",
)


class _ModelBody(Body, frozen=True):
    """The body of POST /models/load and /models/unload."""

    model: str = ""


async def health(models: Models, request: Request) -> Response:
    """Answer GET /health: 503 once no request will be served again."""
    if (trouble := models.trouble) is not None:
        return error_response(UnavailableError(str(trouble)))
    return JsonResponse({"status": "ok"})


async def show(models: Models, request: Request) -> Response:
    """Answer GET /v1/models: for one model OpenAI's list and Ollama's, for several llama-server's
    list with their states.

    With ``reload`` in the query of several, presets and directories are read again first.
    """
    if models.only is not None:
        return JsonResponse(
            {
                "models": [_model_json(models.only)],
                "object": "list",
                "data": [_described(models.only)],
            }
        )
    if request.query_params.get("reload"):
        check_origin(request.headers, models.shared.settings)
        await asyncio.wrap_future(await models.shared.pool.fetching.run(request, models.reload))
    own = is_own(request.headers, models.shared.settings)
    listed = [_listed(model, own=own) for model in models if not model.source.card.is_hidden]
    return JsonResponse({"data": listed, "object": "list"})


async def retrieve(models: Models, request: Request) -> Response:
    """Answer GET /v1/models/{id}; Ollama's clients add a tag. Raises NotFoundError for an unknown
    model.
    """
    name = str(request.path_params["id"])
    if not name:
        raise NotFoundError(f"no such endpoint: {request.url.path}")
    if models.only is not None:
        service = models.only
        if name.removesuffix(":latest") not in (
            service.model,
            *service.info.model_aliases,
            service.info.model_name,
        ):
            raise NotFoundError(
                f"the model {name[:200]!r} does not exist; this server has {service.model!r}"
            )
        return JsonResponse({**_described(models.only), "id": name})
    if (model := models.find(name)) is None:
        raise NotFoundError(f"the model {name[:200]!r} does not exist")
    return JsonResponse(
        {**_listed(model, own=is_own(request.headers, models.shared.settings)), "id": name}
    )


async def load(models: Models, request: Request) -> Response:
    """Answer POST /models/load {"model": ...}: start to load a model; /models/sse reports the end.
    Raises NotFoundError.
    """
    name = _ModelBody.parse(await request.body()).model
    if (model := models.find(name)) is None:
        raise NotFoundError("model is not found")
    models.load(model)
    return JsonResponse({"success": True})


async def unload(models: Models, request: Request) -> Response:
    """Answer POST /models/unload {"model": ...}: unload a model after its replies or stop-timeout.
    Raises RequestError.
    """
    name = _ModelBody.parse(await request.body()).model
    if (model := models.find(name)) is None:
        raise RequestError("model is not found")
    models.unload(model)
    return JsonResponse({"success": True})


async def events(models: Models, request: Request) -> Response:
    """Answer GET /models/sse: the events of models, as they happen; HEAD gets none."""
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    loop = asyncio.get_running_loop()
    queue = asyncio.Queue[Mapping[str, Any] | None](_MAX_EVENTS)

    def put(event: Mapping[str, Any] | None) -> None:
        if not queue.full():
            queue.put_nowait(event)

    def listener(event: Mapping[str, Any] | None) -> None:
        loop.call_soon_threadsafe(put, event)

    end = models.listen(listener)
    ping_seconds = models.shared.settings.ping_seconds

    async def frames() -> AsyncIterator[bytes]:
        try:
            yield PING
            while not queue.full():
                try:
                    event = await asyncio.wait_for(
                        queue.get(), ping_seconds if ping_seconds > 0 else None
                    )
                    if event is None:
                        return
                    yield frame(encode(event))
                except asyncio.TimeoutError:
                    yield PING
        finally:
            end()

    return StreamingResponse(
        frames(), media_type="text/event-stream", headers={"cache-control": "no-cache"}
    )


def _listed(model: ServedModel, *, own: bool) -> dict[str, Any]:
    """Return a model as llama-server's list has it; its flags are for this server's ``own`` pages
    and for programs.
    """
    source = model.source.card
    service = model.service
    status: dict[str, Any] = {"value": model.status}
    if own:
        status |= {"args": source.args, **({"preset": source.preset} if source.preset else {})}
    if model.error is not None:
        status |= {"failed": True, "exit_code": 1, "message": str(model.error)}
    sees = source.vision if service is None else service.info.vision
    body = {
        "id": model.name,
        "aliases": source.aliases,
        "tags": source.tags,
        "object": "model",
        "owned_by": "llamacpp",
        "created": int(time.time()),
        "path": source.path,
        "status": status,
        "architecture": {
            "input_modalities": ["text", "image"] if sees else ["text"],
            "output_modalities": ["text"],
        },
        "source": source.origin,
        "can_remove": False,
        "size": _file_bytes(source.path),
        "last_used": model.used,
        "load_seconds": model.load_seconds,
    }
    return body if service is None else {**_described(service), **body}


def _file_bytes(path: str) -> int:
    try:
        return Path(path).stat().st_size if path else 0
    except OSError:
        return 0


def _model_json(service: HttpService) -> dict[str, Any]:
    """Return a model as Ollama's list in llama-server has it."""
    details = {
        "parent_model": "",
        "format": "gguf",
        "family": "",
        "families": [""],
        "parameter_size": "",
        "quantization_level": "",
    }
    return {
        "name": service.model,
        "model": service.model,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion", "multimodal"] if service.info.vision else ["completion"],
        "parameters": "",
        "details": details,
    }


def _described(service: HttpService) -> dict[str, Any]:
    """Return a model as OpenAI's list has it, with llama-server's facts."""
    info = service.info
    return {
        "id": service.model,
        "aliases": info.model_aliases,
        "tags": info.model_tags,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "llamacpp",
        "meta": {
            "vocab_type": info.vocab_type,
            "n_vocab": info.n_vocab,
            "n_ctx": info.n_ctx,
            "n_ctx_train": info.n_ctx_train,
            "n_embd": info.n_embd,
            "n_params": info.n_params,
            "size": info.model_size,
            "ftype": info.ftype_name,
        },
    }
