"""Seconds of batches and copies on a GPU: measured on an H200, published for an RTX 3090.

Sources: bench/results/gpu-batches.md of 1323d1c8 (batches of both shapes by size and depth),
bench/results/gpu-long.md (depth, and copies between RAM and the device). The RTX 3090: 673 to 993
tokens/s of a 27B below 32K tokens, 540 over 128K, 43 tokens/s in replies (published by its owners);
smaller batches as on the H200, in proportion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["DEVICES", "Device"]

BATCH = 512
"""llama.cpp's default of -ub."""


@dataclass(frozen=True)
class Device:
    """A model on a card.

    ``sizes`` and ``seconds`` are the single batches' after few tokens, ascending; each token takes
    ``per_row`` seconds more for each token before it. ``bandwidth`` is bytes per second between RAM
    and the device.
    """

    name: str
    sizes: Sequence[int]
    seconds: Sequence[float]
    per_row: float
    bandwidth: float

    def batch(self, n: int, n_before: int) -> float:
        """Return seconds for ``n`` tokens after ``n_before``."""
        maximum = self.sizes[-1]
        alone = (
            self.seconds[-1] * n / maximum
            if n > maximum
            else float(np.interp(n, self.sizes, self.seconds))
        )
        return alone + self.per_row * n * (n_before + n / 2)

    def prompt(self, first: int, last: int) -> float:
        """Return seconds for the tokens of a prompt from position ``first`` to ``last``, in batches
        of BATCH.
        """
        whole = sum(self.batch(BATCH, at) for at in range(first, last - BATCH + 1, BATCH))
        rest = (last - first) % BATCH
        return whole + (self.batch(rest, last - rest) if rest else 0.0)

    def copy(self, n_bytes: int) -> float:
        """Return seconds for ``n_bytes`` in either direction."""
        return n_bytes / self.bandwidth


_SIZES = (1, 32, 64, 128, 256, 384, 512, 1024, 2048)
_RELATIVE = (0.43, 0.62, 0.74, 0.90, 0.96, 1.0, 1.03, 1.08)
"""Tokens a second in batches of the sizes above 1, compared with batches of 512, on a 27B."""

DEVICES = (
    Device(
        "27B, H200",
        _SIZES,
        (0.0152, 0.030, 0.041, 0.067, 0.113, 0.155, 0.204, 0.403, 0.770),
        1.9e-9,
        27e9,
    ),
    Device(
        "35B-A3B, H200",
        _SIZES,
        (0.0065, 0.025, 0.041, 0.069, 0.077, 0.087, 0.094, 0.136, 0.217),
        0.75e-9,
        27e9,
    ),
    Device(
        "27B, RTX 3090",
        _SIZES,
        (1 / 43, *(n / (900 * part) for n, part in zip(_SIZES[1:], _RELATIVE, strict=True))),
        11.6e-9,
        20e9,
    ),
)
