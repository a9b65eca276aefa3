"""GET and POST /tools: the tools of MCP servers for the page and for `pyctl chat`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pyctl.errors import BusyError, NotFoundError, RequestError
from pyctl.requests.json_text import parse_object
from pyctl.requests.request_pool import run_until_disconnect
from pyctl.server.http import JsonResponse
from pyctl.server.models import Models
from pyctl.settings.limit import limit

if TYPE_CHECKING:
    from pyctl.mcp.mcp_client import McpTool

__all__ = ["call", "disabled", "show"]

_CALLS = limit(64, "calls of tools that run or wait", "503 with Retry-After", "process")


async def disabled(models: Models, request: Request) -> Response:
    """Answer /cors-proxy, and /tools if there are none, with an error."""
    error = {"message": "this feature is disabled", "type": "feature_disabled"}
    return JsonResponse({"error": error}, status_code=403)


async def show(models: Models, request: Request) -> Response:
    """Answer GET /tools."""
    tools = models.shared.tools
    return (
        JsonResponse([_tool_json(tool) for tool in tools])
        if tools
        else await disabled(models, request)
    )


def _tool_json(tool: McpTool) -> dict[str, Any]:
    return {
        "display_name": tool.name,
        "tool": tool.name,
        "type": "mcp",
        "permissions": {"write": not tool.reads_only},
        "uses_cwd": False,
        "definition": tool.definition(),
    }


async def call(models: Models, request: Request) -> Response:
    """Answer POST /tools {"tool", "params"}: the result. Raises RequestError, NotFoundError,
    BusyError or ClientDisconnect.
    """
    shared = models.shared
    if not shared.tools:
        return await disabled(models, request)
    body = parse_object(await request.body())
    name = body.get("tool")
    params = body.get("params") or {}
    if not isinstance(name, str) or not isinstance(params, dict):
        raise RequestError("'tool' must be a string, 'params' an object")
    tool = shared.tools.get(name)
    if body.get("stream") is True:
        raise NotFoundError(f"tool {tool.name!r} does not stream")
    if len(shared.calls) >= _CALLS:
        raise BusyError(len(shared.calls))
    running = asyncio.wrap_future(tool.call(params))
    shared.calls.add(running)
    try:
        if not await run_until_disconnect(request.receive, running):
            raise ClientDisconnect
        return JsonResponse(running.result())
    finally:
        shared.calls.discard(running)
