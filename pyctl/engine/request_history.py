"""The latest requests of a model, by kind: the timeline of its cache."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import msgspec

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.prompt_comparison import PromptComparison
from pyctl.cache.request_kind import RequestKind
from pyctl.engine.engine_settings import Clock
from pyctl.engine.request import Request, Timings
from pyctl.engine.request_classifier import RequestClassifier
from pyctl.settings.limit import limit

__all__ = ["MAX_REQUESTS", "RequestHistory", "ServedRequest"]

MAX_REQUESTS = limit(
    128, "requests with speeds and kinds in GET /cache", "the oldest are forgotten", "memory"
)

HOUR = 3600.0


class ServedRequest(msgspec.Struct, frozen=True):
    """A request that ended with a reply.

    Attributes:
        ended: When it ended, in seconds of the engine's clock.
        timings: Its tokens and times.
        source: The tier that its prefix came from.
        kind: How it follows from earlier requests, None if it was not to be cached.
        comparison: The comparison with the nearest remembered prompt, None without one.
    """

    ended: float
    timings: Timings
    source: str
    kind: RequestKind | None
    comparison: PromptComparison | None


class RequestHistory:
    """The latest requests, at most `MAX_REQUESTS`, and counts of all by kind since the start.

    The engine's thread calls everything. ``clock`` gives monotonic seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self.n_by_kind: Counter[RequestKind] = Counter()
        self._clock = clock
        self._classifier = RequestClassifier(clock)
        self.requests: deque[ServedRequest] = deque(maxlen=MAX_REQUESTS)

    def classify(self, request: Request, stats: RequestStats) -> None:
        """Set the kind of a request whose prompt was compared with recent ones.

        A conversation that this model has not seen, and another one has, was moved from there.
        """
        if not request.cache_prompt:
            return
        prompt = request.prompt
        comparison = stats.comparison
        is_known = comparison is not None and comparison.is_same_conversation
        if request.model_before and not is_known:
            comparison = PromptComparison(0, len(prompt), section="model")
            stats.comparison = comparison
        stats.kind = self._classifier.classify(prompt.sections, comparison)

    def add(self, timings: Timings, stats: RequestStats) -> None:
        """Record a request that ended with a reply."""
        if stats.kind is not None:
            self.n_by_kind[stats.kind] += 1
        self.requests.append(
            ServedRequest(self._clock(), timings, stats.source, stats.kind, stats.comparison)
        )

    def within_hour(self) -> Sequence[tuple[float, ServedRequest]]:
        """Return (age in seconds, request) of the latest requests within an hour, oldest first."""
        now = self._clock()
        return [
            (now - request.ended, request)
            for request in self.requests
            if now - request.ended < HOUR
        ]
