"""Rows of two servers: which of two figures is better, medians of rounds, lost rows."""

from __future__ import annotations

import os

import pytest

from bench.real import file_of
from bench.rows import (
    LEAST,
    ROWS,
    Compared,
    bounds_of,
    compared,
    cpu_seconds,
    known,
    lost,
    parser,
)


def test_less_is_better_but_for_rates() -> None:
    assert ROWS["start"].ratio(0.5, 0.25) == 0.5
    assert ROWS["decode"].ratio(0.5, 0.25) == 2.0


def test_ratios_are_those_of_rounds() -> None:
    """A round on a busy machine, in which both are slow, moves medians but no ratio."""
    figures = [(1.0, 0.5), (8.0, 4.0), (2.0, 1.0)]
    found = [
        {"pyctl": dict.fromkeys(ROWS, ours), "llama-server": dict.fromkeys(ROWS, theirs)}
        for ours, theirs in figures
    ]
    rows = {row.name: row for row in compared(found, "pyctl", "llama-server")}
    assert [*rows] == [*ROWS]
    assert rows["start"] == Compared("start", 2.0, 0.5)
    assert rows["decode"].ratio == 2.0


def test_only_judged_rows_below_the_least_are_lost() -> None:
    rows = [
        Compared("start", 2.0, 0.5),
        Compared("memory", 101.0, 0.99),
        Compared("decode", 9.0, 0.9),
    ]
    bounds = {"memory": 0.98, "decode": 0.98}
    assert lost(rows, bounds) == ["decode: 0.900 of llama-server, and not 0.98"]
    assert lost(rows, {"memory": 0.98}) == []


def test_rows_have_bounds_of_their_own_and_wider_ones_on_a_busy_machine() -> None:
    names = ["start", "memory", "prompt-cpu"]
    quiet = bounds_of(names, is_busy=False, least=None)
    busy = bounds_of(names, is_busy=True, least=None)
    assert quiet == {name: ROWS[name].least for name in names}
    assert [*busy] == ["memory", "prompt-cpu"], "other programs decide how long a start takes"
    assert all(busy[name] < quiet[name] for name in busy)
    assert bounds_of(names, is_busy=True, least=0.5) == {"memory": 0.5, "prompt-cpu": 0.5}


def test_a_bound_below_parity_has_a_reason() -> None:
    assert [name for name, row in ROWS.items() if bool(row.reason) != (row.least < LEAST)] == []
    rows = [Compared("start", 0.5, 0.4), Compared("memory", 90.0, 1.1), Compared("decode", 9, 1.0)]
    assert known(rows) == [f"start: 0.40 of llama-server: {ROWS['start'].reason}"]


def test_a_prompt_of_lines_has_as_many_characters_as_its_rates_count() -> None:
    n_characters, _ = parser().parse_args([]).n
    assert len(file_of(0, n_characters)) >= n_characters


def test_a_row_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--llama-server", "FILE", "--rows", "colour"])
    assert "invalid choice: 'colour'" in capsys.readouterr().err


def test_cpu_seconds_of_this_process() -> None:
    before = cpu_seconds(os.getpid())
    used = os.times()
    assert before <= used.user + used.system + 0.05
