"""The budget of a decoded token: how many functions of pyctl the engine's thread and the event
loop call for it.

A call costs more than a microsecond, since the weights of the model have passed through the caches
since the token before. On a processor all of that is missing from the evaluation, whose threads
take every core. The counts depend on neither the machine nor its load.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import pyctl
from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Piece
from pyctl.llama.loader import Loaded
from pyctl.prompt import Prompt
from tests.client import CHAT, HI
from tests.unit.engine.drive import GREEDY, request
from tests.unit.server.fake import Bench, close_workers, play

SOURCE = str(Path(pyctl.__file__).parent)

MAX_ENGINE_CALLS = 75
"""Calls of a step that decodes one token, without those that wake the event loop."""

MAX_LOOP_CALLS = 22.5
"""Calls for the event of one token of a chat, with those of the generators that pass it on. The end
of a reply may take an event of its own: a half is for that.
"""

PAUSE_SECONDS = 0.01
"""The time between two events of the script: nearer ones are read together."""


class CallCount:
    """Counts the calls of functions of pyctl while `counted`."""

    def __init__(self) -> None:
        self.n = 0

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            self.n += 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(before)


@pytest.fixture(autouse=True)
def workers() -> Iterator[None]:
    """End the threads that a test started."""
    yield
    close_workers()


def test_a_step_of_one_reply_calls_few_functions(open_model: Callable[..., Loaded]) -> None:
    engine = Engine(open_model("tiny-llama").backend, RamCache(4, None), EngineSettings())
    handle = RequestHandle(request(Prompt.from_ids(range(1, 40)), 64, sampling=GREEDY))
    engine.submit(handle)
    while not any(isinstance(event, Piece) for event in handle.drain()):
        engine.step()
    count = CallCount()
    with count.counted():
        for _ in range(10):
            engine.step()
    assert not handle.is_over
    assert count.n / 10 <= MAX_ENGINE_CALLS


def calls_of_chat(n_tokens: int) -> int:
    """Return the calls of the event loop's thread for a streamed chat of ``n_tokens``."""
    bench = Bench(play(*["a"] * n_tokens, pause=PAUSE_SECONDS))
    count = CallCount()
    with count.counted():
        bench.client.stream(CHAT, {"messages": HI})
    return count.n


def test_the_event_of_a_token_calls_few_functions() -> None:
    """A busy machine reads some events together, which takes fewer calls; the only one of a short
    reply comes with its end in any case.
    """
    n_more = 60
    n_calls = calls_of_chat(1 + n_more) - calls_of_chat(1)
    assert n_calls / n_more <= MAX_LOOP_CALLS
