"""The KV pool: its settings, the placement of its rows, and counts of its transfers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pyctl.convert import integer
from pyctl.engine.selection import SelectSettings
from pyctl.setting import CONTEXT

__all__ = ["PoolPlan", "PoolSettings", "StreamCounts"]


@dataclass(frozen=True)
class PoolSettings:
    """Settings of the pool: ``n_pooled`` rows of all layers on the device, -1 as many as fit, 0 for no pool.

    ``select`` requires a pool; with ``n_pooled`` 0 it then has as many rows as fit.
    """

    n_pooled: int = CONTEXT.flag(
        0,
        "--kv-pool",
        "tokens of K and V on the device, off = the whole context, auto = as many as fit; attention "
        "reads the others from RAM; replies do not change",
        integer(1, auto=-1, off=0),
        "PYCTL_KV_POOL",
        "off|auto|TOKENS",
        shown="off",
    )
    select: SelectSettings = field(default_factory=SelectSettings)

    @property
    def is_wanted(self) -> bool:
        """Whether the settings request a pool."""
        return bool(self.n_pooled or self.select.n_selected)


COPY_RATE = 20e9
"""Assumed bytes per second from RAM to a device before a measurement: PCIe 4 x16."""

MIB = 2**20


class StreamCounts(NamedTuple):
    """Bytes of rows copied to the device for attention, and milliseconds that attention waited for them.

    With --kv-select also the selected chunks, pinned ones included, and how many of them were copied from RAM, both
    summed over layers and evaluations.
    """

    n_bytes: int = 0
    wait_ms: float = 0.0
    n_selected: int = 0
    n_fetched: int = 0

    def plus(self, more: StreamCounts) -> StreamCounts:
        """Return the sum of both."""
        return StreamCounts(
            self.n_bytes + more.n_bytes,
            self.wait_ms + more.wait_ms,
            self.n_selected + more.n_selected,
            self.n_fetched + more.n_fetched,
        )

    def since(self, before: StreamCounts) -> StreamCounts:
        """Return the difference to the earlier counts ``before``."""
        n_bytes, wait_ms, n_selected, n_fetched = before
        return self.plus(StreamCounts(-n_bytes, -wait_ms, -n_selected, -n_fetched))


@dataclass(frozen=True)
class PoolPlan:
    """Placement of the rows of ``n_rows`` tokens in ``n_layers`` attention layers with ``layer_bytes`` each.

    The rows of ``n_resident`` layers are on the device. Other layers are *streamed*: their rows are in RAM, and each
    evaluation copies layer after layer into one of ``n_stages`` device buffers of ``layer_bytes``. With ``select``, up
    to ``n_selecting`` generated tokens at once attend to selected rows only; this takes ``select_bytes`` on the device.
    """

    n_rows: int
    n_layers: int
    n_resident: int
    n_stages: int
    layer_bytes: int
    select: SelectSettings | None = None
    n_selecting: int = 0
    select_bytes: int = 0

    @classmethod
    def of(cls, n: int, n_rows: int, n_layers: int, layer_bytes: int) -> PoolPlan:
        """Return the plan with the most resident layers for a device with room for ``n`` layers, 1 at least."""
        n_stages = 0 if n >= n_layers else min(max(n, 1), 2)
        return cls(n_rows, n_layers, min(max(n, 1) - n_stages, n_layers), n_stages, layer_bytes)

    @property
    def n_streamed(self) -> int:
        """The number of layers with rows in RAM."""
        return self.n_layers - self.n_resident

    @property
    def resident(self) -> tuple[int, ...]:
        """Indices of the resident layers. Streamed layers are spread out, so that copies overlap with computation."""
        streamed = {(2 * i + 1) * self.n_layers // (2 * self.n_streamed) for i in range(self.n_streamed)}
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
        """Return the bytes copied to evaluate one batch after ``n`` tokens; with `select`, one of a prompt."""
        return self.host_bytes * n // self.n_rows

    def most_drafts(self, n: int, n_planes: int) -> int:
        """Return the limit of drafts, at most ``n``. With `select`, an item after a mark has up to limit + 1 sure
        tokens and ``n_planes`` drafts, which must fit into ``n_selecting``."""
        return n if self.select is None else max(min(n, self.n_selecting - 1 - n_planes), 0)

    def lines(self, rate: float = COPY_RATE) -> Iterator[str]:
        """Yield log lines with the cost of streaming at ``rate`` bytes per second; none without streamed layers."""
        if self.n_streamed:
            depths = [n for n in (32_768, 131_072) if n < self.n_rows] + [self.n_rows]
            speeds = (f"{_rounded(rate / self.pass_bytes(n))} at {n:,} tokens" for n in depths)
            yield (
                f"K and V of {self.n_streamed} of {self.n_layers} layers lie in RAM and are read for each token: "
                f"at {rate / 1e9:.0f} GB/s at most {', '.join(speeds)} (tokens/s)"
            )


def _rounded(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.1f}"
