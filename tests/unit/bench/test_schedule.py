"""The order of requests: recorded times, and events in between."""

from __future__ import annotations

import pytest

from bench.traces.recording import Kind, RecordedRequest, Session, read_sessions
from bench.traces.schedule import Event, Turn, schedule, turns_of, visiting_session


def session(number: int, *seconds: float) -> Session:
    """Return a session with a request at each time."""
    requests = [
        RecordedRequest(row, 0, 0.0, 1_000 * (row + 1), 10, None, 0, Kind.APPEND, at)
        for row, at in enumerate(seconds)
    ]
    return Session(number, requests)


def order_of(turns: list[Turn]) -> list[tuple[int, int]]:
    return [(turn.session.number, turn.request.row) for turn in turns]


SESSIONS = [session(1, 0, 10, 50), session(2, 0, 20), session(3, 0, 5)]


@pytest.mark.parametrize(
    ("n_at_once", "order"),
    [
        (1, [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (3, 0), (3, 1)]),
        # The third session begins when the second one has ended, at 20 seconds.
        (2, [(1, 0), (2, 0), (1, 1), (2, 1), (3, 0), (3, 1), (1, 2)]),
        (3, [(1, 0), (2, 0), (3, 0), (3, 1), (1, 1), (2, 1), (1, 2)]),
    ],
)
def test_sessions_take_turns_by_their_recorded_times(
    n_at_once: int, order: list[tuple[int, int]]
) -> None:
    assert order_of(turns_of(SESSIONS, n_at_once, max_context=100_000)) == order


def test_requests_of_a_recorded_session_stay_in_their_order() -> None:
    turns = turns_of(read_sessions()[:6], n_at_once=3, max_context=100_000)
    for number in range(1, 7):
        rows = [turn.request.row for turn in turns if turn.session.number == number]
        assert rows == list(range(len(rows)))


def test_a_later_request_that_shares_nothing_is_a_side_request() -> None:
    requests = [
        RecordedRequest(row, 0, 0.0, 1_000, 10, None, 0, Kind.FIRST, float(row)) for row in (0, 1)
    ]
    kinds = [
        turn.kind for turn in turns_of([Session(1, requests)], n_at_once=1, max_context=100_000)
    ]
    assert kinds == ["first", "side request"]


def test_without_events_the_steps_are_the_turns() -> None:
    turns = turns_of(SESSIONS, n_at_once=2, max_context=100_000)
    assert schedule(turns, restart=False, switch=False, second_client=False) == turns


def test_the_restart_comes_after_half_of_the_requests() -> None:
    turns = turns_of(SESSIONS, n_at_once=2, max_context=100_000)
    steps = schedule(turns, restart=True, switch=False, second_client=False)
    assert steps == [*turns[:3], Event.RESTART, *turns[3:]]


def test_requests_beyond_the_context_are_not_sent_and_do_not_count() -> None:
    turns = turns_of(SESSIONS[:1], n_at_once=1, max_context=2_500)
    assert [turn.is_sent for turn in turns] == [True, True, False]
    steps = schedule(turns, restart=True, switch=False, second_client=False)
    assert steps == [turns[0], Event.RESTART, *turns[1:]]


def test_another_model_answers_a_chat_of_its_own_in_between() -> None:
    turns = turns_of(SESSIONS, n_at_once=2, max_context=100_000)
    steps = schedule(turns, restart=False, switch=True, second_client=False)
    others = [step for step in steps if isinstance(step, Turn) and step.is_other_model]
    assert steps == [*turns[:2], *others, *turns[2:]]
    assert [turn.request.parent for turn in others] == [None, 0, 1, 2, 3]


def test_the_second_client_comes_before_each_tenth_request() -> None:
    turns = turns_of([session(1, *range(25))], n_at_once=1, max_context=100_000)
    steps = schedule(turns, restart=False, switch=False, second_client=True)
    kinds = [step.kind for step in steps if isinstance(step, Turn)]
    assert [at for at, kind in enumerate(kinds) if kind == "second client"] == [9, 20]


def test_a_visitor_starts_another_chat_now_and_then() -> None:
    requests = visiting_session(0, 30).requests
    assert [each.row for each in requests if each.parent is None] == [0, 12, 24]
    assert all(
        each.n_prompt > requests[each.parent].n_prompt
        for each in requests
        if each.parent is not None
    )
