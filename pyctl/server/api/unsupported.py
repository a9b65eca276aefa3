"""llama-server's endpoints for what does not exist here; each answers as llama-server does without the feature."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pyctl.errors import NotFoundError, NotSupportedError, RequestError
from pyctl.server.body import parse_object
from pyctl.server.http import JsonResponse

__all__ = ["disabled", "end_stream", "find_streams", "resume_stream", "transcribe"]


async def transcribe(service: object, request: Request) -> Response:
    """POST /audio/transcriptions"""
    raise NotSupportedError("The current model does not support audio input.")


async def disabled(service: object, request: Request) -> Response:
    """/tools and /cors-proxy"""
    error = {"message": "this feature is disabled", "type": "feature_disabled"}
    return JsonResponse({"error": error}, status_code=403)


async def resume_stream(service: object, request: Request) -> Response:
    """GET /v1/stream: no stream outlives its connection."""
    _conversation(request)
    raise NotFoundError("File Not Found")


async def end_stream(service: object, request: Request) -> Response:
    """DELETE /v1/stream: none is left to end."""
    _conversation(request)
    return Response(status_code=204, media_type="application/json")


async def find_streams(service: object, request: Request) -> Response:
    """POST /v1/streams/lookup: no stream is kept for anyone."""
    parse_object(await request.body())
    return JsonResponse([])


def _conversation(request: Request) -> None:
    if not request.query_params.get("conv_id"):
        raise RequestError("Missing conversation id in path")
