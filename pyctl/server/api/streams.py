"""llama-server's endpoints of streams that outlive their connections: replay, end, and list."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pyctl.errors import LoadingError, RequestError
from pyctl.requests.body_reader import at_most
from pyctl.requests.json_text import parse_object
from pyctl.requests.request_pool import run_until_disconnect
from pyctl.server.http import JsonResponse
from pyctl.server.kept_streams import send_stream, stream_key
from pyctl.server.models import Models
from pyctl.settings.limit import limit

__all__ = ["end", "find", "resume"]

_MAX_IDS = limit(1024, "`conversation_ids` of /v1/streams/lookup", "400", "request")
_MAX_DIGITS = 18


async def resume(models: Models, request: Request) -> ASGIApp:
    """Answer GET /v1/stream?conv_id=ID&from=N: its bytes from N on. Raises RequestError;
    LoadingError before the stream starts.
    """
    stream = models.shared.streams.get(stream_key(request, request.query_params.get("conv_id", "")))
    value = request.query_params.get("from", "0") or "0"
    if not (value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS):
        raise RequestError("Invalid 'from' offset")
    if int(value) < stream.n_dropped:
        raise RequestError("Stream offset lost, please restart")
    if stream.head is None:
        raise LoadingError
    if request.method == "HEAD":  # else the connection would stay open until the stream ends
        return Response(media_type="text/event-stream")

    async def resumed(scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(
            receive, send_stream(stream, int(value), send)
        )  # a client that leaves changes nothing

    return resumed


async def end(models: Models, request: Request) -> Response:
    """Answer DELETE /v1/stream?conv_id=ID: end the work of a kept stream and forget it, if it
    exists.
    """
    models.shared.streams.drop(stream_key(request, request.query_params.get("conv_id", "")))
    return Response(status_code=204, media_type="application/json")


async def find(models: Models, request: Request) -> Response:
    """Answer POST /v1/streams/lookup {"conversation_ids": [...]}: the streams that are kept for
    this client.
    """
    value = parse_object(await request.body()).get("conversation_ids")
    names = (
        [name for name in value if isinstance(name, str) and name]
        if isinstance(value, list)
        else []
    )
    at_most(_MAX_IDS, len(names), "conversation_ids", "ids")
    kept_streams = [
        each
        for name in names
        for each in models.shared.streams.find_variants(stream_key(request, name))
    ]
    return JsonResponse(
        [
            {
                "conversation_id": name,
                "is_done": bool(stream.ended),
                "total_bytes": stream.n_bytes,
                "started_at": int(stream.started),
                "completed_at": int(stream.ended),
            }
            for name, stream in kept_streams
        ]
    )
