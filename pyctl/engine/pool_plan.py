"""The KV pool as a backend made it: where the rows of each layer are, and the price of reading
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["PoolPlan"]

COPY_RATE = 20e9
"""Assumed bytes per second from RAM to a device: PCIe 4 x16."""


@dataclass(frozen=True)
class PoolPlan:
    """Placement of the rows of ``n_rows`` tokens in ``n_layers`` attention layers with
    ``layer_bytes`` each.

    The rows of ``n_resident`` layers are on the device. Other layers are *streamed*: their rows are
    in RAM, and each evaluation copies layer after layer into one of ``n_stages`` device buffers of
    ``layer_bytes``.
    """

    n_rows: int
    n_layers: int
    n_resident: int
    n_stages: int
    layer_bytes: int

    @classmethod
    def for_layers(cls, n: int, n_rows: int, n_layers: int, layer_bytes: int) -> PoolPlan:
        """Return the plan with the most resident layers for a device with room for ``n`` layers, 1
        at least.
        """
        n_stages = 0 if n >= n_layers else min(max(n, 1), 2)
        return cls(n_rows, n_layers, min(max(n, 1) - n_stages, n_layers), n_stages, layer_bytes)

    @property
    def n_streamed(self) -> int:
        """The number of layers with rows in RAM."""
        return self.n_layers - self.n_resident

    @property
    def resident(self) -> tuple[int, ...]:
        """Indices of the resident layers. Streamed layers are spread out, so that copies overlap
        with computation.
        """
        streamed = {
            (2 * i + 1) * self.n_layers // (2 * self.n_streamed) for i in range(self.n_streamed)
        }
        return tuple(i for i in range(self.n_layers) if i not in streamed)

    @property
    def stage_bytes(self) -> int:
        """Bytes of the stages."""
        return self.n_stages * self.layer_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, including stages."""
        return self.n_resident * self.layer_bytes + self.stage_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in RAM."""
        return self.n_streamed * self.layer_bytes

    def pass_bytes(self, n: int) -> int:
        """Return the bytes copied to evaluate one batch after ``n`` tokens."""
        return self.host_bytes * n // self.n_rows

    def lines(self) -> Iterator[str]:
        """Yield log lines with the cost of streaming; none without streamed layers."""
        if self.n_streamed:
            depths = [n for n in (32_768, 131_072) if n < self.n_rows] + [self.n_rows]
            speeds = (f"{_rounded(COPY_RATE / self.pass_bytes(n))} at {n:,} tokens" for n in depths)
            yield (
                f"K and V of {self.n_streamed} of {self.n_layers} layers are in RAM and are read "
                "for each token: "
                f"at {COPY_RATE / 1e9:.0f} GB/s at most {', '.join(speeds)} (tokens/s)"
            )


def _rounded(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.1f}"
