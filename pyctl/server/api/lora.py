"""LoRA adapters: those that were given at the start, at their scales; what the cache holds depends on both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pyctl.engine.backend import EngineInfo
from pyctl.errors import NotSupportedError, RequestError
from pyctl.server.body import Fields
from pyctl.server.http import JsonResponse
from pyctl.server.service import Service

__all__ = ["change", "scales_of", "show"]


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
    try:
        entries = msgspec.json.decode(await request.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(entries, list):
        raise RequestError("Request body must be an array")
    if service.info.lora:
        _keep(service.info, scales_of(entries))
    return JsonResponse({"success": True})


def scales_of(value: Any, info: EngineInfo | None = None) -> list[tuple[int, float]]:
    """Adapters of a request by number and scale; NotSupportedError if ``info`` has one of them at another scale."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError("'lora' must be an array of objects with 'id' and 'scale' fields")
    entries = [Fields(item) for item in value]
    scales = [(entry.integer("id", default=-1), entry.number("scale", 0.0)) for entry in entries]
    if info is not None:
        _keep(info, scales)
    return scales


def _keep(info: EngineInfo, scales: Iterable[tuple[int, float]]) -> None:
    for number, scale in scales:
        if 0 <= number < len(info.lora) and scale != info.lora[number][1]:
            raise NotSupportedError("the scale of an adapter cannot be changed while the server runs")
