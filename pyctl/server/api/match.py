"""POST /cache/match: the cached part of a prompt, its place, and the cost of the rest, for routers and agents."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pyctl.limit import limit
from pyctl.prompt import Prompt
from pyctl.server.body import AnyBody, ChatBody, CompletionBody, parse_object
from pyctl.server.http import JsonResponse
from pyctl.server.prepare import prepare
from pyctl.server.request_pool import Fetched
from pyctl.server.service import Service

__all__ = ["match"]

_MOST_WAYS = limit(16, "ways to resume in POST /cache/match", "the others are not listed", "reply")


async def match(service: Service, request: Request) -> Response:
    """POST /cache/match: how many tokens of a prompt are ready, where, and what the rest costs in seconds.

    Takes the body of a chat or a text completion. Changes nothing; ``seconds`` is null before anything was evaluated.
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
    body: AnyBody = CompletionBody.of(values) if "prompt" in values else ChatBody.of(values)
    prompt = prepare(service, body, fetched)[0].request.prompt
    return prompt, service.admin.match(prompt)
