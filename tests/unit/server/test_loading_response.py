"""Answers to requests whose model has to be loaded first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from pyctl.errors import ModelError
from pyctl.server.app_state import HttpService
from pyctl.server.http import error_response
from pyctl.server.loading_response import LoadingResponse
from pyctl.server.models import Lease
from tests.unit.server.parts import Caller, in_loop


class SlowModels:
    """Models whose lease comes when a test sets it."""

    def __init__(self) -> None:
        self.future = Future[Lease]()
        self.n_closed = 0

    def acquire(self, model: object) -> Future[Lease]:
        return self.future

    def load(self) -> None:
        lease: Any = SimpleNamespace(service="the service", close=self.close)
        self.future.set_result(lease)

    def close(self) -> None:
        self.n_closed += 1


async def greet(service: HttpService) -> ASGIApp:
    return PlainTextResponse(f"served by {service}")


async def refuse(service: HttpService) -> ASGIApp:
    return Response(b'{"error": "no"}', status_code=400)


def caller_of(
    models: Any, answer: Callable[[HttpService], Awaitable[ASGIApp]] = greet, **options: Any
) -> Caller:
    model: Any = "a"
    app = LoadingResponse(models, model, answer, error_response, **options)
    return Caller(app, "/", {})


@in_loop
async def test_a_model_that_is_loaded_answers_at_once() -> None:
    models = SlowModels()
    models.load()
    caller = caller_of(models, ping_seconds=0.001)
    await caller.call()
    assert caller.sent[0]["status"] == 200
    assert caller.bodies == [b"served by the service"]
    assert models.n_closed == 1


@in_loop
async def test_a_reply_that_is_no_stream_waits_in_silence() -> None:
    models = SlowModels()
    caller = caller_of(models)
    call = asyncio.ensure_future(caller.call())
    await asyncio.sleep(0.02)
    assert caller.sent == []
    models.load()
    await call
    assert caller.bodies == [b"served by the service"]


@in_loop
async def test_a_stream_has_comments_before_its_body() -> None:
    models = SlowModels()
    caller = caller_of(models, ping_seconds=0.001)
    call = asyncio.ensure_future(caller.call())
    await caller.until(lambda: len(caller.bodies) >= 2)
    models.load()
    await call
    *comments, body, end = caller.bodies
    assert set(comments) == {b":\n\n"}
    assert body == b"served by the service"
    assert end == b""
    starts = [message for message in caller.sent if message["type"] == "http.response.start"]
    assert [start["status"] for start in starts] == [200]


@in_loop
async def test_an_error_after_a_comment_is_an_event() -> None:
    for name, head in ((b"", b""), (b"error", b"event: error\n")):
        models = SlowModels()
        caller = caller_of(models, refuse, ping_seconds=0.001, error_event=name)
        call = asyncio.ensure_future(caller.call())
        await caller.until(lambda caller=caller: bool(caller.bodies))  # type: ignore[misc]
        models.load()
        await call
        assert b"".join(caller.bodies).endswith(head + b'data: {"error": "no"}\n\n')


@in_loop
async def test_a_load_that_fails_is_the_answer() -> None:
    models = SlowModels()
    models.future.set_exception(ModelError("it is broken"))
    caller = caller_of(models)
    await caller.call()
    assert caller.sent[0]["status"] == 500
    assert b"it is broken" in caller.bodies[0]


@in_loop
async def test_a_client_that_leaves_gives_up_its_place() -> None:
    models = SlowModels()
    caller = caller_of(models)
    call = asyncio.ensure_future(caller.call())
    await asyncio.sleep(0)
    caller.gone.set()
    await call
    assert caller.sent == []
    assert models.future.cancelled()
