"""Whole runs: nothing is wrong, a seed replays, and planted faults are found."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.simulate", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)


def digest_of(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 0, run.stdout + run.stderr
    found = re.search(r"events, digest (\w+)", run.stdout)
    assert found is not None, run.stdout
    return found[1]


def test_a_seed_gives_the_same_events_again_and_another_one_others() -> None:
    first = digest_of(simulate("--hours", "2", "--seed", "5"))
    assert digest_of(simulate("--hours", "2", "--seed", "5")) == first
    assert digest_of(simulate("--hours", "2", "--seed", "6")) != first


def test_a_run_ends_at_the_step_that_it_is_given() -> None:
    run = simulate("--until", "40", "--seed", "5")
    assert "40 events" in run.stdout
    assert "\n40 " in run.stdout


@pytest.mark.parametrize("name", ["state of another position", "rows off by one"])
def test_a_planted_fault_is_found_with_its_seed_and_step(name: str) -> None:
    run = simulate("--plant", name)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.match(rf"{name}\tseed \d+\tstep \d+\t", run.stdout)


def test_an_unknown_fault_is_an_error() -> None:
    run = simulate("--plant", "nothing")
    assert run.returncode == 2
    assert "no planted fault nothing" in run.stderr
