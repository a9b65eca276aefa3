"""Models as Ollama's API lists and shows them."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyctl.requests.json_text import parse_object
from pyctl.server.app_state import HttpService
from pyctl.server.http import JsonResponse
from pyctl.server.models import Models

__all__ = ["loaded_models", "show", "tags"]


async def tags(models: Models, request: Request) -> Response:
    """Answer GET /api/tags; of a model that was not loaded yet, only the name is given."""
    unknown = [model.name for model in models if model.service is None]
    named = [
        {"name": f"{name}:latest", "model": f"{name}:latest", "details": {"format": "gguf"}}
        for name in unknown
    ]
    return JsonResponse({"models": [*map(_model, models.services), *named]})


async def loaded_models(models: Models, request: Request) -> Response:
    """Answer GET /api/ps: the models that are loaded and do not sleep."""
    running = []
    for service in models.services:
        if not service.worker.is_sleeping:
            facts = {"expires_at": _NEVER, "context_length": service.info.n_ctx}
            running.append({**_model(service), **facts})
    return JsonResponse({"models": running})


_NEVER = "2318-01-01T00:00:00Z"


async def show(service: HttpService, request: Request) -> Response:
    """Answer POST /api/show: the model, for any name."""
    parse_object(await request.body())
    info = service.info
    model = _model(service)
    return JsonResponse(
        {
            "template": service.chat.template.source,
            "details": model["details"],
            "model_info": {
                "general.architecture": info.arch,
                "general.basename": info.model_name,
                "general.parameter_count": info.n_params,
                f"{info.arch}.context_length": info.n_ctx,
                f"{info.arch}.embedding_length": info.n_embd,
                f"{info.arch}.vocab_size": info.n_vocab,
            },
            "capabilities": _capabilities(service),
            "modified_at": model["modified_at"],
        }
    )


def _capabilities(service: HttpService) -> list[str]:
    chat = service.chat
    capabilities = {
        "completion": True,
        "tools": chat.capabilities.tools,
        "insert": {"pre", "suf", "mid"} <= service.tokenizer.fim_tokens().keys(),
        "vision": service.info.vision,
        "thinking": chat.dialect.tags.is_known,
        "embedding": service.settings.embeddings,
    }
    return [name for name, has in capabilities.items() if has]


def _model(service: HttpService) -> dict[str, Any]:
    """Return the model as lists have it. ``digest`` identifies it, and how it is evaluated; it is
    not the file's.
    """
    info = service.info
    name = service.model if ":" in service.model else f"{service.model}:latest"
    return {
        "name": name,
        "model": name,
        "modified_at": _modified_at(info.model_path),
        "size": info.model_size,
        "digest": info.fingerprint,
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": info.arch,
            "families": [info.arch],
            "parameter_size": _size(info.n_params),
            "quantization_level": info.ftype_name,
        },
    }


def _modified_at(path: str) -> datetime:
    try:
        seconds = Path(path).stat().st_mtime
    except OSError:  # the file may be gone; the model is in memory
        seconds = 0.0
    return datetime.fromtimestamp(seconds, timezone.utc)


def _size(n_params: int) -> str:
    """Return a number of weights as Ollama writes it: 27.4B."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n_params >= unit:
            return f"{n_params / unit:.1f}{name}"
    return str(n_params)
