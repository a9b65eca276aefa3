"""Costs in seconds to evaluate a prefix, to load it from RAM, or to read it from disk."""

from __future__ import annotations

__all__ = ["Costs"]

_TOKEN_SECONDS = 1e-3
_LOAD_SECONDS = 1 / 8e9
"""Seconds of a byte. A guess that stays: copies to a GPU are only started, and their end is not
measured.
"""

_READ_RATE = 1e9
_READ_LATENCY = 0.01
_PRIOR_TOKENS = 256.0
_PRIOR_BYTES = 2.0**24
_MEMORY_TOKENS = 2.0**18
_MEMORY_BYTES = 2.0**34
_DEPTH_SCALE = 4096.0


class _Rate:
    """Seconds per byte of recent transfers, starting with ``rate`` bytes a second."""

    def __init__(self, rate: float) -> None:
        self._n_bytes = _PRIOR_BYTES
        self._seconds = _PRIOR_BYTES / rate
        self.seconds = 1 / rate

    def record(self, n_bytes: int, seconds: float) -> None:
        if n_bytes <= 0 or not seconds > 0:
            return
        keep = _MEMORY_BYTES / max(_MEMORY_BYTES, self._n_bytes)
        self._n_bytes = keep * self._n_bytes + n_bytes
        self._seconds = keep * self._seconds + seconds
        self.seconds = self._seconds / self._n_bytes


class Costs:
    """Measured seconds of evaluating and reading; sane guesses until something was measured.

    A token costs more the deeper it stands: its seconds are taken to grow in a line with its
    position, fitted to recent evaluations. One thread writes, any may read.
    """

    def __init__(self) -> None:
        # Sums over tokens: how many, position, its square, seconds, seconds times position.
        self._sums = (_PRIOR_TOKENS, 0.0, 0.0, _PRIOR_TOKENS * _TOKEN_SECONDS, 0.0)
        self._line = _TOKEN_SECONDS, 0.0
        self._read = _Rate(_READ_RATE)

    def evaluate(self, first: int, last: int) -> float:
        """Return the seconds to evaluate tokens [first, last)."""
        base, slope = self._line
        return (last - first) * (base + slope * (first + last) / 2)

    def load(self, n_bytes: int) -> float:
        """Return the seconds to copy ``n_bytes`` between RAM and the device."""
        return n_bytes * _LOAD_SECONDS

    def read(self, n_bytes: int) -> float:
        """Return the seconds to read ``n_bytes`` from disk into RAM, including the latency of one
        read.
        """
        return _READ_LATENCY + n_bytes * self._read.seconds

    def record_evaluated(self, first: int, last: int, seconds: float) -> None:
        """Record that tokens [first, last) took ``seconds``, with nothing else on the device."""
        n = last - first
        middle = (first + last) / 2
        if n <= 0 or not seconds > 0:
            return
        keep = _MEMORY_TOKENS / max(_MEMORY_TOKENS, self._sums[0])
        tokens, depth, square, total, product = (keep * value for value in self._sums)
        tokens = tokens + n
        depth = depth + n * middle
        square = square + n * middle**2
        total = total + seconds
        product = product + seconds * middle
        self._sums = tokens, depth, square, total, product
        # The ridge keeps a line through one depth flat.
        mean = depth / tokens
        spread = square / tokens - (depth / tokens) ** 2
        slope = max(
            (product / tokens - mean * total / tokens) / (spread + _DEPTH_SCALE**2 / 16), 0.0
        )
        base = total / tokens - slope * mean
        if base <= 0:  # the measurements attribute all of the time to depth
            base = total / tokens / 2
            slope = total / tokens / 2 / max(mean, 1.0)
        self._line = base, slope

    def record_read(self, n_bytes: int, seconds: float) -> None:
        """Record a read of ``n_bytes`` from disk in ``seconds``."""
        self._read.record(n_bytes, max(seconds - _READ_LATENCY, seconds / 8))
