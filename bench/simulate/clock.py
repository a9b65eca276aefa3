"""The simulation's clock, which the whole process reads instead of the machine's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

START = 1_700_000_000.0
"""Seconds since the epoch at which each simulation starts."""

TICK_SECONDS = 1e-6
"""By so much a look at the clock advances it: durations are positive, and waits come to an end."""


class SimulatedClock:
    """Monotonic seconds and the time of the day. Only `advance`, `jump` and looks change them."""

    def __init__(self) -> None:
        self._now = 0.0
        self._offset = START

    def __call__(self) -> float:
        """Return monotonic seconds."""
        self._now += TICK_SECONDS
        return self._now

    @property
    def now(self) -> float:
        """Monotonic seconds, by a look that does not advance them."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self._now += seconds

    def jump(self, seconds: float) -> None:
        """Set the time of the day forward, or back if ``seconds`` are negative."""
        self._offset += seconds

    def epoch(self) -> float:
        """Return seconds since the epoch, as `time.time` does."""
        return self._offset + self._now

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let all code of this process read this clock through `time`."""
        with (
            patch.object(time, "monotonic", self),
            patch.object(time, "perf_counter", self),
            patch.object(time, "time", self.epoch),
        ):
            yield
