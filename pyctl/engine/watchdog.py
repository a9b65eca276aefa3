"""Signs that the engine's thread hangs, for the thread that watches it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Hashable

from pyctl.engine.engine_settings import Clock

__all__ = ["STILL_SECONDS", "WATCH_SECONDS", "ProgressWatch", "StillThread"]

WATCH_SECONDS = 1.0
"""Interval between two checks of the engine's thread."""

STILL_SECONDS = 2.0
"""After the loss of a device, a thread that stands at one instruction for so long is in a call that
never returns.
"""


class ProgressWatch:
    """A watch for an engine that has work and makes no progress for ``stall_seconds`` (0: no
    limit).

    ``sign`` is a value that changes with progress; `is_stalled` observes it every ``interval``
    seconds.
    """

    def __init__(
        self,
        stall_seconds: float,
        sign: Hashable,
        clock: Clock = time.monotonic,
        interval: float = WATCH_SECONDS,
    ) -> None:
        self.still_seconds = 0.0
        """Seconds without progress, as far as they were observed."""
        self.interval = interval
        self._stall_seconds = stall_seconds
        self._sign = sign
        self._clock = clock
        self._observed_at = clock()

    def is_stalled(self, sign: Hashable, *, is_working: bool) -> bool:
        """Observe the current ``sign``; return whether progress has been missing for too long."""
        now = self._clock()
        # Count at most two intervals: a stopped process or machine is not a stall.
        passed = min(now - self._observed_at, 2 * self.interval)
        self._observed_at = now
        is_still = is_working and sign == self._sign
        self._sign = sign
        self.still_seconds = self.still_seconds + passed if is_still else 0.0
        return 0 < self._stall_seconds <= self.still_seconds


class StillThread:
    """Detects a ``thread`` that is in a call that never returns, since it stands still for
    ``seconds``; `is_still` is called every ``interval`` seconds.
    """

    def __init__(
        self,
        thread: threading.Thread,
        clock: Clock = time.monotonic,
        seconds: float = STILL_SECONDS,
    ) -> None:
        self.interval = seconds / 10
        self._thread = thread
        self._seconds = seconds
        self._clock = clock
        self._instruction: tuple[int, int] | None = None  # its frame and its place in there
        self._since = clock()

    def is_still(self) -> bool:
        """Return whether the thread has been at one instruction for so many seconds, in all calls
        of this method since then.
        """
        frame = sys._current_frames().get(self._thread.ident or 0)
        instruction = (id(frame), frame.f_lasti if frame is not None else 0)
        if instruction != self._instruction:
            self._instruction = instruction
            self._since = self._clock()
            return False
        return self._clock() - self._since >= self._seconds
