"""Codecs of stored parts: all are written raw, and what earlier versions compressed is read.

Rows and states of real models keep 84 to 97 % of their size in the other codecs, and take ten times as long to read
back (bench/results/codec.md). A part is divided into chunks of CHUNK bytes, each coded alone, so that threads share
the reading; zstandard and numpy release the GIL in every expensive step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias, Union

import numpy as np
import zstandard
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

__all__ = ["CHUNK", "RAW", "Codec", "Coding", "chunks", "decode"]

Q8_BLOCK = 34
"""Bytes of a q8_0 block in ggml: an f16 scale and 32 signed quants (ggml-common.h: block_q8_0)."""

CHUNK = Q8_BLOCK * 4 * 30_840
"""Bytes coded at a time, just under 4 MiB; a multiple of every element's size, so that the phase never changes."""


class Codec(IntEnum):
    """The numbers are part of the file format."""

    RAW = 0
    ZSTD = 1
    PLANES2 = 2
    PLANES4 = 3
    BLOCKS34 = 4


@dataclass(frozen=True)
class Coding:
    """A codec and, for BLOCKS34, at which byte modulo 34 the blocks begin."""

    codec: Codec
    phase: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.phase < Q8_BLOCK:
            raise ValueError(f"phase {self.phase} is not in [0, {Q8_BLOCK})")


RAW = Coding(Codec.RAW)

Data: TypeAlias = Union[bytes, "memoryview[int]"]
"""Stored bytes of a chunk."""


def chunks(size: int, length: int = CHUNK) -> Iterator[tuple[int, int]]:
    """The ranges [first, last) of the chunks of ``size`` bytes."""
    for first in range(0, size, length):
        yield first, min(first + length, size)


def decode(coding: Coding, data: Data, out: Bytes) -> None:
    """Fill ``out`` from the stored form; ValueError if ``data`` is not that of a chunk of this size."""
    if coding.codec == Codec.RAW:
        if len(data) != out.size:
            raise ValueError(f"{len(data)} bytes instead of {out.size}")
        out[:] = np.frombuffer(data, np.uint8)
        return
    try:
        if zstandard.frame_content_size(data) != out.size:
            raise ValueError(f"a frame that does not hold {out.size} bytes")
        plain = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    _unshuffle(coding, np.frombuffer(plain, np.uint8), out)


def _unshuffle(coding: Coding, plain: Bytes, out: Bytes) -> None:
    """Fill ``out`` with the bytes of ``plain`` in the order of elements."""
    if coding.codec == Codec.ZSTD:
        out[:] = plain
        return
    if coding.codec == Codec.BLOCKS34:
        first, m, last = _blocks(coding, out.size)
        blocks = out[first:last].reshape(m, Q8_BLOCK)
        blocks[:, 2:] = plain[: 32 * m].reshape(m, 32)
        blocks[:, 0], blocks[:, 1] = plain[32 * m : 33 * m], plain[33 * m : 34 * m]
        out[:first], out[last:] = plain[34 * m : 34 * m + first], plain[34 * m + first :]
        return
    width = 2 if coding.codec == Codec.PLANES2 else 4
    m = out.size // width
    elements = out[: m * width].view(f"<u{width}")
    elements[:] = plain[(width - 1) * m : width * m]
    for i in reversed(range(width - 1)):
        _push(elements, plain[i * m : (i + 1) * m])
    out[m * width :] = plain[m * width :]


def _push(elements: NDArray[np.unsignedinteger], low: Bytes) -> None:
    np.left_shift(elements, 8, out=elements)
    np.bitwise_or(elements, low, out=elements)


def _blocks(coding: Coding, size: int) -> tuple[int, int, int]:
    first = min(coding.phase, size)
    m = (size - first) // Q8_BLOCK
    return first, m, first + m * Q8_BLOCK
