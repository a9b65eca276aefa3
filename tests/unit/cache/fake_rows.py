"""Rows and windows that a cache counts, without a device that has them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyctl.cache.snapshot import Block

__all__ = ["FakeHeldRows", "FakeWindow"]


@dataclass(eq=False)
class FakeHeldRows:
    """Rows that a device without any cells pretends to hold."""

    n_cells: int
    n_bytes: int


@dataclass(frozen=True)
class FakeWindow:
    """A window of these blocks."""

    blocks: tuple[Block, ...]

    def joined(self, head: Block) -> Block:
        return np.concatenate([head, *self.blocks])
