from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from pyctl.engine.request import Piece, Request
from pyctl.errors import EngineError
from tests.unit.server.fake import HI, Bench, Gate, Pause, Script, events, fail, play
from tests.unit.server.parts import Caller, in_loop, named_events, sent_in_silence

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
