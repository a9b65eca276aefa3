"""The endpoints that generate: chat completions, text completions, and llama-server's own completion."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request

from pyctl.server.api.native import NativeReply
from pyctl.server.api.openai import ChatReply, Identity, TextReply
from pyctl.server.generate.prepare import PreparedReply, prepare
from pyctl.server.generate.reply import Reply
from pyctl.server.generate.respond import ReplyResponse, respond
from pyctl.server.generation_body import ChatBody, CompletionBody, InfillBody
from pyctl.server.service import Service

__all__ = ["chat_completions", "completions", "infill", "native_completion"]


async def chat_completions(service: Service, request: Request) -> ReplyResponse:
    """POST /v1/chat/completions"""
    form = partial(ChatReply, service, identity=Identity(service))
    return await _answer(service, request, ChatBody, form)


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
    prepared = await service.pool.run(request, lambda: prepare(service, kind.parse(body)))
    replies = [form(each) for each in prepared]
    return respond(service, replies, _combine)


def _combine(bodies: list[dict[str, Any]]) -> Any:
    """One body as it is; several of OpenAI's as one with all choices, and llama-server's own as a list."""
    if len(bodies) == 1:
        return bodies[0]
    if "choices" not in bodies[0]:
        return bodies
    return {**bodies[0], "choices": [choice for body in bodies for choice in body["choices"]]}
