"""Tables of a simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.simulate.household import Household
from bench.simulate.report import show_planted, show_runs, summarize
from tests.unit.bench.simulate.test_clients import SESSION


@pytest.mark.parametrize("wrong", ["", "a reply is another one"])
def test_a_run_shows_its_seed_counts_and_the_first_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    household = Household([SESSION], 9, tmp_path)
    household.log.add("start", "first")
    show_runs([summarize(household, 9, 1.5, 2.0, wrong)], keep=False)
    text = capsys.readouterr().out
    assert "python -m bench.simulate --hours 1.5 --seed 9" in text
    assert "event: start" in text
    assert (f"WRONG at step 1 of seed 9: {wrong}" in text) == bool(wrong)
    assert ("1 start first" in text) == bool(wrong)


def test_households_are_summed_and_each_can_be_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours and counts of several households add up, each has the command that repeats it, and an
    error names its seed.
    """
    runs = []
    for seed in (4, 5):
        (tmp_path / str(seed)).mkdir()
        household = Household([SESSION], seed, tmp_path / str(seed))
        household.log.add("start", "first")
        household.totals.n_requests = 10
        runs.append(summarize(household, seed, 1.5, 2.0, "lost" if seed == 5 else ""))
    show_runs(runs, keep=False)
    lines = capsys.readouterr().out.splitlines()
    rows = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("│") for line in lines)
        if len(cells) > 2
    }
    assert "3 simulated hours, seeds 4 to 5" in " ".join(" ".join(lines).split())
    assert rows["hours of the clients"] == "3.0"
    assert rows["requests answered"] == "20"
    assert rows["event: start"] == "2"
    assert rows["wrong"] == "1"
    assert sum("python -m bench.simulate --hours 1.5 --seed" in line for line in lines) == 2
    assert any(line.startswith("WRONG at step 1 of seed 5") for line in lines)


def test_planted_faults_have_a_row_each(capsys: pytest.CaptureFixture[str]) -> None:
    show_planted([["lost sync", "1", "77", "a file without its bytes"]], keep=False)
    text = capsys.readouterr().out
    assert "lost sync" in text
    assert "77" in text
