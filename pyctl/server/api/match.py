"""POST /cache/match: the cached part of a prompt, its place, and the cost of the rest, for routers and agents."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyctl.limit import limit
from pyctl.prompt import Prompt
from pyctl.server.api.anthropic_request import chat_fields, is_messages_request
from pyctl.server.api.responses_request import ResponseRequest
from pyctl.server.body import AnyBody, ChatBody, CompletionBody, parse_object
from pyctl.server.http import JsonResponse
from pyctl.server.prepare import prepare
from pyctl.server.request_pool import Fetched
from pyctl.server.service import Service

__all__ = ["match"]

_MOST_WAYS = limit(16, "ways to resume in POST /cache/match", "the others are not listed", "reply")


async def match(service: Service, request: Request) -> Response:
    """POST /cache/match: how many tokens of a prompt are ready, where, and what the rest costs in seconds.

    Takes a body of OpenAI's or Anthropic's APIs, or ``tokens``. Changes nothing; ``seconds`` is null before
    anything was evaluated.
    """
    values = parse_object(await request.body())
    prompt, found = await service.shared.pool.read(request, lambda fetched: _matched(service, values, fetched))
    ways = [{"where": where, "ready": n, "seconds": seconds} for where, n, seconds in await asyncio.wrap_future(found)]
    best = ways[0] if ways else {"where": "none", "ready": 0, "seconds": None}
    return JsonResponse({"tokens": len(prompt), **best, "ways": ways[:_MOST_WAYS]})


def _matched(
    service: Service, values: dict[str, Any], fetched: Fetched
) -> tuple[Prompt, Future[list[tuple[str, int, float | None]]]]:
    """The prompt of a body, and where it could resume: looked up on a thread that may take some milliseconds."""
    prompt = _prompt_of(service, values, fetched)
    return prompt, service.admin.match(prompt)


def _prompt_of(service: Service, values: dict[str, Any], fetched: Fetched) -> Prompt:
    """The prompt of a body, whose API shows in its members."""
    if "tokens" in values or "prompt" in values:
        body: AnyBody = CompletionBody.of({**values, "prompt": values.get("tokens", values.get("prompt"))})
    elif "input" in values:
        body = ChatBody.of(ResponseRequest.of(values).chat)
    elif is_messages_request(values):
        body = ChatBody.of(chat_fields(values))
    else:
        body = ChatBody.of(values)
    return prepare(service, body, fetched)[0].request.prompt
