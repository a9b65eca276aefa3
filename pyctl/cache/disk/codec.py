"""Codecs of stored parts: raw, or zstd after a rearrangement that groups similar bytes.

A part is divided into chunks of CHUNK bytes, each encoded alone, so that threads share the work; zstandard and numpy
release the GIL in every expensive step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias, Union

import numpy as np
import zstandard
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]

__all__ = ["CHUNK", "RAW", "Codec", "Coding", "choose", "chunks", "decode", "encode", "phase_of_blocks"]

Q8_BLOCK = 34
"""Bytes of a q8_0 block in ggml: an f16 scale and 32 signed quants (ggml-common.h: block_q8_0)."""

CHUNK = Q8_BLOCK * 4 * 30_840
"""Bytes coded at a time, just under 4 MiB; a multiple of every element's size, so that the phase never changes."""

LEVEL = 1
"""zstd's level: what these bytes give is in their entropy, and higher levels search for matches that are not there."""

SMALLEST = 4096
"""Parts below this stay raw."""

MIN_SAVING = 0.2
MIN_DECODE = 0.4e9
"""A codec pays when it saves this share and decodes this many bytes a second on one thread; else raw.

Floating-point rows and states save 11 to 17 % (bench/results/codec.md) and then read back two to three times slower
than raw: on the way to the first token the time counts for more.
"""

TIE = 0.005
"""A rearrangement has to save this share of the part over a simpler codec."""

SLICE, N_SLICES = Q8_BLOCK * 4 * 480, 16
"""The sample that is measured: about 1 MiB in up to 16 places."""


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


def encode(coding: Coding, chunk: Bytes) -> Data:
    """The stored form of one contiguous chunk."""
    if coding.codec == Codec.RAW:
        return chunk.data
    return zstandard.ZstdCompressor(level=LEVEL).compress(_shuffle(coding, chunk).data)


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


def choose(part: Bytes) -> Coding:
    """The coding that stores a sample of ``part`` smallest, among those that decode fast enough; raw if none pays."""
    if part.size < SMALLEST:
        return RAW
    sample = _sample(part)
    best, best_share = RAW, 1 - MIN_SAVING
    candidates = [Coding(Codec.ZSTD), Coding(Codec.PLANES2), Coding(Codec.PLANES4)]
    candidates.append(Coding(Codec.BLOCKS34, phase_of_blocks(sample)))
    out = np.empty_like(sample)
    for coding in candidates:
        stored = encode(coding, sample)
        share = len(stored) / sample.size
        if share > (best_share - TIE if best.codec else best_share):
            continue
        if sample.size / min(_seconds(coding, stored, out) for _ in range(2)) >= MIN_DECODE:
            best, best_share = coding, share
    return best


def phase_of_blocks(sample: Bytes) -> int:
    """Where q8_0 blocks would begin modulo 34: the high byte of a scale varies least."""
    columns = sample[: sample.size // Q8_BLOCK * Q8_BLOCK][: 2048 * Q8_BLOCK].reshape(-1, Q8_BLOCK)
    kinds = [np.count_nonzero(np.bincount(column, minlength=256)) for column in columns.T]
    return (int(np.argmin(kinds)) - 1) % Q8_BLOCK


def _seconds(coding: Coding, stored: Data, out: Bytes) -> float:
    began = time.perf_counter()
    decode(coding, stored, out)
    return time.perf_counter() - began


def _sample(part: Bytes) -> Bytes:
    if part.size <= SLICE * N_SLICES:
        return np.ascontiguousarray(part)
    step = (part.size - SLICE) // (N_SLICES - 1) // (Q8_BLOCK * 4) * (Q8_BLOCK * 4)
    return np.concatenate([part[i * step : i * step + SLICE] for i in range(N_SLICES)])


def _shuffle(coding: Coding, chunk: Bytes) -> Bytes:
    """The bytes of ``chunk`` in the order that compresses best, shape unchanged."""
    if coding.codec == Codec.ZSTD:
        return chunk
    out = np.empty_like(chunk)
    if coding.codec == Codec.BLOCKS34:
        first, m, last = _blocks(coding, chunk.size)
        blocks = chunk[first:last].reshape(m, Q8_BLOCK)
        out[: 32 * m].reshape(m, 32)[:] = blocks[:, 2:]
        out[32 * m : 33 * m], out[33 * m : 34 * m] = blocks[:, 0], blocks[:, 1]
        out[34 * m : 34 * m + first], out[34 * m + first :] = chunk[:first], chunk[last:]
        return out
    width = 2 if coding.codec == Codec.PLANES2 else 4
    m = chunk.size // width
    elements = chunk[: m * width].view(f"<u{width}")
    for i in range(width):
        # Shifting whole elements is several times faster than a strided copy of single bytes.
        out[i * m : (i + 1) * m] = (elements >> (8 * i)).astype(np.uint8)
    out[m * width :] = chunk[m * width :]
    return out


def _unshuffle(coding: Coding, plain: Bytes, out: Bytes) -> None:
    """The inverse of `_shuffle`."""
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
