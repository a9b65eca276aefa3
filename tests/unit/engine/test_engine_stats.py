"""Counters of the engine, and the lines and estimates during a long prefill."""

from __future__ import annotations

import itertools
import logging

import pytest

from pyctl.cache.costs import Costs
from pyctl.cache.ram import RamCache
from pyctl.engine import engine_stats as progress
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.engine_stats import (
    LINE_SECONDS,
    EngineCounters,
    PrefillLog,
)
from pyctl.engine.histograms import FIRST_TOKEN_SECONDS, Histogram
from pyctl.engine.request import DraftCounts, Timings
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
        ask(engine, Prompt.from_ids([1 + i % 60 for i in range(200)]))
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
        costs.record_evaluated(end - batch, end, seconds(end - batch, end))
    shown = progress.PrefillLog(1, 0, total, costs, lambda: now)
    assert shown.seconds_left == 0
    n = total * percent // 100 // batch * batch
    for end in range(batch, n + 1, batch):
        now += 2 * seconds(end - batch, end)
        shown.reached(end)
    assert shown.seconds_left == pytest.approx(2 * seconds(n, total), rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        (0.0, 0),
        (FIRST_TOKEN_SECONDS[0], 0),
        (0.051, 1),
        (FIRST_TOKEN_SECONDS[-1], len(FIRST_TOKEN_SECONDS) - 1),
        (1e9, len(FIRST_TOKEN_SECONDS)),
    ],
)
def test_a_duration_counts_in_the_first_bucket_whose_bound_it_keeps(
    seconds: float, bucket: int
) -> None:
    empty = Histogram()
    histogram = empty.with_one(seconds)
    assert [n for n, count in enumerate(histogram.counts) if count] == [bucket]
    assert histogram.total == seconds
    assert sum(empty.counts) == 0, "the one before stays as it is"


def test_calls_count_their_sequences_and_the_longest() -> None:
    counters = EngineCounters()
    counters.count_call(3, 100)
    counters.count_call(1, 40)
    assert counters.n_calls == 2
    assert counters.n_busy == 4
    assert counters.n_longest == 100


def test_an_embedded_text_is_a_call_and_a_prompt() -> None:
    counters = EngineCounters()
    counters.count_embedded(12, 3.5)
    assert counters.n_calls == 1
    assert counters.n_evaluated == 12
    assert counters.prompt_ms == 3.5
    assert counters.n_longest == 0


def test_replies_are_summed() -> None:
    counters = EngineCounters()
    drafts = DraftCounts.of_draft(4, 3)
    for n_predicted in (10, 0):
        counters.count_reply(Timings(5, 7, 2.0, n_predicted, 8.0, 60.0, drafts))
    assert counters.n_cached == 10
    assert counters.n_evaluated == 14
    assert counters.prompt_ms == 4.0
    assert counters.n_predicted == 10
    assert counters.predicted_ms == 16.0
    assert counters.drafts == drafts + drafts
    first_tokens = counters.replies.all_first_tokens
    assert sum(first_tokens.counts) == 1, "a reply without a token has no first one"


def test_lines_come_at_most_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    shown = PrefillLog(3, 0, 10_000, Costs(), lambda: now)
    logged = []
    with caplog.at_level(logging.INFO, logger=progress.__name__):
        for n in range(100, 1000, 100):
            now += LINE_SECONDS / 2
            shown.reached(n)
            logged.append(len(caplog.records))
    assert logged == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert "request 3" in caplog.messages[0]
