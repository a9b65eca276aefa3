"""Agents side by side, in their smallest form: no GPU, and no llama-server."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from bench.gpu.agents import CASES, TRIES, Agent, Asked, document, floor_of, main, rows_by_turn

SMALL = shlex.split("--head 300 --results-of 50 200 --replies-of 16 40 --prefill 400")


def options(**changes: Any) -> argparse.Namespace:
    sizes = {"head": 100, "turns": 3, "results_of": [50, 200], "replies_of": [8, 40], **changes}
    return argparse.Namespace(**sizes)


def asked(agent: int, turn: int, cached: int, evaluated: int, n_predicted: int = 10) -> Asked:
    return Asked(agent, turn, 5.0, cached, evaluated, n_predicted, 0)


def test_agents_share_a_head_and_no_more() -> None:
    """Two agents share the system message and differ from the first user message on; the same
    number gives the same agent, so each server gets equal prompts.
    """
    one, other, again = (Agent(CASES[0], number, options()) for number in (0, 1, 0))
    replies = SimpleNamespace(
        name="pyctl",
        request=lambda *_, **__: SimpleNamespace(
            text="a", first_ms=1.0, cached=0, evaluated=1, n_predicted=1
        ),
    )
    for agent in (one, other, again):
        for _ in range(3):
            agent.turn(replies)  # type: ignore[arg-type]
    assert one.messages == again.messages
    assert one.messages[0] == other.messages[0]
    assert one.messages[1] != other.messages[1]
    assert [message["role"] for message in one.messages] == [
        "system",
        "user",
        *("assistant", "tool") * 2,
        "assistant",
    ]


def test_an_agent_asks_again_and_is_lost_in_the_end() -> None:
    agent = Agent(CASES[0], 0, options())
    server = SimpleNamespace(name="pyctl", request=Mock(side_effect=OSError("no room")))
    for _ in range(2):
        agent.turn(server, pause=0.0)  # type: ignore[arg-type]
    assert agent.is_lost
    assert agent.n_refused == TRIES
    assert agent.asked == []


def test_the_floor_counts_a_head_once_and_no_reply() -> None:
    turns = [asked(0, 0, 0, 150), asked(1, 0, 100, 60), asked(0, 1, 0, 200), asked(1, 1, 160, 30)]
    assert floor_of(turns, 100) == 100 + 50 + 60 + (200 - 160) + (190 - 170)


@pytest.mark.parametrize("case", ["8 at once", "4 in turn", "4 at once, over budget"])
def test_a_case_ends_with_every_request_answered(
    case: str, model_path: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every agent gets a reply to each turn, and the page shows the counts: no server looks fast
    because it refused requests.
    """
    model = f"tiny-hybrid={model_path('tiny-hybrid')}"
    main(
        ["--models", model, *SMALL, "--cases", case, "--results", str(tmp_path), "--flags", "-t 1"]
    )
    data = json.loads((tmp_path / "gpu-agents-tiny-hybrid.json").read_text(encoding="utf-8"))
    (record,) = data["records"]
    n_agents = int(case[0])
    assert record["refused"] == 0
    assert record["lost"] == 0
    assert [(each["agent"], each["turn"]) for each in record["asked"]] == [
        (i, t) for i in range(n_agents) for t in (0, 1)
    ]
    assert (
        record["replies"]
        == sum(each["n_predicted"] for each in record["asked"])
        >= 16 * 2 * n_agents
    )
    whole = sum(each["cached"] + each["evaluated"] for each in record["asked"])
    assert 0 < record["floor"] < whole, "agents share a head, and come back to what they said"
    text = (tmp_path / "gpu-agents-tiny-hybrid.md").read_text(encoding="utf-8")
    assert f"| {case} | pyctl |" in text
    rows = [line for line in text.splitlines() if line.startswith(f"| {case} | pyctl |")]
    assert [line.split(" | ")[2] for line in rows[1:]] == ["1", "2"], "first tokens by turn"
    assert f"| {case} | pyctl |" in capsys.readouterr().out


def test_first_tokens_are_shown_by_turn() -> None:
    waits = {0: (1, 2, 3, 4), 1: (10, 10, 10, 11)}
    asked = [{"turn": turn, "first_ms": float(ms)} for turn, each in waits.items() for ms in each]
    rows = list(rows_by_turn({"case": "4 at once", "server": "pyctl", "asked": asked}))
    assert [row[2:] for row in rows] == [["1", "2", "4", "1.60"], ["2", "10", "11", "1.10"]]


def test_what_was_not_measured_says_why() -> None:
    records = [{"case": "4 in turn", "server": "pyctl", "why": "no time left"}]
    assert "| 4 in turn | pyctl | no time left |" in document(
        {"shape": "tiny", "machine": {}, "records": records}
    )
