"""Random quantised tensors, made by tiling one block of random bytes per type: gigabytes per second, little memory.

Only the quants are random. Scales are constant, so that every value is finite and has mean 0 and the wanted deviation.
Layouts: struct block_q4_K, block_q6_K and block_q8_0 of ggml-common.h.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from tools.generator.tensors import Q4_K, Q6_K, Q8_0, Tensor

__all__ = ["Tiles"]

# A prime number of blocks: two rows are equal only if they are that many blocks apart times their own length.
TILE_BLOCKS = 131_071

_SUB_SCALE = 8  # what each sub-block's integer scale (and minimum) is set to

_LAYOUT = {
    Q4_K: np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("quants", "u1", 128)]),
    Q6_K: np.dtype([("quants", "u1", 192), ("scales", "i1", 16), ("d", "<f2")]),
    Q8_0: np.dtype([("d", "<f2"), ("quants", "u1", 32)]),
}

# Q4_K packs eight 6-bit scales and eight 6-bit minima; small ones need the low bits of the first eight bytes for the
# sub-blocks 0 to 3, and a nibble each of the last four bytes for the others.
_Q4_K_SCALES = [_SUB_SCALE] * 8 + [_SUB_SCALE << 4 | _SUB_SCALE] * 4


def _uniform_deviation(levels: int) -> float:
    return float(np.sqrt((levels**2 - 1) / 12))


class Tiles:
    """Random tiles, one per quantised type, made once for a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tiles: dict[GGMLQuantizationType, np.ndarray[Any, Any]] = {}

    def fill(self, tensor: Tensor, deviation: float) -> Iterator[memoryview]:
        """The bytes of `tensor`, in pieces of at most one tile, with values of the given standard deviation.

        A piece is valid until the next one is asked for.
        """
        tile = self._tile(tensor.type)
        if tensor.type is Q4_K:
            tile["d"] = deviation / (_SUB_SCALE * _uniform_deviation(16))
            tile["dmin"] = tile["d"] * np.float16(7.5)
        elif tensor.type is Q6_K:
            tile["d"] = deviation / (_SUB_SCALE * _uniform_deviation(64))
        else:
            tile["d"] = deviation / _uniform_deviation(256)
        content = tile.view(np.uint8).data
        # Each tensor begins elsewhere in the tile, or all layers would be alike.
        start = zlib.crc32(tensor.name.encode()) % TILE_BLOCKS * tile.itemsize
        left = tensor.num_bytes
        while left:
            piece = content[start : start + left]
            yield piece
            left -= len(piece)
            start = 0

    def _tile(self, kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
        if (tile := self._tiles.get(kind)) is None:
            tile = self._tiles[kind] = np.zeros(TILE_BLOCKS, _LAYOUT[kind])
            random = np.random.default_rng([self._seed, kind])
            tile["quants"] = random.integers(0, 256, tile["quants"].shape, np.uint8)
            if kind is Q4_K:
                tile["scales"] = _Q4_K_SCALES
            elif kind is Q6_K:
                tile["scales"] = _SUB_SCALE
        return tile
