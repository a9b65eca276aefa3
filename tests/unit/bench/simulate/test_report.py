"""Tables of a simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.simulate.household import Household
from bench.simulate.report import show_planted, show_run
from tests.unit.bench.simulate.test_clients import SESSION


@pytest.mark.parametrize("wrong", ["", "a reply is another one"])
def test_a_run_shows_its_seed_counts_and_the_first_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    household = Household([SESSION], 9, tmp_path)
    household.log.add("start", "first")
    show_run(household, 9, 1.5, 2.0, wrong, keep=False)
    text = capsys.readouterr().out
    assert "python -m bench.simulate --hours 1.5 --seed 9" in text
    assert "event: start" in text
    assert (f"WRONG at step 1 of seed 9: {wrong}" in text) == bool(wrong)
    assert ("1 start first" in text) == bool(wrong)


def test_planted_faults_have_a_row_each(capsys: pytest.CaptureFixture[str]) -> None:
    show_planted([["lost sync", "1", "77", "a file without its bytes"]], keep=False)
    text = capsys.readouterr().out
    assert "lost sync" in text
    assert "77" in text
