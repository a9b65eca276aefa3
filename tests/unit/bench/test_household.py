"""Recorded sessions on a simulated card: a floor that is one, equal runs, and the tables."""

from __future__ import annotations

from itertools import islice

import pytest

from bench.gpu_seconds import DEVICES
from bench.traces.household import Card, Household, Served
from bench.traces.recording import Session, read_sessions


@pytest.fixture(scope="module")
def sessions() -> list[Session]:
    """Return the first recorded sessions."""
    return read_sessions()[:4]


def card(gib: float, n_cells: int = 131_072) -> Card:
    return Card(DEVICES[-1], n_cells, 34_816, 150 * 2**20, int(gib * 2**30))


def serve(sessions: list[Session], n_requests: int, gib: float = 16.0) -> list[Served]:
    return list(islice(Household(card(gib), sessions, n_at_once=2).run(), n_requests))


def test_no_request_evaluates_less_than_its_floor(sessions: list[Session]) -> None:
    for served in serve(sessions, 60):
        assert served.stats.n_evaluated >= served.floor
        assert served.seconds > 0


def test_two_runs_are_equal(sessions: list[Session]) -> None:
    runs = [
        [(each.session, each.request.row, each.stats.n_evaluated) for each in serve(sessions, 40)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_ample_memory_evaluates_no_more_than_little(sessions: list[Session]) -> None:
    little, ample = (
        sum(each.stats.n_evaluated for each in serve(sessions, 80, gib)) for gib in (1.0, 64.0)
    )
    assert ample < little


def test_requests_beyond_the_context_are_left_out_and_counted(sessions: list[Session]) -> None:
    household = Household(card(16.0, n_cells=40_000), [sessions[0]], n_at_once=1)
    served = list(household.run())
    lengths = [request.n_prompt + request.n_reply for request in sessions[0].requests]
    assert household.n_refused == sum(length >= 40_000 for length in lengths) > 0
    assert len(served) == len(lengths) - household.n_refused
