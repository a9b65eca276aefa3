"""Rows of a GPU: which records give which figure, and which rows are lost."""

from __future__ import annotations

from typing import Any

import pytest

from bench.gpu.report import OURS, PEER
from bench.gpu.rewriting import HEAD, TYPES
from bench.gpu.rows import (
    ROWS,
    Found,
    found_in_agents,
    found_in_steps,
    found_in_texts,
    known,
    lost,
)


def rewriting(server: str, types: str, rate: float, **fields: Any) -> dict[str, Any]:
    """Return the record of a rewriting."""
    place = {"text": "JSON calls", "n_seqs": 4, "rate_of_all": 2 * rate, **fields}
    return {"kind": "rewriting", "server": server, "types": types, "rate": rate, **place}


def test_copies_are_compared_with_the_head_alone_and_with_llama_server() -> None:
    """Other texts, and replies in turn, are in the same records."""
    records = [
        rewriting(OURS, TYPES[OURS][0], 90.0),
        rewriting(OURS, TYPES[OURS][0], 9.0, n_seqs=1),
        rewriting(OURS, TYPES[OURS][0], 9.0, text="a file"),
        rewriting(OURS, HEAD, 100.0, rate_of_all=180.0),
        rewriting(PEER, TYPES[PEER][0], 60.0),
        {"kind": "speed", "rate": 1.0},
    ]
    alone, peer, *while_all_are_written = found_in_texts(records, "27b-nextn", "JSON calls")
    assert (alone.case, alone.ratio) == ("27b-nextn, JSON calls, pyctl, head alone", 0.9)
    assert (peer.case, peer.ratio) == ("27b-nextn, JSON calls", 1.5)
    assert [found.ratio for found in while_all_are_written] == [1.0, 1.5]
    assert lost([alone, peer]) == [
        "27b-nextn, JSON calls, pyctl, head alone, copies, four replies, tokens/s: 0.900, and not "
        "0.97"
    ]


def test_steps_are_compared_with_a_server_without_drafts() -> None:
    records = [
        {"kind": "speed", "n_max": 0, "rate": 200.0},
        {"kind": "speed", "n_max": 3, "rate": 199.0},
        {"kind": "rewriting", "rate": 1.0},
    ]
    (found,) = found_in_steps(records, "35b-a3b-nextn")
    assert found.ratio == 0.995
    assert lost([found]) == []


def agents(server: str, waits: dict[tuple[int, int], float], n_refused: int) -> dict[str, Any]:
    """Return the record of two agents with two turns each; ``waits`` are the answered ones."""
    asked = [{"agent": agent, "turn": turn, "first_ms": ms} for (agent, turn), ms in waits.items()]
    n_unanswered = 4 - len(asked)
    return {"server": server, "asked": asked, "refused": n_refused, "unanswered": n_unanswered}


def test_waits_of_agents_are_summed_over_what_both_servers_answered() -> None:
    """Requests that one server alone answered are in no sum."""
    records = [
        agents(OURS, {(0, 0): 500.0, (1, 0): 1500.0, (0, 1): 9000.0}, 0),
        agents(PEER, {(1, 0): 3500.0, (0, 0): 500.0, (1, 1): 7000.0}, 3),
    ]
    (found,) = found_in_agents(records, "27b-nextn")
    assert (found.ours, found.theirs, found.ratio) == (2.0, 4.0, 2.0)
    assert found.cells[-1] == "answered: 3, 3 of 4; refused: 0, 3"


def test_the_note_says_how_many_requests_each_server_answered() -> None:
    whole = {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 1.0, (1, 1): 1.0}
    (found,) = found_in_agents([agents(OURS, whole, 0), agents(PEER, {(0, 0): 2.0}, 8)], "27b")
    assert found.ratio == 2.0
    assert found.cells[-1] == "answered: 4, 1 of 4; refused: 0, 8"


@pytest.mark.parametrize(
    "theirs", [agents(PEER, {}, 5), {"server": PEER, "why": "the server did not start"}]
)
def test_agents_without_a_request_that_both_answered_are_no_figure(theirs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no request was answered by both servers"):
        list(found_in_agents([agents(OURS, {(0, 0): 1.0}, 0), theirs], "27b-nextn"))


def test_a_row_that_is_behind_for_a_reason_is_known_and_not_lost() -> None:
    near = Found("VRAM, MiB", "35b-a3b", 1000.0, 1000.0)
    far = Found("VRAM, MiB", "27b", 1250.0, 1000.0)
    assert known([near, far]) == [f"27b, VRAM, MiB: 0.800: {ROWS['VRAM, MiB'].reason}"]
    assert lost([near, far]) == ["27b, VRAM, MiB: 0.800, and not 0.99"]
