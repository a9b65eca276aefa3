"""Histograms of replies: how long requests wait, how fast replies are."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Literal, TypeAlias, get_args

from pyctl.engine.request import Timings

__all__ = ["FIRST_TOKEN_SECONDS", "SOURCES", "Histogram", "ReplyHistograms", "ReplySource"]

ReplySource: TypeAlias = Literal["live", "device", "ram", "disk", "none"]
"""The place of a restored prefix: the sequence itself, rows that had stayed on the device, RAM,
disk; ``none`` if the prompt was evaluated from its start.
"""

SOURCES: tuple[ReplySource, ...] = get_args(ReplySource)

FIRST_TOKEN_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
"""Upper bounds of the buckets of first tokens: from a resumed turn on a GPU to a cold prompt on a
CPU.
"""

QUEUE_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 50.0, 100.0, 500.0)
"""Upper bounds of the buckets of waiting times: from none to a long prompt of another client."""

TOKEN_RATES = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0, 200.0, 400.0)
"""Upper bounds of the buckets of tokens per second: from a large model on a CPU to accepted drafts
on a GPU.
"""

TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""OpenTelemetry's bounds for gen_ai.server.time_per_output_token."""

DURATION_SECONDS = tuple(0.01 * 2**n for n in range(14))
"""OpenTelemetry's bounds for gen_ai.server.request.duration: 10 ms to 82 s."""


@dataclass(frozen=True)
class Histogram:
    """Counts of values by upper ``bounds``, and their sum; the last count is above all bounds."""

    bounds: tuple[float, ...] = FIRST_TOKEN_SECONDS
    counts: tuple[int, ...] = ()
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            object.__setattr__(self, "counts", (0,) * (len(self.bounds) + 1))

    def with_one(self, value: float) -> Histogram:
        """Return the counts with one more ``value``, in the unit of the bounds: seconds, or tokens
        per second.
        """
        counts = list(self.counts)
        counts[bisect_left(self.bounds, value)] += 1
        return Histogram(self.bounds, tuple(counts), self.total + value)

    def __add__(self, other: Histogram) -> Histogram:
        """Return the counts of both, which have the same bounds."""
        counts = tuple(map(add, self.counts, other.counts))
        return Histogram(self.bounds, counts, self.total + other.total)


def _by_source() -> dict[ReplySource, Histogram]:
    return {source: Histogram() for source in SOURCES}


@dataclass
class ReplyHistograms:
    """Histograms of all requests that ended with a token.

    Attributes:
        first_tokens: The seconds from the arrival of a request to its first token, by the place
            that its prompt resumed from.
        queued: The seconds from its arrival to the start of its work.
        rates: The tokens per second after the first token.
        token_seconds: The seconds per token after the first.
        durations: The seconds from the arrival of a request to its end.
    """

    first_tokens: dict[ReplySource, Histogram] = field(default_factory=_by_source)
    queued: Histogram = Histogram(QUEUE_SECONDS)
    rates: Histogram = Histogram(TOKEN_RATES)
    token_seconds: Histogram = Histogram(TOKEN_SECONDS)
    durations: Histogram = Histogram(DURATION_SECONDS)

    def count_reply(self, timings: Timings, source: ReplySource) -> None:
        """Count one more reply; without a second token it has no pace."""
        seconds = timings.first_token_ms / 1e3
        self.first_tokens[source] = self.first_tokens[source].with_one(seconds)
        self.queued = self.queued.with_one(timings.queued_ms / 1e3)
        self.durations = self.durations.with_one(seconds + timings.predicted_ms / 1e3)
        n_more = timings.n_predicted - 1
        if n_more < 1 or timings.predicted_ms <= 0:
            return
        per_token = timings.predicted_ms / 1e3 / n_more
        self.rates = self.rates.with_one(1 / per_token)
        self.token_seconds = self.token_seconds.with_one(per_token)

    @property
    def all_first_tokens(self) -> Histogram:
        """The seconds to the first token of all sources."""
        return reduce(add, self.first_tokens.values())
