from __future__ import annotations

import itertools
import logging

import pytest

from pyctl.cache.costs import Costs
from pyctl.cache.ram import RamCache
from pyctl.engine import engine_stats as progress
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.engine_stats import LINE_SECONDS
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.drive import ask


@pytest.mark.parametrize(("passing", "at"), [(2 * LINE_SECONDS, (64, 128, 192)), (0.0, ())])
def test_a_long_prefill_is_seen_and_a_short_one_is_not(
    caplog: pytest.LogCaptureFixture, passing: float, at: tuple[int, ...]
) -> None:
    """The clock advances by ``passing`` seconds at each look."""
    clock = itertools.count(0.0, passing).__next__
    backend = FakeBackend(n_ubatch=64)
    engine = Engine(backend, RamCache(32, None), EngineSettings(), clock=clock)
    with caplog.at_level(logging.INFO, logger=progress.__name__):
        ask(engine, Prompt.of([1 + i % 60 for i in range(200)]))
    lines = [record.getMessage() for record in caplog.records if record.name == progress.__name__]
    assert [line.split()[:6] for line in lines] == [
        ["prefill", str(n), "of", "200", "tokens", "evaluated"] for n in at
    ]
    assert [" 32 %  " in line for line in lines[:1]] == [True] * len(lines[:1])


@pytest.mark.parametrize("percent", [25, 50, 75])
def test_the_estimate_grows_with_the_cost_of_a_token(percent: int) -> None:
    """The cost of a token rises from 1 to 2.6 ms over the prompt, as earlier ones said; all takes
    twice as long now.
    """
    total = 39063
    batch = 512
    now = 0.0
    costs = Costs()

    def seconds(first: int, last: int) -> float:
        return sum((0.001 + 0.0016 * (n / total)) for n in range(first, last))

    for end in range(batch, total, batch):
        costs.note_evaluated(end - batch, end, seconds(end - batch, end))
    shown = progress.PrefillLog(1, 0, total, costs, lambda: now)
    assert shown.seconds_left == 0
    n = total * percent // 100 // batch * batch
    for end in range(batch, n + 1, batch):
        now += 2 * seconds(end - batch, end)
        shown.reached(end)
    assert shown.seconds_left == pytest.approx(2 * seconds(n, total), rel=0.05)
