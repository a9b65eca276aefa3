"""A pool of rows: its settings, where rows lie, and what attention has read."""

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
    """``n_pooled`` rows of all layers may lie on the device; -1 as many as fit, if not all do, and 0 is no pool.

    To ``select`` among rows takes a pool, of all that fit unless ``n_pooled`` says how many.
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
        """Whether there is to be a pool."""
        return bool(self.n_pooled or self.select.n_selected)


COPY_RATE = 20e9
"""Bytes a second from RAM to a device, for what is said before it can be measured: PCIe 4 with 16 lanes."""

MIB = 2**20


class StreamCounts(NamedTuple):
    """Bytes of rows that were copied to the device for attention to read, and milliseconds that it waited for them.

    With --kv-select also the chunks that were selected, pinned ones included, and those of them that were copied from
    RAM for it, both summed over layers and evaluations.
    """

    n_bytes: int = 0
    wait_ms: float = 0.0
    n_selected: int = 0
    n_fetched: int = 0

    def plus(self, more: StreamCounts) -> StreamCounts:
        """Both together."""
        return StreamCounts(
            self.n_bytes + more.n_bytes,
            self.wait_ms + more.wait_ms,
            self.n_selected + more.n_selected,
            self.n_fetched + more.n_fetched,
        )

    def since(self, before: StreamCounts) -> StreamCounts:
        """What came after ``before``."""
        n_bytes, wait_ms, n_selected, n_fetched = before
        return self.plus(StreamCounts(-n_bytes, -wait_ms, -n_selected, -n_fetched))


@dataclass(frozen=True)
class PoolPlan:
    """Rows of ``n_rows`` tokens in ``n_layers`` layers with attention, ``layer_bytes`` in each.

    Those of ``n_resident`` layers lie on the device. Those of the others, which are *streamed*, lie in RAM; in every
    evaluation one layer after the other is copied into one of ``n_stages`` stages, each as large as a layer. With
    ``select`` generated tokens, up to ``n_selecting`` at once, attend to a part of them only, which takes
    ``select_bytes`` more on the device.
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
        """With as many resident layers as there can be where the device has room for ``n`` of them, one at least."""
        n_stages = 0 if n >= n_layers else min(max(n, 1), 2)
        return cls(n_rows, n_layers, min(max(n, 1) - n_stages, n_layers), n_stages, layer_bytes)

    @property
    def n_streamed(self) -> int:
        """Layers whose rows lie in RAM."""
        return self.n_layers - self.n_resident

    @property
    def resident(self) -> tuple[int, ...]:
        """The numbers of the resident layers. Streamed ones are far apart, so that one is copied while others work."""
        streamed = {(2 * i + 1) * self.n_layers // (2 * self.n_streamed) for i in range(self.n_streamed)}
        return tuple(i for i in range(self.n_layers) if i not in streamed)

    @property
    def stage_bytes(self) -> int:
        """Bytes on the device through which rows pass."""
        return self.n_stages * self.layer_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, those of the stages too."""
        return self.n_resident * self.layer_bytes + self.stage_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in RAM."""
        return self.n_streamed * self.layer_bytes

    def pass_bytes(self, n: int) -> int:
        """Bytes that are copied to evaluate one batch behind ``n`` tokens, of a prompt if there is `select`."""
        return self.host_bytes * n // self.n_rows

    def most_drafts(self, n: int, n_planes: int) -> int:
        """How many of ``n`` drafts there may be: what is sure behind a mark may be as many tokens and one, and has as
        many drafts as there are planes."""
        return n if self.select is None else max(min(n, self.n_selecting - 1 - n_planes), 0)

    def lines(self, rate: float = COPY_RATE) -> Iterator[str]:
        """What streaming costs at ``rate`` bytes a second: nothing to say without it."""
        if self.n_streamed:
            depths = [n for n in (32_768, 131_072) if n < self.n_rows] + [self.n_rows]
            speeds = (f"{_rounded(rate / self.pass_bytes(n))} at {n:,} tokens" for n in depths)
            yield (
                f"K and V of {self.n_streamed} of {self.n_layers} layers lie in RAM and are read for each token: "
                f"at {rate / 1e9:.0f} GB/s at most {', '.join(speeds)} (tokens/s)"
            )


def _rounded(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 10 else f"{speed:.1f}"
