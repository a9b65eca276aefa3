"""Reports of a reply: its timings, its usage and its settings."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.engine.request import DraftCounts
from tests.client import HI
from tests.unit.server.parts import drafting


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/completion", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x"}),
    ],
)
def test_timings_tell_of_drafts(path: str, body: dict[str, Any]) -> None:
    timings = drafting().post(path, body).json()["timings"]
    assert timings["draft_n"] == 8
    assert timings["draft_n_accepted"] == 3
    without = drafting(DraftCounts()).post(path, body).json()["timings"]
    assert timings.keys() - without.keys() == {"draft_n", "draft_n_accepted"}


def test_a_stream_tells_of_them_as_it_goes_on() -> None:
    for event in drafting().chat_stream(timings_per_token=True)[:-1]:
        if event["choices"] and event["choices"][0]["delta"].get("content"):
            assert event["timings"]["draft_n"] == 8
            assert event["timings"]["draft_n_accepted"] == 3
