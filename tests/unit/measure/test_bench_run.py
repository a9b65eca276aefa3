"""A run of `pyctl bench`: its progress on stderr, and the comparison of replies."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

from pyctl.measure.bench_run import (
    SIGN_SECONDS,
    BenchOptions,
    BenchRun,
    difference,
)
from pyctl.measure.client import AskedServer, TimedReply


class Silent:
    """A server whose replies come at once."""

    name = "pyctl"

    def request(self, *_: object, **more: object) -> TimedReply:
        return TimedReply("Yes.", 1.0, 1, 1.0, {"prompt_n": 1, "cache_n": 0})


def told_of(depth: int, speed: float) -> list[str]:
    """Return the lines around one request of ``depth`` tokens when ``speed`` tokens a second have
    been measured.
    """
    lines: list[str] = []
    run = BenchRun(BenchOptions((), (depth,), 900.0), Path(), lines.append, tokens_per_second=speed)
    run.request(cast(AskedServer, Silent()), "cold", depth, cast(Any, []), 1)
    return lines


def test_a_step_that_may_take_long_is_announced() -> None:
    assert told_of(32768, 400.0)[0] == "pyctl: cold, 32,768 tokens, at most 82 s ..."
    assert told_of(2048, 0.0)[0] == "pyctl: cold, 2,048 tokens ..."  # nothing is measured yet
    assert [line for line in told_of(2048, 2048 / SIGN_SECONDS + 1) if line.endswith("...")] == []


def test_differences_of_log_probabilities() -> None:
    cold = ({"a": -0.5, "b": -1.0}, {"a": -0.1, "b": -9.0})
    assert difference(cold, cold) == 0
    assert difference(({"a": -0.5, "b": -1.25}, cold[1]), cold) == 0.25
    assert math.isclose(
        difference(({"a": -0.5, "c": -0.75}, cold[1]), cold), 0.25
    )  # c is at most -1 there
    # After another likeliest token the texts differ, and so may everything.
    assert difference(({"a": -1.0, "b": -0.5}, {"a": -7.0, "b": 0.0}), cold) == 0.5
