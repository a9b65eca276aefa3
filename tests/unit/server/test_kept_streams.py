"""Streams that outlive their connections: llama-server's interface, and the bounds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pyctl.engine.request import Request
from pyctl.server.server_settings import ServerSettings
from tests.client import HI, events
from tests.unit.engine.drive import ManualClock
from tests.unit.server.fake import Bench, Gate, Pause, Script, play
from tests.unit.server.parts import Caller, in_loop

CHAT = "/v1/chat/completions"
BODY = {"messages": HI, "stream": True, "return_progress": True}


def conversation(name: str, key: str = "") -> dict[str, str]:
    return {"x-conversation-id": name, **({"authorization": f"Bearer {key}"} if key else {})}


class Talk:
    """A server, and clients that come and go in one event loop."""

    def __init__(self, script: Callable[[Request], Script], **settings: Any) -> None:
        self.bench = Bench(script, settings=ServerSettings(**settings))
        self.clock = ManualClock()
        self.streams = self.bench.service.shared.streams
        self.streams.now = self.clock

    async def begin(self, name: str, key: str = "", path: str = CHAT, n_sent: int = 2) -> Caller:
        """Ask for a stream, and leave after so many messages."""
        caller = Caller(self.bench.app, path, BODY, conversation(name, key))
        call = asyncio.ensure_future(caller.call())
        await caller.until(lambda: len(caller.sent) >= n_sent)
        caller.gone.set()
        await asyncio.wait_for(call, 30)
        return caller

    async def ask(self, method: str, path: str, key: str = "", **kwargs: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.bench.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return await client.request(method, path, headers=headers, **kwargs)


def gated(gate: Gate, *texts: str, pause: float | None = 0.0) -> Callable[[Request], Script]:
    """Return a report of the prefill, and the rest once the gate opens, with pauses as `play` has
    them.
    """

    def script(request: Request) -> Script:
        first, *rest = play(*texts, pause=pause)(request)
        yield first
        yield gate
        yield from rest

    return script


def content(body: bytes) -> str:
    return "".join(
        e["choices"][0]["delta"].get("content") or ""
        for e in events(body)
        if e != "[DONE]" and e["choices"]
    )


@in_loop
async def test_a_reply_goes_on_without_its_client_and_is_read_from_any_byte() -> None:
    """A client that comes back reads the rest of its reply from the byte it has, and the joined
    bytes are those of a stream that was never interrupted.
    """
    gate = Gate(threading.Event())
    talk = Talk(gated(gate, "One ", "two ", "three"))
    first = await talk.begin("mine")
    handle = talk.bench.worker.handles[0]
    assert not handle.cancelled
    reading = asyncio.ensure_future(talk.ask("GET", "/v1/stream?conv_id=mine&from=0"))
    listed = (
        await talk.ask("POST", "/v1/streams/lookup", json={"conversation_ids": ["mine", "other"]})
    ).json()
    assert [(each["conversation_id"], each["is_done"]) for each in listed] == [("mine", False)]
    gate.opened.set()
    whole = await asyncio.wait_for(reading, 30)
    assert whole.headers["content-type"] == "text/event-stream"
    assert content(whole.content) == "One two three"
    assert whole.content.endswith(b"data: [DONE]\n\n")
    had = b"".join(first.bodies)
    assert whole.content.startswith(had)
    rest = await talk.ask("GET", f"/v1/stream?conv_id=mine&from={len(had)}")
    assert had + rest.content == whole.content
    listed = (
        await talk.ask("POST", "/v1/streams/lookup", json={"conversation_ids": ["mine"]})
    ).json()
    assert listed[0]["is_done"] is True
    assert listed[0]["total_bytes"] == len(whole.content)
    for wrong in ("-1", "x", "1e3", "9" * 19):
        assert (await talk.ask("GET", f"/v1/stream?conv_id=mine&from={wrong}")).status_code == 400


@pytest.mark.parametrize("path", [CHAT, "/completion", "/v1/messages"])
@in_loop
async def test_deleting_a_stream_ends_its_work(path: str) -> None:
    talk = Talk(play("a", "b", "c", pause=None))
    body = {**BODY, "prompt": "x", "max_tokens": 9}
    caller = Caller(talk.bench.app, path, body, conversation("mine"))
    call = asyncio.ensure_future(caller.call())
    await caller.until(lambda: len(caller.sent) >= 2)
    assert (await talk.ask("DELETE", "/v1/stream?conv_id=mine")).status_code == 204
    await asyncio.wait_for(call, 30)
    assert talk.bench.worker.handles[0].cancelled
    assert (await talk.ask("GET", "/v1/stream?conv_id=mine")).status_code == 404


@in_loop
async def test_unstarted_reply_can_be_ended_and_refused_one_is_dropped() -> None:
    """A reply that has not started can be cancelled by its name, a reader is told to retry, and a
    refused request leaves no stream behind.
    """

    def silent(request: Request) -> Script:
        yield Pause(None)

    talk = Talk(silent)
    caller = Caller(talk.bench.app, CHAT, BODY, conversation("mine"))
    call = asyncio.ensure_future(caller.call())
    await caller.until(lambda: bool(talk.bench.worker.handles))
    early = await talk.ask("GET", "/v1/stream?conv_id=mine")
    assert early.status_code == 503
    assert "retry-after" in early.headers
    await talk.ask("DELETE", "/v1/stream?conv_id=mine")
    await asyncio.wait_for(call, 30)
    assert caller.sent[0]["status"] == 400
    assert b"cancelled" in caller.bodies[0]

    refused = Caller(talk.bench.app, CHAT, {"messages": 1, "stream": True}, conversation("other"))
    await refused.call()
    assert refused.sent[0]["status"] == 400
    assert b"messages" in refused.bodies[0]
    assert (await talk.ask("GET", "/v1/stream?conv_id=other")).status_code == 404
    assert (await talk.ask("GET", f"/v1/stream?conv_id={'x' * 257}")).status_code == 400


@in_loop
async def test_only_replies_are_kept() -> None:
    """A client may send its header with every request: others than replies leave its stream
    alone.
    """
    talk = Talk(play("a", "b", pause=None))
    await talk.begin("mine")
    for path in ("/tokenize", "/api/show"):
        await Caller(talk.bench.app, path, {**BODY, "content": "a"}, conversation("mine")).call()
    assert not talk.bench.worker.handles[0].cancelled
    assert (await talk.ask("DELETE", "/v1/stream?conv_id=mine")).status_code == 204


@in_loop
async def test_streams_are_bounded_in_number_bytes_and_time() -> None:
    """The oldest finished stream goes at the limit of their number, or after five minutes, and
    bytes above the limit are lost with an error. No client can fill the RAM with them.
    """
    talk = Talk(play("a", "b"))
    talk.streams.max_streams = 2
    for name in ("1", "2", "3"):
        await talk.begin(name)
        await talk.ask("GET", f"/v1/stream?conv_id={name}")  # to its end
    found = [(await talk.ask("GET", f"/v1/stream?conv_id={name}")).status_code for name in "123"]
    assert found == [404, 200, 200]
    talk.clock.advance(299)
    assert (await talk.ask("GET", "/v1/stream?conv_id=3")).status_code == 200
    talk.clock.advance(2)
    assert (await talk.ask("GET", "/v1/stream?conv_id=3")).status_code == 404

    talk.streams.max_bytes = 100
    await talk.begin("long", n_sent=1)
    lost = await talk.ask("GET", "/v1/stream?conv_id=long&from=0")
    assert lost.status_code == 400
    assert "lost" in lost.text

    endless = Talk(play("a", "b", pause=None))
    endless.streams.max_streams = 2
    for name in ("1", "2", "3"):
        await endless.begin(name)
    await Caller(endless.bench.app, CHAT, BODY).until(
        lambda: endless.bench.worker.handles[2].cancelled
    )
    assert [handle.cancelled for handle in endless.bench.worker.handles] == [False, False, True]


@in_loop
async def test_a_reply_without_readers_ends_in_time() -> None:
    gate = Gate(threading.Event())
    talk = Talk(gated(gate, "a", "b", "c", pause=None))
    await talk.begin("mine")
    talk.clock.advance(601)
    gate.opened.set()
    await Caller(talk.bench.app, CHAT, BODY).until(lambda: talk.bench.worker.handles[0].cancelled)
