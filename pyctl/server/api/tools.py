"""GET and POST /tools: the tools that this process runs for the page and for `pyctl chat`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from pyctl.errors import EngineError, NotFoundError, PyctlError, RequestError
from pyctl.limit import limit
from pyctl.server.body import Body
from pyctl.server.http import JsonResponse, encode, frame
from pyctl.server.models import Models
from pyctl.tools.toolbox import RunnableTool

__all__ = ["call", "disabled", "show"]

_STREAMS = threading.BoundedSemaphore(limit(8, "calls of tools that stream", "503", "process"))

_TARGETS = {"ssh": "ssh target", "docker-container": "container id", "podman-container": "container id"}
"""Runtimes of llama-server, none of which is here, and what follows their names."""


async def disabled(models: Models, request: Request) -> Response:
    """/cors-proxy, and /tools where there are none"""
    error = {"message": "this feature is disabled", "type": "feature_disabled"}
    return JsonResponse({"error": error}, status_code=403)


async def show(models: Models, request: Request) -> Response:
    """GET /tools"""
    tools = models.shared.tools
    return JsonResponse([tool.for_client() for tool in tools]) if tools else await disabled(models, request)


class _CallBody(Body, frozen=True):
    """POST /tools"""

    tool: Any = None
    params: Any = None
    stream: Any = False


async def call(models: Models, request: Request) -> ASGIApp:
    """POST /tools {"tool": ..., "params": {...}}: the result, as a stream of what it prints if it is asked for."""
    shared = models.shared
    if not shared.tools:
        return await disabled(models, request)
    body = _CallBody.parse(await request.body())
    if not isinstance(body.tool, str) or not isinstance(body.params or {}, dict):
        raise RequestError("'tool' must be a string, 'params' an object")
    tool = shared.tools.named(body.tool)
    params = _params(body.params or {}, request, tool)
    if body.stream is not True:
        return JsonResponse(await shared.calling.run(request, tool.run, params))
    if tool.stream is None:
        raise NotFoundError(f"tool {tool.name!r} does not stream")
    return StreamingResponse(_streamed(tool, params), media_type="text/event-stream")


def _params(given: Mapping[str, Any], request: Request, tool: RunnableTool) -> dict[str, Any]:
    """The parameters of the model, and those that only a client may set: by headers, as llama-server has them."""
    if runtime := request.headers.get("x-tool-runtime"):
        scheme, _, target = runtime[:200].partition(":")
        what = f"invalid {_TARGETS[scheme]} {target!r}" if scheme in _TARGETS else f"unknown tool runtime {scheme!r}"
        raise EngineError(f"{what}: tools run on the machine of this server only")
    params = dict(given)
    if tool.in_cwd:
        params["cwd"] = request.headers.get("x-tool-cwd", "")
        params["as_base64"] = request.headers.get("x-resp-type") == "base64"
    return params


async def _streamed(tool: RunnableTool, params: Mapping[str, Any]) -> AsyncIterator[bytes]:
    """What ``tool`` prints, and the end; it is killed if the client leaves."""
    assert tool.stream is not None
    stream, loop, left = tool.stream, asyncio.get_running_loop(), threading.Event()
    chunks: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def tell(event: dict[str, Any]) -> None:
        loop.call_soon_threadsafe(chunks.put_nowait, event)

    def on_chunk(text: str) -> bool:
        if text:
            tell({"chunk": text})
        return not left.is_set()

    def run() -> None:
        end: dict[str, Any] = {"done": True}
        try:
            found = stream(params, on_chunk)
            if isinstance(found, dict) and "error" in found:
                end["error"] = found["error"]
        except Exception as error:
            end["error"] = str(error) if isinstance(error, PyctlError) else "internal error"
        finally:
            _STREAMS.release()
        tell(end)

    if not _STREAMS.acquire(blocking=False):
        yield frame(encode({"done": True, "error": "too many tools stream already, try again later"}))
        return
    try:
        threading.Thread(target=run, name="pyctl-tool", daemon=True).start()
        while True:
            event = await chunks.get()
            yield frame(encode(event))
            if "done" in event:
                return
    finally:
        left.set()
