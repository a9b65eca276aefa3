"""Events of several handles in one stream."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.cache_stats import RequestStats
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Piece, Request, Timings
from pyctl.prompt import Prompt
from pyctl.server.sending import merged

DONE = Done("eos", "", Timings(0, 1, 0.0, 0, 0.0, 0.0), RequestStats(1), 0)


def played(*parts: str | None) -> RequestHandle:
    """Return a handle that gets ``parts`` and its end from the running loop; None is a pause."""
    handle = RequestHandle(Request(Prompt.of([1])))
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
        broken = Broken(Request(Prompt.of([1])))
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
