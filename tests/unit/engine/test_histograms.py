"""Histograms of replies."""

from __future__ import annotations

import pytest

from pyctl.engine.histograms import SOURCES, Histogram, ReplyHistograms, ReplySource
from pyctl.engine.request import Timings


def timings(n_predicted: int = 11, predicted_ms: float = 500.0) -> Timings:
    return Timings(5, 7, 2.0, n_predicted, predicted_ms, first_token_ms=300.0, queued_ms=20.0)


def counted_once(reply: Timings, source: ReplySource) -> ReplyHistograms:
    """Return the histograms of one reply."""
    histograms = ReplyHistograms()
    histograms.count_reply(reply, source)
    return histograms


def test_a_value_at_a_bound_is_within_it() -> None:
    histogram = Histogram((1.0, 2.0)).with_one(1.0).with_one(1.5).with_one(9.0)
    assert histogram.counts == (1, 1, 1)
    assert histogram.total == 11.5


@pytest.mark.parametrize("source", SOURCES)
def test_first_tokens_count_by_source(source: ReplySource) -> None:
    counted = counted_once(timings(), source).first_tokens
    assert {each: sum(histogram.counts) for each, histogram in counted.items()} == {
        each: int(each == source) for each in SOURCES
    }
    assert counted[source].total == 0.3


def test_a_reply_counts_its_pace_after_the_first_token() -> None:
    counted = counted_once(timings(), "none")
    assert counted.rates.total == pytest.approx(20.0)
    assert counted.token_seconds.total == pytest.approx(0.05)
    assert counted.queued.total == 0.02
    assert counted.durations.total == pytest.approx(0.8)


@pytest.mark.parametrize(("n", "ms"), [(1, 5.0), (3, 0.0)])
def test_a_reply_without_a_pace_counts_none(n: int, ms: float) -> None:
    counted = counted_once(timings(n, ms), "none")
    assert sum(counted.rates.counts) == 0
    assert sum(counted.token_seconds.counts) == 0
    assert sum(counted.durations.counts) == 1


def test_first_tokens_of_all_sources_are_their_sum() -> None:
    histograms = ReplyHistograms()
    for source in SOURCES:
        histograms.count_reply(timings(), source)
    assert sum(histograms.all_first_tokens.counts) == len(SOURCES)
    assert max(histograms.all_first_tokens.counts) == len(SOURCES), "all are in one bucket"
    assert histograms.all_first_tokens.total == pytest.approx(0.3 * len(SOURCES))
