"""POST /v1/chat/completions/control: "answer now", said while a reply is on its way."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.unit.server.fake import HI, Bench, play
from tests.unit.server.parts import OPENED

PATH = "/v1/chat/completions/control"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "missing completion id"),
        ({"id": "", "action": "reasoning_end"}, "missing completion id"),
        ({"id": "x"}, "unknown control action"),
        ({"id": "x", "action": "?"}, "unknown control action"),
    ],
)
def test_bad_orders(body: dict[str, Any], message: str) -> None:
    response = Bench(play("x")).client.post(PATH, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == message


def test_a_reply_that_nobody_knows_or_that_has_ended() -> None:
    bench = Bench(play("x"))
    known = bench.chat(reasoning_control=True)["id"]
    for name in ("chatcmpl-none", known):
        answer = bench.client.post(PATH, json={"id": name, "action": "reasoning_end"})
        assert answer.status_code == 200
        assert answer.json() == {"success": False, "message": "no active completion for this id"}
    assert not bench.service.shared.running


@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_what_a_running_reply_is_told(armed: bool, n: int) -> None:
    bench = Bench(play("a", "b", pause=None), template=OPENED)

    async def ask() -> dict[str, Any]:
        transport = httpx.ASGITransport(bench.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=20) as client:
            body = {"messages": HI, "stream": True, "reasoning_control": armed, "n": n}
            reading = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
            while not bench.service.shared.running:
                await asyncio.sleep(0.01)
            (name,) = bench.service.shared.running
            answer = (await client.post(PATH, json={"id": name, "action": "reasoning_end"})).json()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            return dict(answer)

    answer = asyncio.run(asyncio.wait_for(ask(), 60))
    refusal = {"success": False, "message": "reasoning control not enabled for this completion"}
    assert answer == ({"success": True} if armed else refusal)
    assert [handle.ends_reasoning for handle in bench.worker.handles] == [armed] * n
    assert not bench.service.shared.running
