"""The progress of `pyctl bench` on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from pyctl.measure.bench_run import SIGN_SECONDS, BenchOptions, BenchRun
from pyctl.measure.client import AskedServer, TimedReply


class Silent:
    """A server whose replies come at once."""

    name = "pyctl"

    def ask(self, *_: object, **more: object) -> TimedReply:
        return TimedReply("Yes.", 1.0, 1, 1.0, {"prompt_n": 1, "cache_n": 0})


def told_of(depth: int, speed: float) -> list[str]:
    """Return the lines around one request of ``depth`` tokens when ``speed`` tokens a second have
    been measured.
    """
    lines: list[str] = []
    run = BenchRun(BenchOptions((), (depth,), 900.0), Path(), lines.append, tokens_per_second=speed)
    run.ask(cast(AskedServer, Silent()), "cold", depth, cast(Any, []), 1)
    return lines


def test_a_step_that_may_take_long_is_announced() -> None:
    assert told_of(32768, 400.0)[0] == "pyctl: cold, 32,768 tokens, at most 82 s ..."
    assert told_of(2048, 0.0)[0] == "pyctl: cold, 2,048 tokens ..."  # nothing is measured yet
    assert [line for line in told_of(2048, 2048 / SIGN_SECONDS + 1) if line.endswith("...")] == []
