"""A model with a head behind a real server: the counts of drafts add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.process.conftest import Server

Start = Callable[..., Server]
TOTALS = "llamacpp:spec_decode_num_"


def counters(server: Server) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics").text
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith(TOTALS)]
    return {name.removeprefix(TOTALS): float(value) for name, _, value in lines}


def timings(server: Server, prompt: str, n: int = 60) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True}
    found: dict[str, Any] = httpx.post(f"{server.url}/completion", json=body, timeout=60).json()["timings"]
    return found


@pytest.fixture(scope="module")
def server(start: Start) -> Server:
    return start("tiny-hybrid-nextn", "--spec-type", "draft-mtp", "--exact", "--metrics", "-np", "2")


def test_counts_of_replies_add_up_to_the_counters(server: Server) -> None:
    before = counters(server)
    found = [timings(server, prompt) for prompt in ("Once upon a time", "The garden", "Once upon a time")]
    drafted, accepted = (sum(each[name] for each in found) for name in ("draft_n", "draft_n_accepted"))
    assert 0 < accepted < drafted
    for each in found:
        # Each step yields what was accepted and one more; all have a draft of three, but for the end.
        steps = each["predicted_n"] - 1 - each["draft_n_accepted"]
        assert abs(each["draft_n"] - 3 * steps) <= 3
    after = counters(server)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert (grown["draft_tokens_total"], grown["accepted_tokens_total"]) == (drafted, accepted)
    assert grown["drafts_total"] == drafted / 3
    places = [grown[f'accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(3)]
    assert sum(places) == accepted
    assert places == sorted(places, reverse=True)
    assert f"{found[0]['draft_n_accepted']} of {found[0]['draft_n']} drafts right" in server.log()
