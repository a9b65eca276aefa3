"""Long prefills in the log: a line now and then, so that people see that and how fast something happens."""

from __future__ import annotations

import logging
import time

__all__ = ["PrefillLog"]

LINE_SECONDS = 5.0
"""Between two lines; a prefill that is shorter gets none."""

log = logging.getLogger(__name__)


class PrefillLog:
    """Tells how far the prefill of request ``task`` has come, from ``start`` to ``n_prompt`` tokens."""

    def __init__(self, task: int, start: int, n_prompt: int) -> None:
        self._task, self._start, self._n_prompt = task, start, n_prompt
        self._began = time.monotonic()
        self._next_line = self._began + LINE_SECONDS

    def reached(self, n: int) -> None:
        """The first ``n`` tokens are evaluated."""
        now = time.monotonic()
        if now < self._next_line or n >= self._n_prompt:
            return
        self._next_line = now + LINE_SECONDS
        speed = (n - self._start) / (now - self._began)
        log.info(
            "request %d: prefill at %d of %d tokens (%d %%), %.0f tok/s, %.0f s to go",
            *(self._task, n, self._n_prompt, 100 * n // self._n_prompt, speed, (self._n_prompt - n) / speed),
        )
