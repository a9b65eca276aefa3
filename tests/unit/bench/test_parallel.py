"""Households side by side: their order, the requests that all servers answered, and the tables."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import pytest

from bench.traces.chat_server import Answer
from bench.traces.parallel import (
    HouseholdEvent,
    Run,
    RunResult,
    main,
    merged,
    n_fitting,
    notes_of,
    run_household,
    runs_of,
)
from bench.traces.recording import Session
from bench.traces.schedule import Event, Turn, visiting_session
from bench.traces.served_chats import ServedChat
from bench.traces.targets import StartSettings

SERVERS = ("pyctl", "llama-server")
RESTART = HouseholdEvent.RESTART


def session(number: int, n_requests: int) -> Session:
    """Return a session of ``n_requests`` that each continue the one before."""
    return visiting_session(number, n_requests)


def chats(household: Sequence[Session], n: int) -> list[ServedChat]:
    """Return ``n`` answered requests of the first session, of which each was evaluated wholly."""
    turns = [Turn(household[0], request, "append") for request in household[0].requests[:n]]
    answer = Answer({}, n_prompt=100, n_evaluated=100, n_reply=1, seconds=1.0)
    return [ServedChat(turn, 50, answer) for turn in turns]


def result(server: str, n: int, *, number: int = 0, error: str = "") -> RunResult:
    """Return what ``server`` answered: ``n`` of the four requests of a household."""
    household = [session(number + 1, 4)]
    run = Run(number, household, RESTART, server, SERVERS.index(server))
    return RunResult(run, 4, chats(household, n), error)


def test_runs_begin_event_by_event_with_the_longest_household() -> None:
    households = [[session(1, 2)], [session(2, 9)]]
    runs = runs_of(households, list(HouseholdEvent)[:2], SERVERS)
    assert [(run.event.value, run.number, run.server) for run in runs] == [
        ("restart", 1, "pyctl"),
        ("restart", 1, "llama-server"),
        ("restart", 0, "pyctl"),
        ("restart", 0, "llama-server"),
        ("switch", 1, "pyctl"),
        ("switch", 1, "llama-server"),
        ("switch", 0, "pyctl"),
        ("switch", 0, "llama-server"),
    ]


def test_requests_beyond_the_context_do_not_count() -> None:
    household = session(1, 4)
    longest = household.requests[-1]
    n_tokens = longest.n_prompt + longest.n_reply
    assert n_fitting(household, n_tokens) == 4
    assert n_fitting(household, n_tokens - 1) == 3
    assert n_fitting(household, 1) == 0


def test_each_event_is_in_the_steps_of_its_runs_alone() -> None:
    households = [[session(1, 20)]]
    steps = {
        run.event: run.steps(131_072) for run in runs_of(households, list(HouseholdEvent), ["p"])
    }
    n_sent = {
        event: sum(isinstance(step, Turn) for step in steps_of) for event, steps_of in steps.items()
    }
    assert n_sent == {RESTART: 20, HouseholdEvent.SWITCH: 25, HouseholdEvent.SECOND_CLIENT: 22}
    restarts = {event: steps_of.count(Event.RESTART) for event, steps_of in steps.items()}
    assert restarts == {RESTART: 1, HouseholdEvent.SWITCH: 0, HouseholdEvent.SECOND_CLIENT: 0}


def test_tables_have_the_requests_that_all_servers_answered() -> None:
    results = [
        result("llama-server", 3),
        result("pyctl", 4),
        result("pyctl", 4, number=1),
        result("llama-server", 4, number=1),
    ]
    event = merged(results)[RESTART]
    assert list(event.chats) == ["pyctl", "llama-server"]
    for served in event.chats.values():
        assert [each.turn.session.number for each in served] == [1, 1, 1, 2, 2, 2, 2]
        assert [each.turn.request.row for each in served] == [0, 1, 2, 0, 1, 2, 3]
    assert event.n_answered == 7
    assert event.n_steps == 8
    assert event.n_sessions == 2
    assert event.n_whole == 1
    assert event.n_households == 2


def test_a_household_that_one_server_did_not_begin_is_left_out() -> None:
    event = merged([result("pyctl", 4), result("llama-server", 0)])[RESTART]
    assert event.n_answered == 0
    assert event.n_sessions == 0
    assert event.n_whole == 0


def test_notes_name_the_unanswered_requests_and_the_errors() -> None:
    results = [result("pyctl", 4), result("llama-server", 3, error="ValueError: no counts")]
    options = argparse.Namespace(scale=1 / 32, jobs=16, flags="-t 1", seconds=480.0)
    notes = "\n".join(notes_of(merged(results), results, options))
    assert "answered 3 of 4 requests" in notes
    assert "every one of 0 of 1 households" in notes
    assert "llama-server: ended after 3 requests by ValueError: no counts" in notes


def test_no_server_starts_after_the_time_limit() -> None:
    run = Run(0, [session(1, 4)], RESTART, "pyctl")
    ended = run_household(run, StartSettings(scale=1 / 64), time.monotonic() - 1)
    assert ended.n_steps == 4
    assert ended.chats == []
    assert ended.error == ""


def test_a_server_that_does_not_start_ends_the_run_with_its_error() -> None:
    run = Run(0, [session(1, 4)], RESTART, "llama-server")
    settings = StartSettings(scale=1 / 64, llama_server="/nowhere/llama-server")
    ended = run_household(run, settings, time.monotonic() + 600)
    assert ended.chats == []
    assert ended.error.startswith("FileNotFoundError")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "llama-server needs --llama-server FILE"),
        (["--servers", "pyctl", "--jobs", "0"], "--jobs must be at least 1"),
        (["--servers", "pyctl", "--every", "0"], "--every must be at least 1"),
        (["--servers", "pyctl", "--at-once", "0"], "--at-once must be at least 1"),
        (["--servers", "pyctl", "--events", "flood"], "invalid HouseholdEvent value"),
        (["--servers", "pyctl", "--only", "7", "999"], "no session 999 is recorded"),
    ],
)
def test_options_that_do_not_fit_end_with_a_reason(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert problem in f"{ended.value} {capsys.readouterr().err}"
