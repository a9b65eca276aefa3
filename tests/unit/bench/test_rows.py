"""Rows of two servers: which of two figures is better, medians of rounds, lost rows."""

from __future__ import annotations

import os

import pytest

from bench.rows import ROWS, Compared, compared, cpu_seconds, lost, parser


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
    assert lost(rows, ["memory", "decode"], 0.98) == ["decode: 0.900 of llama-server, and not 0.98"]
    assert lost(rows, ["memory"], 0.98) == []


def test_a_row_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--llama-server", "FILE", "--rows", "colour"])
    assert "invalid choice: 'colour'" in capsys.readouterr().err


def test_cpu_seconds_of_this_process() -> None:
    before = cpu_seconds(os.getpid())
    used = os.times()
    assert before <= used.user + used.system + 0.05
