"""The endpoints that generate: chat completions, text completions, and llama-server's own completion."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyctl.errors import RequestError
from pyctl.server.api.native import NativeReply
from pyctl.server.api.openai import ChatReply, Identity, TextReply
from pyctl.server.body import ControlBody
from pyctl.server.generate.image_sources import with_images
from pyctl.server.generate.prepare import PreparedReply, prepare
from pyctl.server.generate.reply import Reply
from pyctl.server.generate.respond import ReplyResponse, respond
from pyctl.server.generation_body import ChatBody, CompletionBody, InfillBody
from pyctl.server.http import JsonResponse
from pyctl.server.middleware import sees_texts
from pyctl.server.service import Service

__all__ = ["chat_completions", "completions", "control", "infill", "native_completion"]


async def chat_completions(service: Service, request: Request) -> ReplyResponse:
    """POST /v1/chat/completions"""
    form = partial(ChatReply, service, identity=Identity(service))
    return await _answer(service, request, ChatBody, form)


async def control(service: Service, request: Request) -> Response:
    """POST /v1/chat/completions/control: ends the reasoning of a reply that is being sent."""
    body = ControlBody.parse(await request.body())
    if not body.id:
        raise RequestError("missing completion id")
    if body.action != "reasoning_end":
        raise RequestError("unknown control action")
    handles = service.running.get(body.id)
    if handles is None:
        return JsonResponse({"success": False, "message": "no active completion for this id"})
    if not handles:
        return JsonResponse({"success": False, "message": "reasoning control not enabled for this completion"})
    for handle in handles:
        handle.end_reasoning()
    return JsonResponse({"success": True})


async def completions(service: Service, request: Request) -> ReplyResponse:
    """POST /v1/completions"""
    form = partial(TextReply, service, identity=Identity(service))
    return await _answer(service, request, CompletionBody, form)


async def native_completion(service: Service, request: Request) -> ReplyResponse:
    """POST /completion"""
    return await _answer(service, request, CompletionBody, partial(NativeReply, service))


async def infill(service: Service, request: Request) -> ReplyResponse:
    """POST /infill"""
    return await _answer(service, request, InfillBody, partial(NativeReply, service))


async def _answer(
    service: Service, request: Request, kind: type[ChatBody | CompletionBody], form: Callable[[PreparedReply], Reply]
) -> ReplyResponse:
    body = await request.body()
    prepared = await with_images(service, request, lambda fetched: prepare(service, kind.parse(body), fetched))
    replies = [form(each) for each in prepared]
    for reply in replies:
        reply.sees_texts = sees_texts(request, service.settings)
    return respond(service, replies, _combine)


def _combine(bodies: list[dict[str, Any]]) -> Any:
    """One body as it is; several of OpenAI's as one with all choices, and llama-server's own as a list."""
    if len(bodies) == 1:
        return bodies[0]
    if "choices" not in bodies[0]:
        return bodies
    return {**bodies[0], "choices": [choice for body in bodies for choice in body["choices"]]}
