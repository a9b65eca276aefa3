"""When a check of the canary is due, and how many seconds of a day checks may take."""

from __future__ import annotations

from pyctl.engine.canary.canary_limits import CanaryLimits
from pyctl.engine.engine_settings import Clock

__all__ = ["CanarySchedule"]

DAY_SECONDS = 86_400


class CanarySchedule:
    """The times of checks, one each ``interval`` seconds of a monotonic ``clock``; 0 for none.

    An interrupted check stays due. Days are counted from the start of the program.

    Attributes:
        spent: The seconds that all checks took.
    """

    def __init__(self, interval: float, limits: CanaryLimits, clock: Clock) -> None:
        self.spent = 0.0
        self._interval = interval
        self._limits = limits
        self._clock = clock
        self._began = clock()
        self._due = self._began + interval
        self._day = 0
        self._spent_today = 0.0

    @property
    def quiet(self) -> float:
        """The seconds without work before a check starts."""
        return min(self._limits.quiet, self._interval)

    @property
    def seconds(self) -> float | None:
        """The seconds until the next check is due; None for never."""
        if not self._interval:
            return None
        now = self._clock()
        due = self._due
        if self.left_today <= 0:
            tomorrow = self._began + (self._day + 1) * DAY_SECONDS
            due = max(due, tomorrow)
        return max(due - now, 0.0)

    @property
    def left_today(self) -> float:
        """The seconds that checks may still take today."""
        self._turn_page()
        return self._limits.a_day - self._spent_today

    def may_take(self, seconds: float) -> bool:
        """Return whether a check may take ``seconds``, at any time."""
        return seconds <= min(self._limits.a_check, self._limits.a_day)

    def spend(self, seconds: float) -> None:
        """Count ``seconds`` of a check."""
        self._turn_page()
        self._spent_today += seconds
        self.spent += seconds

    def finish(self) -> None:
        """Record that a check has ended: the next one is due after the interval."""
        self._due = self._clock() + self._interval

    def _turn_page(self) -> None:
        """Count from 0 on a new day."""
        day = int((self._clock() - self._began) // DAY_SECONDS)
        if day != self._day:
            self._day = day
            self._spent_today = 0.0
