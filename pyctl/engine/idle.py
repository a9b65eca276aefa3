"""Idle tasks: the work of the engine's thread while no client waits for it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

from pyctl.cache import AGAIN_SECONDS
from pyctl.engine.engine import Engine
from pyctl.engine.openmp import end_threads

__all__ = ["IdleTasks"]

log = logging.getLogger(__name__)

IDLE_SECONDS = 2.0
"""Idle time after a client's last request before held rows without a copy go to free RAM of the
cache, else to disk. Background requests start after this copy.
"""

PREPARE_SECONDS = 0.5
"""Idle time before `Engine.prepare`: a request that waited for the model arrives within it."""

NEVER = math.inf


class IdleTask(NamedTuple):
    """A task that is due at ``due``, seconds of the engine's clock.

    ``run`` returns whether the engine has steps to run then.
    """

    due: float
    run: Callable[[], bool]


class IdleTasks:
    """The schedule of idle tasks: background requests, unloading the model, copying held rows, and
    preparing for requests.

    With ``sleep_seconds`` below 0 the model stays loaded. ``is_background``: no client waits for
    the engine's current work.
    """

    def __init__(self, engine: Engine, sleep_seconds: float) -> None:
        self.is_background = False
        self._engine = engine
        self._clock = engine.clock
        self._sleep_seconds = sleep_seconds
        self._last_work = self._clock()
        self._last_client = self._last_work  # the end of the last work that a client waited for
        self._copy_at = NEVER

    def restart(self) -> None:
        """Restart the idle time: the engine has finished its work."""
        end_threads()
        self._last_work = self._clock()
        if not self.is_background:
            self._last_client = self._last_work
        self._copy_at = max(self._last_client + IDLE_SECONDS, self._last_work)
        self._engine.prefix_cache.write_back.flush_copies()

    def hand_over(self) -> None:
        """Copy what the disk needs; while a client waits for the engine's work, that is done
        between two tokens.
        """
        if self.is_background or not self._engine.scheduler.has_work:
            self._engine.prefix_cache.write_back.flush_copies()

    @property
    def seconds(self) -> float | None:
        """Seconds until the next task is due; None if there is none."""
        now = self._clock()
        due = min(task.due for task in self._tasks(now))
        return max(due - now, 0.0) if due < NEVER else None

    def run_due(self) -> bool:
        """Run the most urgent task that is due; return whether the engine has steps to run."""
        now = self._clock()
        for task in self._tasks(now):
            if task.due <= now:
                return task.run()
        self.is_background = False
        return False

    def _tasks(self, now: float) -> list[IdleTask]:
        """Return all tasks, the most urgent first."""
        return [
            IdleTask(self._prewarm_due(now), self._prewarm),
            IdleTask(self._sleep_due(now), self._sleep),
            IdleTask(self._copy_due(), self._copy),
            IdleTask(self._prepare_due(), self._prepare),
        ]

    # -- due times
    # ----------------------------------------------------------------------------------

    def _prewarm_due(self, now: float) -> float:
        if self._copy_due() <= now + AGAIN_SECONDS:
            return NEVER  # the copy comes first
        wait = self._engine.prewarms.seconds
        return NEVER if wait is None else self._after_writes(now + wait, now)

    def _sleep_due(self, now: float) -> float:
        if self._sleep_seconds < 0 or self._engine.asleep:
            return NEVER
        return self._after_writes(self._last_work + self._sleep_seconds, now)

    def _copy_due(self) -> float:
        return NEVER if self._engine.asleep else self._copy_at

    def _prepare_due(self) -> float:
        return self._last_work + PREPARE_SECONDS if self._engine.can_prepare else NEVER

    def _after_writes(self, due: float, now: float) -> float:
        """Return ``due``, later while the disk writes rows that only the device has."""
        disk = self._engine.prefix_cache.disk
        if disk is not None and disk.is_draining_device:
            return max(due, now + AGAIN_SECONDS)
        return due

    # -- tasks
    # ----------------------------------------------------------------------------------

    def _prewarm(self) -> bool:
        self.is_background = True
        return True

    def _sleep(self) -> bool:
        self._engine.sleep()
        log.info("idle: model unloaded until the next request")
        return False

    def _copy(self) -> bool:
        has_more = self._engine.prefix_cache.write_back.copy_next()
        self._copy_at = self._clock() if has_more else NEVER
        return False

    def _prepare(self) -> bool:
        self._engine.prepare()
        return False
