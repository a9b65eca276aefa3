"""The consumer's side of a request's channel."""

from __future__ import annotations

import asyncio

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.engine.handle import REST_SECONDS, RequestHandle
from pyctl.engine.request import Done, Event, Piece, Request, Timings
from pyctl.prompt import Prompt

DONE = Done("eos", "", Timings(0, 1, 0.0, 0, 0.0, 0.0), RequestStats(1), 0)


@pytest.mark.parametrize(("seconds", "pauses"), [(REST_SECONDS, True), (5 * REST_SECONDS, False)])
def test_a_consumer_pauses_only_for_pieces_that_come_faster(seconds: float, pauses: bool) -> None:
    """A consumer pauses to join pieces if they come faster than a client needs them, and hands on
    slower ones without a delay.
    """
    now = 1.0
    step = asyncio.sleep
    paused: list[float] = []

    async def pause(length: float) -> None:
        paused.append(length)
        await step(0)

    handle = RequestHandle(Request(Prompt.from_ids([1])), lambda: now, pause)

    async def produce() -> None:
        nonlocal now
        events: list[Event] = [*[Piece("a", ())] * 4, DONE]
        for event in events:
            now += seconds
            handle.put(event)
            for _ in range(5):  # the consumer takes it and waits for the next one
                await step(0)

    async def consume() -> None:
        producer = asyncio.ensure_future(produce())
        async for _ in handle:
            pass
        await producer

    asyncio.run(consume())
    assert bool(paused) is pauses
