"""The endpoints of Anthropic's Messages API; anthropic_request and anthropic_reply say where llama-server differs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp

from pyctl.server.anthropic_reply import MessageReply, error_response
from pyctl.server.anthropic_request import chat_fields
from pyctl.server.chat import chat_job
from pyctl.server.counts import count
from pyctl.server.events import answer
from pyctl.server.fields import Fields
from pyctl.server.journal import failed
from pyctl.server.json import JsonResponse
from pyctl.server.openai import Identity
from pyctl.server.settings import Service

__all__ = ["count_tokens", "messages"]


async def messages(service: Service, request: Request) -> ASGIApp:
    """POST /v1/messages"""
    return await _answered(request, lambda fields: _ask(service, fields))


async def count_tokens(service: Service, request: Request) -> ASGIApp:
    """POST /v1/messages/count_tokens"""
    return await _answered(request, lambda fields: _count(service, fields))


async def _answered(request: Request, reply: Callable[[Fields], Awaitable[ASGIApp]]) -> ASGIApp:
    """Errors in Anthropic's form."""
    try:
        return await reply(Fields.parse(await request.body()))
    except ClientDisconnect:
        raise
    except Exception as error:
        failed(request.url.path, error)
        return error_response(error)


async def _ask(service: Service, fields: Fields) -> ASGIApp:
    job = await asyncio.to_thread(lambda: chat_job(service, chat_fields(fields)))
    return answer(service, MessageReply(service, job, Identity(service)))


async def _count(service: Service, fields: Fields) -> ASGIApp:
    return JsonResponse({"input_tokens": await asyncio.to_thread(lambda: count(service, chat_fields(fields)))})
