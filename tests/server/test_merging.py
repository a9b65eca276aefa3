"""Events of several handles in one stream."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.engine.request import Done, Piece
from pyctl.server.generate.respond import merged
from tests.server.fake import FakeHandle, Pause, Script


def script(*parts: str | None) -> Script:
    """Pieces, and pauses for None; without the Done, which these tests do not need."""
    return [Pause(0.001) if part is None else Piece(part, ()) for part in parts]


class Handle(FakeHandle):
    """Ends with its script."""

    async def __anext__(self) -> Piece | Done:
        while self._script and isinstance(self._script[0], Pause):
            pause = self._script.popleft()
            assert isinstance(pause, Pause)
            await asyncio.sleep(pause.seconds or 0.0)
        if not self._script:
            raise StopAsyncIteration
        return self._take()


async def texts(*handles: Handle) -> list[tuple[int, str]]:
    async with aclosing(merged(handles)) as found:
        return [(number, event.text) async for number, events in found for event in events]


def test_what_is_there_does_not_wait_for_another_handle() -> None:
    slow, quick = Handle(script("a", None, None, None, "b")), Handle(script("c", "d"))
    assert asyncio.run(texts(slow, quick)) == [(0, "a"), (1, "c"), (1, "d"), (0, "b")]


@given(st.lists(st.lists(st.sampled_from(["x", "y", None]), max_size=5), min_size=1, max_size=4))
def test_every_handle_keeps_its_order(scripts: list[list[str | None]]) -> None:
    seen = asyncio.run(texts(*[Handle(script(*parts)) for parts in scripts]))
    for number, parts in enumerate(scripts):
        assert [text for at, text in seen if at == number] == [part for part in parts if part]


class Broken(Handle):
    async def __anext__(self) -> Piece | Done:
        raise ValueError("broken")


def test_an_error_comes_through_and_nothing_is_left_running() -> None:
    async def run() -> int:
        with pytest.raises(ValueError, match="broken"):
            await texts(Handle(script("a", *[None] * 1000)), Broken([]))
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1


def test_leaving_early_stops_the_handles() -> None:
    async def run() -> int:
        async with aclosing(merged([Handle(script("a", *[None] * 1000)), Handle(script("b"))])) as found:
            async for _ in found:
                break
        return len(asyncio.all_tasks())

    assert asyncio.run(run()) == 1
