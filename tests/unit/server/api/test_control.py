"""POST /v1/chat/completions/control: "answer now", said while a reply is on its way."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.case import Case
from tests.client import HI
from tests.unit.server.fake import Bench, play
from tests.unit.server.parts import OPENED, Caller, in_loop

PATH = "/v1/chat/completions/control"


@pytest.mark.parametrize(
    "case",
    [
        Case(PATH, {}, 400, "missing completion id"),
        Case(PATH, {"id": "", "action": "reasoning_end"}, 400, "missing completion id"),
        Case(PATH, {"id": "x"}, 400, "unknown control action"),
        Case(PATH, {"id": "x", "action": "?"}, 400, "unknown control action"),
    ],
    ids=str,
)
def test_bad_orders(case: Case) -> None:
    assert case.check(Bench(play("x")).client) == case.error


def test_a_reply_that_nobody_knows_or_that_has_ended() -> None:
    bench = Bench(play("x"))
    known = bench.chat(reasoning_control=True)["id"]
    for name in ("chatcmpl-none", known):
        answer = bench.client.post(PATH, {"id": name, "action": "reasoning_end"})
        assert answer.status_code == 200
        assert answer.json() == {"success": False, "message": "no active completion for this id"}
    assert not bench.service.shared.running


@in_loop
@pytest.mark.parametrize("armed", [True, False])
@pytest.mark.parametrize("n", [1, 2])
async def test_what_a_running_reply_is_told(armed: bool, n: int) -> None:
    bench = Bench(play("a", "b", pause=None), template=OPENED)
    body = {"messages": HI, "stream": True, "reasoning_control": armed, "n": n}
    reading = Caller(bench.app, "/v1/chat/completions", body)
    call = asyncio.ensure_future(reading.call())
    await reading.until(lambda: bool(bench.service.shared.running))
    (name,) = bench.service.shared.running
    asking = Caller(bench.app, PATH, {"id": name, "action": "reasoning_end"})
    await asking.call()
    reading.gone.set()
    await call
    answer = json.loads(b"".join(asking.bodies))
    refusal = {"success": False, "message": "reasoning control not enabled for this completion"}
    assert answer == ({"success": True} if armed else refusal)
    assert [handle.ends_reasoning for handle in bench.worker.handles] == [armed] * n
    assert not bench.service.shared.running
