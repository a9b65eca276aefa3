"""What the engine and the cache know of a request: token ids and the places where messages begin."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyctl.image_file import ImageFile

__all__ = ["Picture", "Prompt", "Tokens", "as_tokens", "common_prefix"]

Tokens: TypeAlias = NDArray[np.int32]
"""Token ids, shape (n,), read-only once they are part of a Prompt. Those of an image are negative."""


def as_tokens(values: ArrayLike) -> Tokens:
    """A contiguous, read-only int32 copy of ``values``, shape (n,)."""
    tokens = np.array(values, dtype=np.int32, ndmin=1)
    if tokens.ndim != 1:
        raise ValueError(f"tokens must have one dimension, not {tokens.ndim}")
    tokens.flags.writeable = False
    return tokens


BLOCK = 4096
"""Tokens compared at a time, so that prompts that part early cost little."""


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many leading tokens ``a`` and ``b`` share."""
    # Bytes are compared without letting go of the interpreter, as numpy does for each block: on the engine's thread,
    # getting it back from a busy thread takes longer than all the comparing.
    n = min(a.size, b.size)
    for start in range(0, n, BLOCK):
        low, high = start, min(start + BLOCK, n)
        if a[low:high].tobytes() == b[low:high].tobytes():
            continue
        while high - low > 1:  # the first difference is in [low, high)
            middle = (low + high) // 2
            if a[low:middle].tobytes() == b[low:middle].tobytes():
                low = middle
            else:
                high = middle
        return low
    return int(n)


@dataclass(frozen=True, eq=False)
class Picture:
    """An image in a prompt, from token ``start`` on: ``columns`` times ``lines`` tokens, line by line.

    Images with the same ``key`` are the same to the model; ``source`` is the file.
    """

    key: bytes
    columns: int
    lines: int
    source: ImageFile = field(repr=False)
    start: int = 0

    @property
    def n_tokens(self) -> int:
        """How many tokens of the prompt it takes."""
        return self.columns * self.lines

    @property
    def end(self) -> int:
        """The token count after it."""
        return self.start + self.n_tokens

    @cached_property
    def tokens(self) -> Tokens:
        """What stands for it in the prompt, shape (n_tokens,): ids below -1, made of the key."""
        drawn = np.frombuffer(hashlib.shake_128(self.key).digest(4 * self.n_tokens), np.dtype("<u4"))
        ids = (drawn | np.uint32(1 << 31)).view(np.int32)
        return as_tokens(np.where(ids == -1, np.int32(-2), ids))


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids of one request, and the places in it at which prompts may part.

    ``boundaries`` are token counts at which a message begins, ascending, each in (0, len(tokens)); the generation
    header, where there is one, is the last. Wrong boundaries raise ValueError. ``headers`` are those at which the
    assistant begins; None if the template does not show them. ``turn`` is the header of the reply to the user's last
    message, whatever tools said since; 0 if unknown. ``line_ends`` are token counts at which a line ends, ascending, in
    raw text: before the first message.
    """

    tokens: Tokens
    boundaries: tuple[int, ...] = ()
    headers: tuple[int, ...] | None = None
    turn: int = 0
    pictures: tuple[Picture, ...] = ()
    line_ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        previous = 0
        for boundary in self.boundaries:
            if not previous < boundary < self.tokens.size:
                raise ValueError(f"boundary {boundary} is not ascending within (0, {self.tokens.size})")
            previous = boundary
        end = 0
        for picture in self.pictures:
            if picture.start < end or not np.array_equal(self.tokens[picture.start : picture.end], picture.tokens):
                raise ValueError(f"no image of these tokens at {picture.start}")
            end = picture.end

    @classmethod
    def of(cls, tokens: ArrayLike, boundaries: Iterable[int] = ()) -> Prompt:
        """A prompt from anything that looks like a list of ids; boundaries are sorted and deduplicated."""
        ids = as_tokens(tokens)
        return cls(ids, tuple(sorted({int(b) for b in boundaries if 0 < b < ids.size})))

    @property
    def end(self) -> int:
        """Where the generation header begins, or the whole length without boundaries."""
        return self.boundaries[-1] if self.boundaries else len(self)

    @property
    def opening(self) -> int:
        """Where the first reply begins, after a head and a message; 0 if unknown.

        A task in one message alone has none: it grows within.
        """
        return self.headers[0] if self.headers and self.headers[0] > self.boundaries[0] else 0

    def first(self, n: int) -> Prompt:
        """The first ``n`` tokens of it, with what lies within them; no image that does not end there."""
        n = next((picture.start for picture in self.pictures if picture.start < n < picture.end), n)
        return Prompt(
            as_tokens(self.tokens[:n]),
            tuple(boundary for boundary in self.boundaries if boundary < n),
            None if self.headers is None else tuple(header for header in self.headers if header < n),
            self.turn if self.turn < n else 0,
            tuple(picture for picture in self.pictures if picture.end <= n),
            tuple(end for end in self.line_ends if end <= n),
        )

    def picture_at(self, n: int) -> Picture | None:
        """The image that token ``n`` belongs to."""
        at = bisect.bisect_right(self.pictures, n, key=lambda picture: picture.start)
        picture = self.pictures[at - 1] if at else None
        return picture if picture is not None and n < picture.end else None

    def is_inside(self, n: int) -> bool:
        """Whether tokens ``n`` - 1 and ``n`` belong to one image."""
        picture = self.picture_at(n)
        return picture is not None and picture.start < n

    def __len__(self) -> int:
        return int(self.tokens.size)
