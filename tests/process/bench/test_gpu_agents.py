"""Agents side by side, in their smallest form: no GPU, and no llama-server."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import agents
from bench.gpu.agents import (
    CASES,
    TRIES,
    Agent,
    Asked,
    Record,
    Subject,
    document,
    floor_of,
    main,
    row,
    rows_by_turn,
)
from bench.gpu.servers import Completion, Messages, Reply, Server
from bench.simulate.clock import SimulatedClock

IN_TURN = CASES[2]
REQUEST_SECONDS = 10.0
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
            agent.turn(replies, math.inf)  # type: ignore[arg-type]
    assert one.messages == again.messages
    assert one.messages[0] == other.messages[0]
    assert one.messages[1] != other.messages[1]
    assert [message["role"] for message in one.messages] == [
        "system",
        "user",
        *("assistant", "tool") * 2,
        "assistant",
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    """A clock of the module under test that only requests and pauses advance."""
    clock = SimulatedClock()
    times = SimpleNamespace(monotonic=clock, perf_counter=clock, sleep=clock.advance)
    monkeypatch.setattr(agents, "time", times)
    return clock


class RefusingServer(Server):
    """Answers the first ``n_answered`` turns of each agent and refuses the others; each request
    takes REQUEST_SECONDS.
    """

    def __init__(self, clock: SimulatedClock, n_answered: int) -> None:
        super().__init__("pyctl", [], Path("unused.log"))
        self._clock = clock
        self._n_answered = n_answered

    def request(self, messages: Messages, n_predict: int, **fields: Any) -> Reply:
        self._clock.advance(REQUEST_SECONDS)
        n_before = sum(message["role"] == "assistant" for message in messages)
        if messages[0]["role"] == "system" and n_before >= self._n_answered:
            raise OSError("no room")
        return Reply("a", 5000.0, n_predict, 1000.0, {"cache_n": 0, "prompt_n": 300})

    def complete(self, prompt: str | Sequence[int], n_predict: int) -> Completion:
        return Completion(1000.0, [(1.0, 1), (2.0, n_predict - 1)], n_predict, {})

    def post(self, path: str, body: Any = None) -> Any:
        return {"tokens": [0] * 100}


def run_in_turn(
    server: Server, n_turns: int, *, end: float = math.inf, case_budget: float = math.inf
) -> Record:
    """Return the record of four agents in turn."""
    settings = options(turns=n_turns, prefill=400, case_budget=case_budget)
    subject = Subject(server, settings, 4096)
    group = [Agent(IN_TURN, number, settings) for number in range(IN_TURN.n_agents)]
    record = subject.run(IN_TURN, group, n_turns, end)
    return {**record, "vram_mib": None, "resident_mib": None}


def test_an_agent_asks_again_and_is_lost_in_the_end(clock: SimulatedClock) -> None:
    agent = Agent(CASES[0], 0, options())
    server = RefusingServer(clock, 0)
    for _ in range(2):
        agent.turn(server, math.inf)
    assert agent.is_lost
    assert agent.n_refused == TRIES
    assert agent.asked == []


def counts(record: Record) -> Record:
    """Return the counts of what was not answered."""
    return {name: record[name] for name in ("refused", "lost", "unanswered")}


@pytest.mark.parametrize("limit", ["end", "case_budget"])
def test_nothing_is_sent_after_the_end_of_a_case(limit: str, clock: SimulatedClock) -> None:
    """The first turns take 40 s; the first agent is refused at 50, 60.5 and 71 s."""
    server = RefusingServer(clock, 1)
    seconds = 65.0
    if limit == "end":
        seconds += 2 * REQUEST_SECONDS  # of the requests before the case
    record = run_in_turn(server, 3, **{limit: seconds})
    assert [(each["agent"], each["turn"]) for each in record["asked"]] == [
        (number, 0) for number in range(4)
    ]
    assert counts(record) == {"refused": 3, "lost": 0, "unanswered": 8}
    assert record["wall_s"] == pytest.approx(71.5, abs=0.01)


def test_a_case_without_a_limit_loses_the_refused(clock: SimulatedClock) -> None:
    record = run_in_turn(RefusingServer(clock, 1), 3)
    assert counts(record) == {"refused": 4 * TRIES, "lost": 4, "unanswered": 8}


def test_the_ideal_is_that_of_the_answered(clock: SimulatedClock) -> None:
    whole = run_in_turn(RefusingServer(clock, 1), 1)
    ended = run_in_turn(RefusingServer(clock, 1), 3, case_budget=65.0)
    assert whole["unanswered"] == 0
    assert ended["ideal_s"] == whole["ideal_s"] > 0


def test_a_case_without_an_answer_is_shown(clock: SimulatedClock) -> None:
    record = run_in_turn(RefusingServer(clock, 0), 2, case_budget=5.0)
    assert record["asked"] == []
    assert record["ideal_s"] == 0
    assert row(record)[4] == ""
    page = document({"shape": "tiny", "machine": {}, "records": [record]})
    header, _, cells, *_ = (line for line in page.splitlines() if line.startswith("|"))
    shown = dict(zip(header.split(" | "), cells.split(" | "), strict=True))
    assert counts(shown) == {"refused": "1", "lost": "0", "unanswered": "8"}


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
    assert record["unanswered"] == 0
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


def test_agents_at_once_send_nothing_after_the_end_and_are_kept(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    model = f"tiny-hybrid={model_path('tiny-hybrid')}"
    case = ["--cases", "4 at once", "--case-budget", "0"]
    main(["--models", model, *SMALL, *case, "--results", str(tmp_path), "--flags", "-t 1"])
    data = json.loads((tmp_path / "gpu-agents-tiny-hybrid.json").read_text(encoding="utf-8"))
    (record,) = data["records"]
    assert record["asked"] == []
    assert counts(record) == {"refused": 0, "lost": 0, "unanswered": 8}
    assert "| 4 at once | pyctl |" in (tmp_path / "gpu-agents-tiny-hybrid.md").read_text("utf-8")


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
