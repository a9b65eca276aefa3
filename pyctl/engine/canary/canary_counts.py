"""The results of the canary, for metrics and the view of the cache."""

from __future__ import annotations

from collections import Counter, deque

import msgspec

from pyctl.cache.condemned import Report
from pyctl.engine.canary.skipped import SkipReason
from pyctl.engine.canary.targets import Place
from pyctl.settings.limit import limit

__all__ = ["CanaryCounts", "CanaryView"]

MAX_REPORTS = limit(8, "reports of the canary in GET /cache", "the oldest are forgotten", "memory")


class CanaryView(msgspec.Struct, frozen=True):
    """The results since the start.

    Attributes:
        interval: The seconds between two checks, 0 for none.
        verified: The snapshots that were equal to the bit, by place.
        differing: The snapshots that were not, by place.
        skipped: The snapshots that were not checked, by reason.
        interrupted: The checks that a request ended.
        seconds: The seconds that all checks took.
        reports: The latest differences.
    """

    interval: float = 0.0
    verified: dict[Place, int] = msgspec.field(default_factory=dict)
    differing: dict[Place, int] = msgspec.field(default_factory=dict)
    skipped: dict[SkipReason, int] = msgspec.field(default_factory=dict)
    interrupted: int = 0
    seconds: float = 0.0
    reports: tuple[Report, ...] = ()


class CanaryCounts:
    """Sums since the start, by place and reason."""

    def __init__(self) -> None:
        self.verified: Counter[Place] = Counter()
        self.differing: Counter[Place] = Counter()
        self.skipped: Counter[SkipReason] = Counter()
        self.interrupted = 0
        self.reports: deque[Report] = deque(maxlen=MAX_REPORTS)

    @property
    def n_results(self) -> int:
        """The number of snapshots that were verified, that differ, or that were skipped."""
        return self.verified.total() + self.differing.total() + self.skipped.total()

    def view(self, interval: float, seconds: float) -> CanaryView:
        """Return the counts now; ``seconds`` is the time of all checks."""
        return CanaryView(
            interval=interval,
            verified=dict(self.verified),
            differing=dict(self.differing),
            skipped=dict(self.skipped),
            interrupted=self.interrupted,
            seconds=seconds,
            reports=tuple(self.reports),
        )
