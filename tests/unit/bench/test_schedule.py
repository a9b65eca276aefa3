"""The simulated schedules: what each evaluates, who waits, and the search of small cases."""

from __future__ import annotations

import pytest

from bench.gpu_seconds import DEVICES
from bench.schedule import CASES, SCHEDULES, Case, best_of_all, simulate

DEVICE = DEVICES[0]
SMALL = Case("4 at once, over budget", 3, 2, replies=(64, 256), head=1000)
MEASURED = "4 agents, 4 turns, 0.6 of the context"
MEASURED_EVALUATED = 32_898
"""Prompt tokens that an H100 evaluated in this case (bench/results/gpu-agents-27b-nextn.md)."""


def test_all_schedules_evaluate_what_the_measured_run_did() -> None:
    for install in SCHEDULES.values():
        outcome = simulate(CASES[MEASURED], DEVICE, install)
        assert outcome.n_evaluated == pytest.approx(MEASURED_EVALUATED, rel=0.01)


def test_equal_cases_have_equal_outcomes() -> None:
    assert simulate(SMALL, DEVICE) == simulate(SMALL, DEVICE)


@pytest.mark.parametrize("name", [name for name in CASES if "room" not in name])
def test_first_tokens_come_sooner_when_replies_give_way(name: str) -> None:
    before, now = (
        simulate(CASES[name], DEVICE, SCHEDULES[schedule])
        for schedule in ("replies to their end", "replies give way")
    )
    assert sum(now.waits) < 0.75 * sum(before.waits)
    assert max(now.waits) < max(before.waits)
    assert sum(now.ends) < 1.05 * sum(before.ends)
    assert now.n_evaluated <= 1.01 * before.n_evaluated


def test_nobody_gives_way_where_all_have_room() -> None:
    outcome = simulate(CASES["4 agents with room"], DEVICE)
    assert outcome.n_suspended == 0


def test_the_search_tries_every_choice_of_a_small_case() -> None:
    best, n_runs, is_complete = best_of_all(SMALL, DEVICE)
    assert is_complete
    assert n_runs > 3
    assert sum(best.waits) <= sum(simulate(SMALL, DEVICE).waits)


def test_the_search_ends_after_as_many_runs_as_it_may_take() -> None:
    _, n_runs, is_complete = best_of_all(SMALL, DEVICE, max_runs=2)
    assert n_runs == 2
    assert not is_complete
