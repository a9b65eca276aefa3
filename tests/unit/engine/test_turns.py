"""Turns with --exact: one request runs at a time, none waits for the end of a long one, none is
lost.
"""

from __future__ import annotations

import pytest

from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Piece, Progress
from pyctl.engine.schedule.admission import MAX_PASSED
from pyctl.engine.schedule.turns import TURN_SECONDS
from pyctl.errors import StateError
from tests.fake import FakeBackend
from tests.unit.engine.drive import ManualClock, Reply, cold, collect, run_all
from tests.unit.engine.scheduling import ENDLESS, KINDS, check_at_rest, prompt_of, submit

KIND = pytest.mark.parametrize("kind", KINDS)


class Turned:
    """An engine with --exact, whose every step takes ``seconds``."""

    def __init__(self, kind: str = "hybrid", n_seqs: int = 4, seconds: float = 0.5) -> None:
        self.clock = ManualClock()
        self.backend = FakeBackend(kind, n_ctx=1024, n_seqs=n_seqs)
        settings = EngineSettings(exact=True)
        self.engine = Engine(self.backend, RamCache(64, None), settings, clock=self.clock)
        self._seconds = seconds
        self.n_running_at_once = 0

    def step(self) -> bool:
        self.clock.advance(self._seconds)
        is_due = self.engine.step()
        self.n_running_at_once = max(self.n_running_at_once, len(self.engine.running))
        return is_due

    def submit(self, seed: int, n: int = 4, n_prompt: int = 100, **fields: object) -> RequestHandle:
        return submit(self.engine, prompt_of(seed, n_prompt), n, **fields)

    def order_of_ends(self, *handles: RequestHandle) -> list[int]:
        """Step until all have ended; their numbers in the order of their ends."""
        ended: list[int] = []
        for _ in range(20_000):
            for number, handle in enumerate(handles):
                if number not in ended and any(isinstance(event, Done) for event in handle.drain()):
                    ended.append(number)
            if not self.step() and len(ended) == len(handles):
                return ended
        raise AssertionError("it never ends")


def alone(kind: str, seed: int, n: int, n_prompt: int = 100) -> Reply:
    backend = FakeBackend(kind, n_ctx=1024)
    return cold(backend, prompt_of(seed, n_prompt), n, sampling=ENDLESS)


@KIND
def test_requests_run_one_at_a_time_and_each_is_answered_as_if_it_were_alone(kind: str) -> None:
    turned = Turned(kind)
    handles = [turned.submit(seed, 200, sampling=ENDLESS) for seed in range(6)]
    while turned.step():
        continue
    assert turned.n_running_at_once == 1
    assert turned.engine.counters.n_turns_yielded > 0
    for seed, handle in enumerate(handles):
        assert collect(handle).tokens == alone(kind, seed, 200).tokens
    check_at_rest(turned.engine, turned.backend)


@KIND
def test_a_short_request_does_not_wait_for_the_end_of_a_long_one(kind: str) -> None:
    turned = Turned(kind)
    long = turned.submit(1, 500, sampling=ENDLESS)
    for _ in range(40):
        turned.step()
    short = turned.submit(2)
    assert turned.order_of_ends(long, short) == [1, 0]


def test_a_turn_lasts_while_nobody_waits_and_its_time_for_those_who_do() -> None:
    turned = Turned()
    long = turned.submit(1, 300, sampling=ENDLESS)
    for _ in range(50):
        turned.step()
    assert turned.engine.counters.n_turns_yielded == 0
    short = turned.submit(2, 100, sampling=ENDLESS)
    turned.step()
    assert [each.handle for each in turned.engine.running] == [short]
    n_steps = 0
    while [each.handle for each in turned.engine.running] == [short]:
        turned.step()
        n_steps += 1
    assert n_steps == TURN_SECONDS / 0.5
    assert [each.handle for each in turned.engine.running] == [long]


def test_long_requests_end_in_the_order_of_arrival() -> None:
    turned = Turned()
    handles = [turned.submit(seed, 200, sampling=ENDLESS) for seed in range(5)]
    assert turned.order_of_ends(*handles) == [0, 1, 2, 3, 4]


def test_a_stream_of_short_requests_does_not_keep_a_long_one_away() -> None:
    turned = Turned()
    long = turned.submit(1, 400, sampling=ENDLESS)
    for _ in range(20):
        turned.step()
    n_short = 0
    while not any(isinstance(event, Done) for event in long.drain()):
        if not turned.engine.waiting.queue:
            turned.submit(100 + n_short, 2)
            n_short += 1
        turned.step()
    n_turns = turned.engine.counters.n_turns_yielded
    assert n_turns > 0
    assert n_short <= (n_turns + 1) * (MAX_PASSED + 1)
    run_all(turned.engine)


@pytest.mark.parametrize("n_seqs", [1, 2, 4])
def test_no_more_requests_have_begun_than_np_allows(n_seqs: int) -> None:
    """Requests that gave way take memory, so that they count among those that have begun."""
    turned = Turned(n_seqs=n_seqs)
    for seed in range(8):
        turned.submit(seed, 100, sampling=ENDLESS)
    n_begun = 0
    while turned.step():
        n_begun = max(n_begun, len(turned.engine.waiting.suspended) + len(turned.engine.running))
    assert n_begun == n_seqs


def test_a_request_that_cannot_be_parked_goes_on() -> None:
    turned = Turned()

    def refuse(*_: object, **__: object) -> None:
        raise StateError("no memory")

    turned.engine.prefix_cache.saver.suspend = refuse  # type: ignore[assignment]
    handles = [turned.submit(seed, 100, sampling=ENDLESS) for seed in range(2)]
    while turned.step():
        continue
    for seed, handle in enumerate(handles):
        assert collect(handle).tokens == alone("hybrid", seed, 100).tokens


def test_a_request_that_is_cancelled_while_it_is_parked_leaves_nothing() -> None:
    turned = Turned()
    long = turned.submit(1, 500, sampling=ENDLESS)
    for _ in range(20):
        turned.step()
    other = turned.submit(2, 100, sampling=ENDLESS)
    turned.step()
    assert turned.engine.waiting.suspended
    long.cancel()
    assert turned.order_of_ends(other) == [0]
    check_at_rest(turned.engine, turned.backend)


def test_those_that_wait_see_their_place() -> None:
    """Waiting requests that ask for progress get their place in the queue as it changes, down to
    zero when they start. Others get no such event.
    """
    turned = Turned()
    first = turned.submit(1, 100, sampling=ENDLESS, return_progress=True)
    waiting = [turned.submit(seed, 2, return_progress=True) for seed in (2, 3)]
    silent = turned.submit(4, 2)
    turned.step()
    assert [
        event.queue_position for event in waiting[0].drain() if isinstance(event, Progress)
    ] == [1]
    assert [
        event.queue_position for event in waiting[1].drain() if isinstance(event, Progress)
    ] == [2]
    while turned.step():
        continue
    places = [event.queue_position for event in waiting[1].drain() if isinstance(event, Progress)]
    assert places[:2] == [1, 0]
    assert all(
        event.queue_position == 0 for event in first.drain() if isinstance(event, Progress)
    ), "its text has begun"
    assert not any(isinstance(event, Progress) for event in silent.drain())


def test_a_request_that_gives_way_within_its_prompt_shows_how_far_it_is() -> None:
    turned = Turned(seconds=TURN_SECONDS)
    long = turned.submit(1, 2, n_prompt=900, return_progress=True)
    turned.step()
    turned.submit(2, 2)
    turned.step()
    shown = [event for event in long.drain() if isinstance(event, Progress)]
    assert shown[-1].queue_position == 1
    assert shown[-1].n_processed > 0
    while turned.step():
        continue
    assert sum(len(event.tokens) for event in long.drain() if isinstance(event, Piece)) == 2
