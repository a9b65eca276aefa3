"""How many tokens a chat request has, without answering it."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from pyctl.server.chat import chat_turn
from pyctl.server.fields import Fields
from pyctl.server.json import JsonResponse
from pyctl.server.settings import Service

__all__ = ["chat_input_tokens", "count", "counted"]


async def chat_input_tokens(service: Service, request: Request) -> Response:
    """POST /v1/chat/completions/input_tokens"""
    fields = Fields.parse(await request.body())
    return counted(await asyncio.to_thread(count, service, fields))


def count(service: Service, fields: Fields) -> int:
    """Tokens of the prompt that the chat request ``fields`` is rendered to."""
    return len(service.chat.prompt_from_text(chat_turn(service, fields).text))


def counted(n_tokens: int) -> Response:
    """``n_tokens`` as OpenAI says it."""
    return JsonResponse({"input_tokens": n_tokens, "object": "response.input_tokens"})
