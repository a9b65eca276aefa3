from __future__ import annotations

import logging

import pytest

from pyctl.engine import engine_stats as progress
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.drive import ask, engine_of


@pytest.mark.parametrize(("every", "at"), [(0.0, (64, 128, 192)), (3600.0, ())])
def test_a_long_prefill_is_seen_and_a_short_one_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, every: float, at: tuple[int, ...]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", every)
    with caplog.at_level(logging.INFO, logger=progress.__name__):
        ask(engine_of(FakeBackend(n_ubatch=64)), Prompt.of([1 + i % 60 for i in range(200)]))
    lines = [record.getMessage() for record in caplog.records if record.name == progress.__name__]
    assert [line.split()[:4] for line in lines] == [["prefill", str(n), "of", "200"] for n in at]
    assert [" 32 %  " in line for line in lines[:1]] == [True] * len(lines[:1])


def pace_of(costs: list[tuple[int, float]], start: int = 0) -> progress.PrefillPace:
    """The pace after batches of so many tokens, each of which took so many seconds."""
    now, n = 0.0, start
    pace = progress.PrefillPace(start, lambda: now)
    assert pace.speed == pace.seconds_left(1000) == 0
    for tokens, seconds in costs:
        now, n = now + seconds, n + tokens
        pace.reached(n)
    return pace


def test_an_even_prefill_takes_what_its_speed_says() -> None:
    pace = pace_of([(100, 1.0)] * 20, start=500)
    assert pace.speed == pytest.approx(100)
    assert pace.seconds_left(3500) == pytest.approx(10)


def test_only_the_last_seconds_count_for_the_speed() -> None:
    assert pace_of([(1000, 1.0)] * 3 + [(100, 1.0)] * 10).speed == pytest.approx(100)
    assert pace_of([(100, 1.0)] * 10 + [(1000, 1.0)] * 4).seconds_left(6000) == pytest.approx(1)


@pytest.mark.parametrize("percent", [25, 50, 75])
def test_the_estimate_grows_with_the_cost_of_a_token(percent: int) -> None:
    """The cost of a token rises from 1 to 2.6 ms over the prompt."""
    total, batch = 39063, 512

    def seconds(first: int, last: int) -> float:
        return sum((0.001 + 0.0016 * (n / total)) for n in range(first, last))

    n = total * percent // 100 // batch * batch
    pace = pace_of([(batch, seconds(end - batch, end)) for end in range(batch, n + 1, batch)])
    assert pace.seconds_left(total) == pytest.approx(seconds(n, total), rel=0.05)
