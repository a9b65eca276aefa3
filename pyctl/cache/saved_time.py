"""Time saved: how long clients would have waited for the tokens that the cache restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from pyctl.cache.cache_stats import RequestStats

__all__ = ["PrefillSpeed", "Report", "Saved", "SavedTime"]

MIN_TOKENS = 256
"""Tokens that a request has to evaluate for its own speed to count.

A GPU evaluates a batch of 256 tokens at nine tenths of its full speed, one of 32 at less than half.
"""

MEMORY_TOKENS = 32_768
"""Evaluated tokens that the running speed remembers; older ones fade."""


class Saved(msgspec.Struct, frozen=True):
    """The saving of the cache.

    Attributes:
        seconds: The seconds that it saved.
        tokens: The tokens that it restored.
        requests: The number of requests that it restored them for.
    """

    seconds: float = 0.0
    tokens: int = 0
    requests: int = 0

    def __add__(self, other: Saved) -> Saved:
        return Saved(
            self.seconds + other.seconds,
            self.tokens + other.tokens,
            self.requests + other.requests,
        )


Report: TypeAlias = Callable[[Saved, float], None]
"""Gets the saving of one request, and the running speed in tokens per second, 0 for none."""


class PrefillSpeed:
    """The running speed of an engine's prompts, of the latest `MEMORY_TOKENS` evaluated tokens.

    ``known`` is an earlier run's speed in tokens per second, 0 for none. It counts as measured,
    with the weight of `MIN_TOKENS`.
    """

    def __init__(self, known: float = 0.0) -> None:
        self._tokens = float(MIN_TOKENS) if known > 0 else 0.0
        self._seconds = self._tokens / known if known > 0 else 0.0
        self._is_measured = known > 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second; 0 before the first measurement."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    @property
    def measured(self) -> float:
        """The value, or 0 while all requests were too short to measure it."""
        return self.tokens_per_second if self._is_measured else 0.0

    def record(self, n_tokens: int, seconds: float) -> None:
        """Record ``n_tokens`` of one prompt, evaluated in ``seconds`` with nothing else on the
        device.

        Short prompts are slow: they count only until one of `MIN_TOKENS` has been measured.
        """
        is_long = n_tokens >= MIN_TOKENS
        if n_tokens <= 0 or not seconds > 0 or (self._is_measured and not is_long):
            return
        if is_long and not self._is_measured:
            self._tokens = 0.0
            self._seconds = 0.0
            self._is_measured = True
        keep = MEMORY_TOKENS / max(MEMORY_TOKENS, self._tokens)
        self._tokens = keep * self._tokens + n_tokens
        self._seconds = keep * self._seconds + seconds


class SavedTime:
    """An estimate of the time that the cache saved each request of one engine, for `Report`.

    A request that restored ``n`` tokens saved ``n / speed`` seconds, less the time of its lookup
    and its restore. Its speed is its own, from its start to its first token without lookup and
    restore, if it evaluated at least `MIN_TOKENS` and no other request ran meanwhile. Otherwise it
    is the running `PrefillSpeed` of the engine, which such requests measure.

    Two errors remain. Tokens deep in a prompt are slower than those before them, and until one long
    prompt has been measured, short ones stand in for it: both make the estimate too high.
    Not thread-safe.
    """

    def __init__(self, known: float = 0.0, report: Report = lambda saved, speed: None) -> None:
        self._speed = PrefillSpeed(known)
        self._report = report

    def count(self, stats: RequestStats, prompt_ms: float, *, is_alone: bool) -> float:
        """Count one request whose prompt took ``prompt_ms``; return the seconds that it saved.

        ``is_alone``: no other request ran before its first token.
        """
        around = (stats.lookup_ms + stats.restore_ms) / 1e3
        evaluating = prompt_ms / 1e3 - around
        if is_alone:
            self._speed.record(stats.n_evaluated, evaluating)
        if not stats.n_cached:
            return 0.0
        speed = self._speed.tokens_per_second
        if is_alone and stats.n_evaluated >= MIN_TOKENS and evaluating > 0:
            speed = stats.n_evaluated / evaluating
        seconds = max(stats.n_cached / speed - around, 0.0) if speed > 0 else 0.0
        self._report(Saved(seconds, stats.n_cached, 1), self._speed.measured)
        return seconds
