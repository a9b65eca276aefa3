"""LoRA adapters: none can be loaded, so their list is empty and every change of it, too."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pyctl.errors import RequestError
from pyctl.server.json import JsonResponse
from pyctl.server.settings import Service

__all__ = ["change", "show"]


async def show(service: Service, request: Request) -> Response:
    """GET /lora-adapters"""
    return JsonResponse([])


async def change(service: Service, request: Request) -> Response:
    """POST /lora-adapters [{"id": ..., "scale": ...}]; ids that do not exist are ignored, as llama-server does."""
    try:
        entries = msgspec.json.decode(await request.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(entries, list):
        raise RequestError("Request body must be an array")
    return JsonResponse({"success": True})
