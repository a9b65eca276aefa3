"""Recorded sessions on a simulated server: a floor that is one, equal runs, and interruptions."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from bench.gpu_seconds import DEVICES
from bench.traces.household import Household, Interruptions, Served
from bench.traces.recording import Session, read_sessions
from bench.traces.simulated_server import Card

NEVER = Interruptions()


@pytest.fixture(scope="module")
def sessions() -> list[Session]:
    """Return the first recorded sessions."""
    return read_sessions()[:4]


def card(gib: float, n_cells: int = 131_072, disk_gib: float = 0.0) -> Card:
    """Return a card of the 27B's sizes."""
    return Card(
        DEVICES[-1], n_cells, 34_816, 150 * 2**20, int(gib * 2**30), int(disk_gib * 2**30), 2**35
    )


def serve(
    sessions: list[Session],
    n_requests: int,
    directory: Path,
    gib: float = 16.0,
    disk_gib: float = 0.0,
    interruptions: Interruptions = NEVER,
) -> list[Served]:
    """Return the first requests of a household of two sessions at once."""
    household = Household(card(gib, disk_gib=disk_gib), sessions, 2, directory, interruptions)
    return list(islice(household.run(), n_requests))


def evaluated(served: list[Served]) -> int:
    """Return the tokens of all requests that were evaluated."""
    return sum(each.stats.n_evaluated for each in served)


def test_no_request_evaluates_less_than_its_floor(sessions: list[Session], tmp_path: Path) -> None:
    for served in serve(sessions, 60, tmp_path):
        assert served.stats.n_evaluated >= served.floor
        assert served.seconds > 0


def test_two_runs_are_equal(sessions: list[Session], tmp_path: Path) -> None:
    runs = [
        [
            (each.session, each.request.row, each.stats.n_evaluated, each.seconds)
            for each in serve(sessions, 40, tmp_path / str(run), gib=2.0, disk_gib=16.0)
        ]
        for run in range(2)
    ]
    assert runs[0] == runs[1]


def test_ample_memory_evaluates_no_more_than_little(
    sessions: list[Session], tmp_path: Path
) -> None:
    little, ample = (evaluated(serve(sessions, 80, tmp_path, gib)) for gib in (1.0, 64.0))
    assert ample < little


def test_a_disk_saves_what_little_memory_loses(sessions: list[Session], tmp_path: Path) -> None:
    without = serve(sessions, 80, tmp_path, gib=1.0)
    with_disk = serve(sessions, 80, tmp_path, gib=1.0, disk_gib=64.0)
    assert evaluated(with_disk) < evaluated(without)
    assert "disk" in {each.stats.source for each in with_disk}


def test_a_restart_is_survived_by_what_is_on_disk(sessions: list[Session], tmp_path: Path) -> None:
    restart = Interruptions(restart=30)
    without = serve(sessions, 40, tmp_path, interruptions=restart)
    with_disk = serve(sessions, 40, tmp_path, disk_gib=64.0, interruptions=restart)
    assert evaluated(with_disk) < evaluated(without)
    assert with_disk[30].stats.source == "disk"


def test_a_switch_of_models_leaves_nothing_on_the_device(
    sessions: list[Session], tmp_path: Path
) -> None:
    served = serve(sessions, 31, tmp_path, interruptions=Interruptions(switch=30))
    assert served[30].stats.source == "ram"
    assert served[30].n_from_device == 0


def test_a_visitor_makes_others_wait(sessions: list[Session], tmp_path: Path) -> None:
    alone = serve(sessions, 40, tmp_path)
    visited = serve(sessions, 40, tmp_path, interruptions=Interruptions(visit=1))
    assert sum(each.seconds for each in visited) > sum(each.seconds for each in alone)


def test_requests_beyond_the_context_are_left_out_and_counted(
    sessions: list[Session], tmp_path: Path
) -> None:
    household = Household(card(16.0, n_cells=40_000), [sessions[0]], 1, tmp_path)
    served = list(household.run())
    lengths = [request.n_prompt + request.n_reply for request in sessions[0].requests]
    assert household.n_refused == sum(length >= 40_000 for length in lengths) > 0
    assert len(served) == len(lengths) - household.n_refused
