"""Waiting for what another thread or process does: by a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["until"]


def until(condition: Callable[[], object], every: float = 0.005) -> None:
    """Wait until ``condition`` is true, asked again after so many seconds; two minutes are too
    long.
    """
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(every)
