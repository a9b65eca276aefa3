"""Counts and violations that a soak finds."""

from __future__ import annotations

import threading
import time
from collections import Counter


class Findings:
    """Counts and violations from many threads."""

    MAX = 40
    """Violations that are kept in words; all are counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.counts: Counter[str] = Counter()
        self.worst: dict[str, tuple[float, str]] = {}
        self.violations: list[str] = []
        self.n_violations = 0

    def count(self, name: str, by: int = 1) -> None:
        """Add ``by`` to a number of the final table."""
        with self._lock:
            self.counts[name] += by

    def longest(self, name: str, seconds: float, what: str) -> None:
        """Remember the slowest of its kind."""
        with self._lock:
            if seconds > self.worst.get(name, (0.0, ""))[0]:
                self.worst[name] = seconds, what

    def violate(self, text: str) -> None:
        """Record a violation: the server did something that it must never do."""
        with self._lock:
            self.n_violations += 1
            if len(self.violations) < self.MAX:
                self.violations.append(f"{time.monotonic() - self._began:.0f} s: {text}")
                print(f"  {self.violations[-1]}", flush=True)
