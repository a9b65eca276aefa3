from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.cache_stats import RequestStats
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Piece, Request, Timings
from pyctl.errors import EngineError
from pyctl.prompt import Prompt
from pyctl.server.sending import merged
from tests.client import HI, events, named_events
from tests.unit.server.fake import Bench, Gate, Pause, Script, fail, play
from tests.unit.server.parts import Caller, in_loop, sent_in_silence

NEVER = Pause(None)


def chat(stream: bool, **fields: Any) -> dict[str, Any]:
    return {"messages": HI, "stream": stream, **fields}


def silent(request: Request) -> Script:
    yield NEVER


@in_loop
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [silent, play("a", "b", "c", pause=None)])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat"]
)
async def test_a_client_who_leaves_stops_the_work(
    path: str, stream: bool, script: Callable[[Request], Script], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="pyctl.server")
    bench = Bench(script)
    caller = Caller(bench.app, path, chat(stream, input="Hi", max_tokens=99))
    call = asyncio.ensure_future(caller.call())
    await caller.until(lambda: bool(bench.worker.handles))
    if stream and script is not silent:
        await caller.until(lambda: bool(caller.sent))
    assert not bench.worker.handles[0].cancelled
    caller.gone.set()
    await asyncio.wait_for(call, 30)  # there is no end of these replies
    assert bench.worker.handles[0].cancelled
    assert "the client disconnected" in caplog.text
    assert (" tokens cached  " in caplog.text) == (stream and script is not silent)


@in_loop
async def test_all_prompts_of_a_request_are_stopped() -> None:
    bench = Bench(silent)
    caller = Caller(bench.app, "/completion", {"prompt": ["a", "b"]})
    call = asyncio.ensure_future(caller.call())
    await caller.until(lambda: len(bench.worker.handles) == 2)
    caller.gone.set()
    await call
    assert [handle.cancelled for handle in bench.worker.handles] == [True, True]


@in_loop
async def test_a_stopping_server_stops_the_work() -> None:
    bench = Bench(silent)
    caller = Caller(bench.app, "/v1/chat/completions", chat(True))
    call = asyncio.ensure_future(caller.call())
    await caller.until(lambda: bool(bench.worker.handles))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert bench.worker.handles[0].cancelled


@in_loop
async def test_headers_go_out_with_the_first_progress() -> None:
    bench = Bench(lambda request: [*list(play()(request))[:1], NEVER])
    caller = Caller(bench.app, "/v1/chat/completions", chat(True))
    call = asyncio.ensure_future(caller.call())
    await caller.until(lambda: bool(caller.sent))
    assert (
        dict(caller.sent[0]["headers"])[b"x-pyctl-cache"] == b"source=none; cached=0; evaluated=21"
    )
    assert caller.bodies == []
    caller.gone.set()
    await call


@in_loop
async def test_events_that_wait_together_are_sent_together() -> None:
    bench = Bench(play(*"abcdef"))
    caller = Caller(bench.app, "/v1/chat/completions", chat(True))
    await caller.call()
    first, *rest = caller.bodies
    assert len(events(first)) == 1 + 6 + 1  # the role, each letter, the end
    assert rest == [b"data: [DONE]\n\n", b""]


@in_loop
async def test_what_was_said_before_a_failure_is_sent() -> None:
    bench = Bench(lambda request: [Piece("a", (97,)), *fail(EngineError("broken"))(request)])
    caller = Caller(bench.app, "/completion", {"prompt": "x", "stream": True})
    await caller.call()
    said, error = events(b"".join(caller.bodies))
    assert said["content"] == "a"
    assert error["error"]["message"] == "broken"


@in_loop
async def test_a_silent_stream_sends_comments() -> None:
    silence = Gate(threading.Event())
    bench = Bench(lambda request: [silence, Piece("a", (97,)), *list(play()(request))[-1:]])
    caller = Caller(
        bench.app, "/completion", {"prompt": "x", "stream": True, "sse_ping_interval": 1}
    )
    call = asyncio.ensure_future(caller.call())
    await caller.until(lambda: bool(caller.bodies))
    silence.opened.set()
    await call
    assert caller.sent[0]["status"] == 200
    assert caller.bodies[0] == b":\n\n"
    assert [event["content"] for event in events(b"".join(caller.bodies[1:]))] == ["a", ""]


@pytest.mark.parametrize(
    ("path", "sign", "kinds"),
    [
        ("/v1/messages", b"ping", "message_start( ping)+ content_block_start "),
        (
            "/v1/responses",
            b"response.in_progress",
            r"response\.created( response\.in_progress){2,} ",
        ),
    ],
)
def test_a_silent_stream_of_named_events_has_one_for_that(
    path: str, sign: bytes, kinds: str
) -> None:
    sent = sent_in_silence(
        path, {"messages": HI, "input": "x"}, lambda sent: sent.count(b"event: " + sign) > 1
    )
    assert re.match(kinds, " ".join(event["type"] for event in named_events(sent)))


@in_loop
async def test_comments_can_be_turned_off() -> None:
    bench = Bench(lambda request: [Pause(0.05), *list(play()(request))[-1:]])
    caller = Caller(
        bench.app, "/completion", {"prompt": "x", "stream": True, "sse_ping_interval": -1}
    )
    await caller.call()
    assert b":\n\n" not in caller.bodies


DONE = Done("eos", "", Timings(0, 1, 0.0, 0, 0.0, 0.0), RequestStats(1), 0)


def played(*parts: str | None) -> RequestHandle:
    """Return a handle that gets ``parts`` and its end from the running loop; None is a pause."""
    handle = RequestHandle(Request(Prompt.from_ids([1])))
    delay = 0.0
    for part in (*parts, ""):
        event = Piece(part, ()) if part else DONE
        delay += 0.004 if part is None else 1e-6
        if part is not None and delay < 1e-3:
            handle.put(event)
        elif part is not None:
            asyncio.get_running_loop().call_later(delay, handle.put, event)
    return handle


async def texts(*scripts: tuple[str | None, ...]) -> list[tuple[int, str]]:
    return await drained([played(*parts) for parts in scripts])


async def drained(handles: list[RequestHandle]) -> list[tuple[int, str]]:
    async with aclosing(merged(handles)) as found:
        return [
            (number, event.text)
            async for number, events in found
            for event in events
            if isinstance(event, Piece)
        ]


def test_what_is_there_does_not_wait_for_another_handle() -> None:
    assert asyncio.run(texts(("a", None, None, None, "b"), ("c", "d"))) == [
        (0, "a"),
        (1, "c"),
        (1, "d"),
        (0, "b"),
    ]


@given(st.lists(st.lists(st.sampled_from(["x", "y", None]), max_size=5), min_size=1, max_size=4))
def test_every_handle_keeps_its_order(scripts: list[list[str | None]]) -> None:
    seen = asyncio.run(texts(*map(tuple, scripts)))
    for number, parts in enumerate(scripts):
        assert [text for at, text in seen if at == number] == [part for part in parts if part]


class Broken(RequestHandle):
    async def __anext__(self) -> Piece | Done:
        raise ValueError("broken")


def test_an_error_comes_through_and_nothing_is_left_running() -> None:
    async def run() -> int:
        broken = Broken(Request(Prompt.from_ids([1])))
        with pytest.raises(ValueError, match="broken"):
            await drained([played("a", *[None] * 1000), broken])
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


def test_leaving_early_stops_the_handles() -> None:
    async def run() -> int:
        async with aclosing(merged([played("a", *[None] * 1000), played("b")])) as found:
            async for _ in found:
                break
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
