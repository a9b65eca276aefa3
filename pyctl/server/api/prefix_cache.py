"""The endpoints of the prefix cache itself: what it holds, pins, prompts that are made ready, and a clean slate."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pyctl.cache.cache_stats import CacheStats, CacheView
from pyctl.engine.request import Done, Failed
from pyctl.errors import EngineError, NotFoundError, RequestError
from pyctl.server.body import PinBody
from pyctl.server.generate.prepare import prepare_warm_up
from pyctl.server.generation_body import ChatBody
from pyctl.server.http import JsonResponse
from pyctl.server.memory_use import counted_bytes, resident_bytes
from pyctl.server.middleware import may_be_rebound
from pyctl.server.service import Service

__all__ = ["clear", "pin", "show", "warm"]


async def show(service: Service, request: Request) -> Response:
    """GET /cache: the tree of prefixes, with sizes in bytes, ages in seconds and hits, and sums since the start.

    How prompts end is for those who have a key, or for all with --show-prompts.
    """
    settings = service.settings
    is_shown = settings.show_prompts and not may_be_rebound(request.headers.get("host", ""))
    view = await asyncio.wrap_future(service.admin.view())
    memory = await asyncio.wrap_future(service.admin.memory())
    tree = _tree(service, view, with_text=bool(settings.api_keys) or is_shown)
    return JsonResponse({**tree, "memory": {"resident": resident_bytes(), **counted_bytes(service, memory)}})


async def pin(service: Service, request: Request) -> Response:
    """POST /cache/pin {"id": ..., "pinned": true}: a pinned prefix is never evicted."""
    body = PinBody.parse(await request.body())
    name = body.id
    if not isinstance(name, str) or not name:
        raise RequestError("'id' must be the id of a prefix in GET /cache")
    if not await asyncio.wrap_future(service.admin.pin(name, body.pinned)):
        raise NotFoundError(f"no prefix {name!r} in the cache")
    return JsonResponse({"id": name, "pinned": body.pinned})


async def warm(service: Service, request: Request) -> Response:
    """POST /cache/warm: evaluates the prompt of a chat request, as far as it is certain, while nobody else asks.

    Answers with its tokens when they are ready; a client that does not wait changes nothing.
    """
    raw = await request.body()
    asked = await service.pool.run(request, lambda: prepare_warm_up(service, ChatBody.parse(raw)))
    async for event in service.worker.submit(asked):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Done):
            stats = event.stats
            return JsonResponse({"ready": stats.n_prompt, "cached": stats.n_cached, "evaluated": stats.n_evaluated})
    raise EngineError("the prompt ended without a result")


async def clear(service: Service, request: Request) -> Response:
    """DELETE /cache: drops every prefix that is not pinned."""
    return JsonResponse({"dropped": await asyncio.wrap_future(service.admin.clear())})


def _tree(service: Service, view: CacheView, *, with_text: bool) -> dict[str, Any]:
    nodes: dict[str, dict[str, Any]] = {}
    roots: list[dict[str, Any]] = []
    for snapshot in view.snapshots:
        node = msgspec.to_builtins(snapshot)
        del node["tail"]
        if with_text:
            node["tail"] = service.text_of(snapshot.tail)
        node["children"] = []
        parent = node.pop("parent")
        nodes[snapshot.id] = node
        (nodes[parent]["children"] if parent in nodes else roots).append(node)
    return {
        "slots": {
            "capacity": view.n_slots,
            "in_use": len(view.snapshots),
            "evicted": view.n_evicted,
            "refused": view.n_refused,
        },
        "bytes": {"resident": view.n_bytes, "budget": view.budget},
        "totals": _totals(view.totals),
        "prefixes": roots,
        "disk": msgspec.to_builtins(view.disk),
    }


def _totals(totals: CacheStats) -> dict[str, Any]:
    return {
        "requests": totals.requests,
        "prompt": totals.n_prompt,
        "evaluated": totals.n_evaluated,
        "predicted": totals.n_predicted,
        "cached": totals.n_cached,
        "hits": totals.hits,
        "snapshots_saved": totals.n_saved,
        "failed_restores": totals.failed_restores,
        "warmed": totals.n_warmed,
        "warmed_used": totals.n_warmed_used,
        "warm_ups": totals.n_warm_ups,
    }
