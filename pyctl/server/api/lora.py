"""LoRA adapters: those that were given at the start, at their scales; what the cache holds depends on both."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pyctl.errors import RequestError
from pyctl.server.body import parse_json
from pyctl.server.generate.prepare import keep_scales
from pyctl.server.generation_body import scales_of
from pyctl.server.http import JsonResponse
from pyctl.server.service import Service

__all__ = ["change", "show"]


async def show(service: Service, request: Request) -> Response:
    """GET /lora-adapters"""
    adapters = enumerate(service.info.lora)
    return JsonResponse(
        [
            {"id": number, "path": path, "scale": scale, "task_name": "", "prompt_prefix": ""}
            for number, (path, scale) in adapters
        ]
    )


async def change(service: Service, request: Request) -> Response:
    """POST /lora-adapters [{"id": ..., "scale": ...}]; ids that do not exist are ignored, as llama-server does."""
    entries = parse_json(await request.body())
    if not isinstance(entries, list):
        raise RequestError("Request body must be an array")
    if service.info.lora:
        keep_scales(service.info, scales_of(entries))
    return JsonResponse({"success": True})
