"""Idle tasks: which work of the engine's thread is due while no client waits for it.

The schedule decides by times and facts that its caller hands in, and runs nothing itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

from pyctl.cache.ports import AGAIN_SECONDS
from pyctl.engine.engine_settings import Clock

__all__ = ["IDLE_SECONDS", "PREPARE_SECONDS", "IdleFacts", "IdleSchedule", "IdleTask"]

IDLE_SECONDS = 2.0
"""Idle time after a client's last request before held rows without a copy go to free RAM of the
cache, else to disk. Background requests start after this copy.
"""

PREPARE_SECONDS = 0.5
"""Idle time before `Engine.warm_up`: a request that waited for the model arrives within it."""

NEVER = math.inf


class IdleTask(Enum):
    """The tasks, the most urgent first."""

    PREWARM = auto()
    """Run a background request."""
    SLEEP = auto()
    """Unload the model."""
    COPY = auto()
    """Copy held rows that only the device has."""
    PREPARE = auto()
    """Load the device's kernels."""
    CANARY = auto()
    """Run a step of a check of the cache."""


@dataclass(frozen=True)
class IdleFacts:
    """The state of an engine without work.

    ``prewarm_seconds`` are the seconds until a background request may start, None for none.
    ``is_writing``: the disk writes rows that only the device has. ``canary_seconds`` are the
    seconds until a step of a check is due, None for never.
    """

    is_asleep: bool
    needs_warm_up: bool
    is_writing: bool
    prewarm_seconds: float | None
    canary_seconds: float | None = None


class IdleSchedule:
    """The due times of idle tasks.

    With ``sleep_seconds`` below 0 the model stays loaded. ``copy_seconds`` pass before held rows
    are copied, ``quiet_seconds`` before a check. ``is_background``: no client waits for the
    engine's current work.
    """

    def __init__(
        self,
        sleep_seconds: float,
        clock: Clock,
        copy_seconds: float = IDLE_SECONDS,
        quiet_seconds: float = 0.0,
    ) -> None:
        self.is_background = False
        self._clock = clock
        self._sleep_seconds = sleep_seconds
        self._copy_seconds = copy_seconds
        self._quiet_seconds = quiet_seconds
        self._last_work = clock()
        self._last_client = self._last_work  # the end of the last work that a client waited for
        self._copy_at = NEVER

    def restart(self) -> None:
        """Restart the idle time: the engine has finished its work."""
        self._last_work = self._clock()
        if not self.is_background:
            self._last_client = self._last_work
        self._copy_at = max(self._last_client + self._copy_seconds, self._last_work)

    def record_copy(self, *, has_more: bool) -> None:
        """Record that a COPY has run; another one is due at once if it ``has_more``."""
        self._copy_at = self._clock() if has_more else NEVER

    def seconds(self, facts: IdleFacts) -> float | None:
        """Return the seconds until the next task is due; None if there is none."""
        now = self._clock()
        due = min(self._due_times(facts, now).values())
        return max(due - now, 0.0) if due < NEVER else None

    def due_task(self, facts: IdleFacts) -> IdleTask | None:
        """Return the most urgent task that is due, None for none."""
        now = self._clock()
        for task, due in self._due_times(facts, now).items():
            if due <= now:
                return task
        return None

    def _due_times(self, facts: IdleFacts, now: float) -> dict[IdleTask, float]:
        """Return when each task is due, the most urgent task first."""
        return {
            IdleTask.PREWARM: self._prewarm_due(facts, now),
            IdleTask.SLEEP: self._sleep_due(facts, now),
            IdleTask.COPY: self._copy_due(facts),
            IdleTask.PREPARE: self._prepare_due(facts),
            IdleTask.CANARY: self._canary_due(facts, now),
        }

    def _prewarm_due(self, facts: IdleFacts, now: float) -> float:
        if self._copy_due(facts) <= now + AGAIN_SECONDS:
            return NEVER  # the copy comes first
        if facts.prewarm_seconds is None:
            return NEVER
        return _after_writes(now + facts.prewarm_seconds, facts, now)

    def _sleep_due(self, facts: IdleFacts, now: float) -> float:
        if self._sleep_seconds < 0 or facts.is_asleep:
            return NEVER
        return _after_writes(self._last_work + self._sleep_seconds, facts, now)

    def _copy_due(self, facts: IdleFacts) -> float:
        return NEVER if facts.is_asleep else self._copy_at

    def _prepare_due(self, facts: IdleFacts) -> float:
        return self._last_work + PREPARE_SECONDS if facts.needs_warm_up else NEVER

    def _canary_due(self, facts: IdleFacts, now: float) -> float:
        if facts.is_asleep or facts.canary_seconds is None:
            return NEVER
        return max(now + facts.canary_seconds, self._last_work + self._quiet_seconds)


def _after_writes(due: float, facts: IdleFacts, now: float) -> float:
    """Return ``due``, or a later time while the disk writes."""
    return max(due, now + AGAIN_SECONDS) if facts.is_writing else due
