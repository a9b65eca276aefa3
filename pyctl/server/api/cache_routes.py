"""The endpoints of the prefix cache: contents, pins, background requests, and clearing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pyctl.cache.cache_stats import CacheStats, CacheView, LiveView
from pyctl.cache.ports import Entry
from pyctl.cache.request_kind import RequestKind
from pyctl.engine.request import Done, Failed
from pyctl.engine.request_history import ServedRequest
from pyctl.errors import EngineError, NotFoundError, RequestError
from pyctl.processes.process_memory import resident_bytes
from pyctl.requests.body import ChatBody
from pyctl.requests.body_reader import Body
from pyctl.requests.prepare import prepare_prewarm
from pyctl.server.app_state import HttpService
from pyctl.server.cache_advice import explain
from pyctl.server.http import JsonResponse
from pyctl.server.middleware import may_read_prompts
from pyctl.settings.limit import limit

__all__ = ["check", "clear", "drop", "pin", "prewarm", "show", "stop"]

_MAX_STORED = limit(
    256, "prefixes only on disk in GET /cache", "the others are not listed", "reply"
)


class _PinBody(Body, frozen=True):
    """The body of POST /cache/pin."""

    id: Any = None
    pinned: bool = True


async def show(service: HttpService, request: Request) -> Response:
    """Answer GET /cache: the tree of prefixes, with sizes in bytes, ages in seconds and hits, and
    sums since the start.

    ``saved`` is the time that the cache saved the clients of all models: ``today``, since local
    midnight, and ``total``, kept across restarts if there is a cache directory.

    ``canary`` counts the snapshots that were evaluated again, and compared to the bit.

    ``replies`` are the last ones, with tokens, milliseconds and the kind of the request, ``kinds``
    the numbers of requests by kind; ``shared`` of a prefix are the tokens whose rows are shared
    with the one before it in the list. Clients that may not read prompts do not get ``why``, which
    shows how long a prompt equals another one.

    Words of prompts are shown only to clients that `may_read_prompts` allows. ``?since=`` takes an
    earlier ``revision``: if the tree is unchanged, the answer is only its revision.
    """
    since = request.query_params.get("since", "")
    if since and str(revision := await asyncio.wrap_future(service.admin.revision())) == since:
        return JsonResponse({"revision": revision})
    view = await asyncio.wrap_future(service.admin.view())
    memory = await asyncio.wrap_future(service.admin.memory())
    requests = await asyncio.wrap_future(service.admin.requests())
    kinds = await asyncio.wrap_future(service.admin.n_by_kind())
    with_text = may_read_prompts(request, service.shared.settings)
    has_disk = view.disk is not None and view.disk.in_use
    entries = await service.shared.pool.storage.run(request, _stored, service) if has_disk else []
    body = _view_json(service, view, entries, with_text=with_text)
    body["saved"] = service.shared.saved.view()
    body["replies"] = [_reply(age, served, with_why=with_text) for age, served in requests]
    body["kinds"] = {kind.value: kinds.get(kind, 0) for kind in RequestKind}
    body["canary"] = msgspec.to_builtins(await asyncio.wrap_future(service.admin.canary()))
    return JsonResponse(
        {**body, "memory": {"resident": resident_bytes(), **service.counted_bytes(memory)}}
    )


async def check(service: HttpService, request: Request) -> Response:
    """Answer GET /cache/check: ``faults`` of the cache in RAM, a line each; [] if it is
    consistent.
    """
    return JsonResponse({"faults": await asyncio.wrap_future(service.admin.check())})


async def pin(service: HttpService, request: Request) -> Response:
    """Answer POST /cache/pin {"id": ..., "pinned": true}, which protects a prefix from eviction.
    Raises RequestError, NotFoundError if unknown.
    """
    body = _PinBody.parse(await request.body())
    name = body.id
    if not isinstance(name, str) or not name:
        raise RequestError("'id' must be the id of a prefix in GET /cache")
    if not await asyncio.wrap_future(service.admin.pin(name, body.pinned)):
        raise NotFoundError(f"no prefix {name!r} in the cache")
    return JsonResponse({"id": name, "pinned": body.pinned})


async def prewarm(service: HttpService, request: Request) -> Response:
    """Answer POST /cache/prewarm: evaluate the certain part of the prompt of a chat request while
    the engine is idle.

    The answer comes with its tokens when they are ready; the work continues if the client
    disconnects. Raises EngineError.
    """
    raw = await request.body()
    asked = await service.shared.pool.read(
        request, lambda fetched: prepare_prewarm(service, ChatBody.parse(raw), fetched)
    )
    asked = replace(asked, may_read_prompts=may_read_prompts(request, service.shared.settings))
    async for event in service.worker.submit(asked):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Done):
            stats = event.stats
            return JsonResponse(
                {"ready": stats.n_prompt, "cached": stats.n_cached, "evaluated": stats.n_evaluated}
            )
    raise EngineError("the prompt ended without a result")


async def drop(service: HttpService, request: Request) -> Response:
    """Answer DELETE /cache/{id}: drop one prefix that is not pinned, in RAM and on disk. Raises
    NotFoundError if none has the id.
    """
    name = request.path_params["id"]
    if not await service.shared.pool.storage.run(request, service.admin.drop, name):
        raise NotFoundError(f"no prefix {name!r} in the cache")
    return JsonResponse({"dropped": 1})


async def stop(service: HttpService, request: Request) -> Response:
    """Answer DELETE /cache/requests/{id}: end a running request, as ``task`` of ``sequences`` in
    GET /cache names it.

    Raises NotFoundError if it does not run.
    """
    task: int = request.path_params["id"]
    if not await asyncio.wrap_future(service.admin.stop(task)):
        raise NotFoundError(f"request {task} does not run")
    return JsonResponse({"stopped": task})


async def clear(service: HttpService, request: Request) -> Response:
    """Answer DELETE /cache: drop every prefix that is not pinned."""
    return JsonResponse({"dropped": await asyncio.wrap_future(service.admin.clear())})


def _stored(service: HttpService) -> list[Entry]:
    try:
        return service.admin.stored()
    except OSError:  # the view leaves out a failing disk
        return []


def _view_json(
    service: HttpService, view: CacheView, entries: list[Entry], *, with_text: bool
) -> dict[str, Any]:
    """Return the answer to GET /cache; ``entries`` that are only on disk come as a list."""
    in_memory = {snapshot.id for snapshot in view.snapshots}
    only_stored = [entry for entry in entries if entry.name not in in_memory]
    device_bytes = sum(snapshot.device_bytes for snapshot in view.snapshots)
    return {
        "slots": {
            "capacity": view.n_slots,
            "in_use": len(view.snapshots),
            "evicted": view.n_evicted,
            "refused": view.n_refused,
            "prompt_ends": view.n_ends,
        },
        "model_memory": service.info.memory,
        "bytes": {"resident": view.n_bytes, "budget": view.budget, "device": device_bytes},
        "totals": _totals(view.totals),
        "prefixes": _prefixes(service, view, with_text=with_text),
        "sequences": [_sequence(service, seq, with_text=with_text) for seq in view.live],
        "disk": msgspec.to_builtins(view.disk),
        "stored": [_entry(entry, with_text=with_text) for entry in only_stored[:_MAX_STORED]],
        "revision": view.revision,
    }


def _prefixes(service: HttpService, view: CacheView, *, with_text: bool) -> list[dict[str, Any]]:
    """Return the snapshots in memory as trees: each one under its parent, or a root where the
    parent was evicted.
    """
    nodes: dict[str, dict[str, Any]] = {}
    roots: list[dict[str, Any]] = []
    for snapshot in view.snapshots:
        node = msgspec.to_builtins(snapshot)
        del node["head"]
        del node["tail"]
        if with_text:
            node["head"] = service.readable(snapshot.head)
            node["tail"] = service.readable(snapshot.tail)
        node["children"] = []
        nodes[snapshot.id] = node
        parent = nodes.get(node.pop("parent"))
        siblings = roots if parent is None else parent["children"]
        siblings.append(node)
    return roots


def _reply(age: float, served: ServedRequest, *, with_why: bool) -> dict[str, Any]:
    """Return a request of the timeline; ``with_why`` also the reason for tokens evaluated
    again.
    """
    timings = served.timings
    body = {
        "age": age,
        "kind": served.kind.value if served.kind is not None else None,
        "source": served.source,
        "cache_n": timings.n_cached,
        "prompt_n": timings.n_evaluated,
        "prompt_ms": timings.prompt_ms,
        "predicted_n": timings.n_predicted,
        "predicted_ms": timings.predicted_ms,
    }
    if not with_why:
        return body
    n_prompt = timings.n_cached + timings.n_evaluated
    explanation = explain(served.comparison, n_prompt, timings.n_cached)
    return {**body, "why": explanation.as_json() if explanation is not None else None}


def _sequence(service: HttpService, seq: LiveView, *, with_text: bool) -> dict[str, Any]:
    node: dict[str, Any] = {
        "id": seq.id,
        "n": seq.n,
        "busy": seq.busy,
        "at": seq.at,
        "task": seq.task,
    }
    return {**node, "tail": service.readable(seq.tail)} if with_text else node


def _entry(entry: Entry, *, with_text: bool) -> dict[str, Any]:
    now = time.time()
    node: dict[str, Any] = {
        "id": entry.name,
        "parent": entry.parent,
        "n": entry.n,
        "bytes": entry.n_bytes,
        "hits": entry.hits,
        "age": max(now - entry.created, 0.0),
        "idle": max(now - entry.used, 0.0),
        "pinned": entry.pinned,
    }
    return {**node, "label": entry.label} if with_text else node


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
        "prewarmed": totals.n_prewarmed,
        "prewarmed_used": totals.n_prewarmed_used,
        "prewarms": totals.n_prewarms,
        "saved_seconds": totals.saved_seconds,
    }
