"""Image sizes in tokens, and the facts about a vision encoder in its file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from pyctl.errors import ModelError
from pyctl.llama.library.devices import file_head

__all__ = ["ImageGrid"]

MIN_TOKENS = 8
MAX_TOKENS = 4096
"""Default limits of Qwen's encoders."""


class ImageGrid(msgspec.Struct, frozen=True):
    """The sizes to which images are resized, as in libmtmd.

    Attributes:
        cell: The pixels of which width and height are multiples.
        given_limits: The minimum and maximum tokens set by flags, -1 for none.
        merge: The patches on each side of the square that becomes one token.
        width: The width of the encoder's layers.
        feed_forward: The width of their feed-forward part.
        n_heads: The attention heads of a layer.
    """

    cell: int
    given_limits: tuple[int, int] = (-1, -1)
    merge: int = 2
    width: int = 0
    feed_forward: int = 0
    n_heads: int = 0

    @classmethod
    def read(cls, path: Path, minimum: int = -1, maximum: int = -1) -> ImageGrid:
        """Read the grid of the encoder in a file. ModelError if it has none."""
        numbers = file_head(path).numbers

        def number(name: str, default: int = 0) -> int:
            return numbers.get(f"vision.{name}", (default,))[0]

        patch = number("patch_size")
        merge = number("spatial_merge_size", 2)
        if patch <= 0 or merge <= 0:
            raise ModelError(f"{path} is not a vision encoder")
        # llama.cpp ignores limits that are not positive.
        given = minimum if minimum > 0 else -1, maximum if maximum > 0 else -1
        sizes = (
            number(name)
            for name in ("embedding_length", "feed_forward_length", "attention.head_count")
        )
        return cls(patch * merge, given, merge, *sizes)

    @property
    def limits(self) -> tuple[int, int]:
        """The minimum and maximum tokens of an image."""
        minimum, maximum = self.given_limits
        return minimum if minimum > 0 else MIN_TOKENS, maximum if maximum > 0 else MAX_TOKENS

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's pixels: 3 float32 each."""
        return self.cell**2 * 3 * 4

    def compute_bytes(self, *, flash_attn: bool) -> int:
        """Return the approximate bytes of compute buffers for the largest image."""
        n_patches = self.limits[1] * self.merge**2
        in_singles = self.feed_forward + 3 * self.width + 4 * (self.cell // self.merge) ** 2
        in_halves = self.feed_forward + self.width  # operands of the largest matrix product
        n_bytes = n_patches * (4 * in_singles + 2 * in_halves)
        return n_bytes if flash_attn else n_bytes + 4 * self.n_heads * n_patches**2

    @property
    def largest(self) -> tuple[int, int]:
        """Width and height in pixels of an image with about the maximum number of tokens."""
        side = max(int(np.sqrt(self.limits[1])), 1) * self.cell
        return side, side

    def grid_size(self, width: int, height: int) -> tuple[int, int]:
        """Return (columns, lines) of tokens for an image of ``width`` x ``height`` pixels."""
        # Single precision, as in libmtmd, for equal rounding.
        cell = self.cell
        single = np.float32
        minimum, maximum = (n * cell * cell for n in self.limits)
        columns, lines = (
            max(int(np.floor(single(n) / single(cell) + single(0.5))), 1) for n in (width, height)
        )
        if columns * lines * cell * cell > maximum:
            shrink = np.sqrt(single(height) * single(width) / single(maximum))
            columns, lines = (
                max(int(np.floor(single(n) / shrink / single(cell))), 1) for n in (width, height)
            )
        elif columns * lines * cell * cell < minimum:
            grow = np.sqrt(single(minimum) / (single(height) * single(width)))
            columns, lines = (
                int(np.ceil(single(n) * grow / single(cell))) for n in (width, height)
            )
        return columns, lines
