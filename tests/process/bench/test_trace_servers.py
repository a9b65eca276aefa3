"""Recorded sessions as chats with a server process: counts of tokens over a restart."""

from __future__ import annotations

import csv

import pytest

from bench.traces.chat_tables import FEW_TOKENS
from bench.traces.servers import main
from pyctl.model_files import builtin_model

N_REQUESTS = {"24": 3, "21": 7}
"""Requests of two short sessions, by the number of the session."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Return the requests of two sessions that took turns on the built-in model, with a restart
    after five of the ten.
    """
    path = tmp_path_factory.mktemp("replay") / "requests.tsv"
    sessions = ["--only", *N_REQUESTS, "--at-once", "2", "--restart"]
    main(["--start", "pyctl", "-m", str(builtin_model()), *sessions, "--requests", str(path)])
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def number(row: dict[str, str], column: str) -> int:
    return int(row[column].replace(",", ""))


def test_each_recorded_request_is_sent_once(rows: list[dict[str, str]]) -> None:
    for session, n_requests in N_REQUESTS.items():
        sent = [int(row["row"]) for row in rows if row["session"] == session]
        assert sent == list(range(n_requests))
    assert {row["session"] for row in rows[:2]} == set(N_REQUESTS), "they begin together"


def test_each_request_evaluates_little_more_than_its_floor(rows: list[dict[str, str]]) -> None:
    for row in rows:
        floor = number(row, "floor")
        assert floor <= number(row, "evaluated") <= floor + FEW_TOKENS


def test_appends_have_a_floor_far_below_their_prompt(rows: list[dict[str, str]]) -> None:
    appends = [row for row in rows if row["kind"] == "append"]
    assert len(appends) == len(rows) - len(N_REQUESTS)
    for row in appends:
        assert number(row, "floor") < number(row, "prompt tokens") / 4


def test_after_the_restart_both_sessions_go_on_from_disk(rows: list[dict[str, str]]) -> None:
    later = rows[len(rows) // 2 :]
    firsts = [next(row for row in later if row["session"] == session) for session in N_REQUESTS]
    assert [row["source"] for row in firsts] == ["disk", "disk"]
