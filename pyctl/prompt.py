"""Prompts as the engine and the cache see them: token ids and the boundaries of messages."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyctl.files.image_file import ImageFile

__all__ = ["ImageSpan", "Prompt", "PromptSections", "Tokens", "as_tokens", "common_prefix"]

Tokens: TypeAlias = NDArray[np.int32]
"""Token ids, shape (n,), read-only once they are part of a Prompt. Ids of image tokens are
negative.
"""


def as_tokens(values: ArrayLike) -> Tokens:
    """Return a contiguous, read-only int32 copy of ``values``, shape (n,). Raises ValueError for
    more dimensions.
    """
    tokens = np.array(values, dtype=np.int32, ndmin=1)
    if tokens.ndim != 1:
        raise ValueError(f"tokens must have one dimension, not {tokens.ndim}")
    tokens.flags.writeable = False
    return tokens


BLOCK = 4096
"""Tokens per comparison, so that prompts that differ early compare fast."""


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return the number of leading tokens that ``a`` and ``b`` share."""
    # `tobytes` keeps the GIL. numpy's comparison releases it for each block, and on the engine's
    # thread reacquiring it from a busy thread takes longer than the comparison.
    n = min(a.size, b.size)
    for start in range(0, n, BLOCK):
        low = start
        high = min(start + BLOCK, n)
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
class ImageSpan:
    """An image in a prompt that starts at token ``start`` and takes ``columns`` times ``lines``
    tokens, row-major.

    Images with the same ``key`` are equal to the model. ``source`` is the file.
    """

    key: bytes
    columns: int
    lines: int
    source: ImageFile = field(repr=False)
    start: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens that the image takes."""
        return self.columns * self.lines

    @property
    def end(self) -> int:
        """The token count after the image."""
        return self.start + self.n_tokens

    @cached_property
    def tokens(self) -> Tokens:
        """Placeholder ids of the image, shape (n_tokens,), all below -1: SHAKE-128 of the key."""
        drawn = np.frombuffer(
            hashlib.shake_128(self.key).digest(4 * self.n_tokens), np.dtype("<u4")
        )
        ids = (drawn | np.uint32(1 << 31)).view(np.int32)
        return as_tokens(np.where(ids == -1, np.int32(-2), ids))


SECTION_BYTES = 8
"""Bytes of the digest of a section."""


@dataclass(frozen=True)
class PromptSections:
    """Digests of the sections that a chat request consists of, without their text.

    Two requests with equal digests have the same section. ``messages`` are the digests of all
    messages after the system message, `SECTION_BYTES` each. ``variables`` are the template's.

    Attributes:
        tools: The digest of the tools, empty without any.
        system: The digest of the system message, empty without one.
        variables: The digest of the variables of the template.
        messages: The digests of the other messages, in their order.
        n_replies: How many of these messages are the assistant's.
    """

    tools: bytes
    system: bytes
    variables: bytes
    messages: bytes
    n_replies: int = 0

    @property
    def n_messages(self) -> int:
        """The number of messages after the system message."""
        return len(self.messages) // SECTION_BYTES

    @property
    def head(self) -> bytes:
        """The digests of the tools and of the system message."""
        return self.tools + b"/" + self.system

    @property
    def first_message(self) -> bytes:
        """The digest of the first message after the system message; empty without one."""
        return self.messages[:SECTION_BYTES]

    @property
    def conversation(self) -> bytes:
        """The digests by which a conversation is recognised, those of its head and of its first
        message; empty without a message.
        """
        return self.head + self.first_message if self.messages else b""

    def n_equal_messages(self, other: PromptSections) -> int:
        """Return how many leading messages both have."""
        n = min(self.n_messages, other.n_messages)
        for number in range(n):
            place = slice(number * SECTION_BYTES, (number + 1) * SECTION_BYTES)
            if self.messages[place] != other.messages[place]:
                return number
        return n


@dataclass(frozen=True, eq=False)
class Prompt:
    """The token ids of one request, and the positions at which prompts may diverge.

    ``boundaries`` are token counts at which a message starts, ascending, each in (0, len(tokens));
    the last one is the generation header, if there is one. ``headers`` are the boundaries at which
    the assistant starts; None if the template does not show them. ``turn`` is the header of the
    reply to the user's last message, before any tool results; 0 if unknown. The first ``n_raw``
    tokens are raw text, which may be edited anywhere. ``sections`` are digests of the chat request
    that the prompt was rendered from, None for raw text. Raises ValueError for boundaries out of
    order or out of range.
    """

    tokens: Tokens
    boundaries: tuple[int, ...] = ()
    headers: tuple[int, ...] | None = None
    turn: int = 0
    pictures: tuple[ImageSpan, ...] = ()
    n_raw: int = 0
    sections: PromptSections | None = None

    def __post_init__(self) -> None:
        previous = 0
        for boundary in self.boundaries:
            if not previous < boundary < self.tokens.size:
                raise ValueError(
                    f"boundary {boundary} is not ascending within (0, {self.tokens.size})"
                )
            previous = boundary
        end = 0
        for picture in self.pictures:
            if picture.start < end or not np.array_equal(
                self.tokens[picture.start : picture.end], picture.tokens
            ):
                raise ValueError(f"no image of these tokens at {picture.start}")
            end = picture.end

    @classmethod
    def from_ids(cls, tokens: ArrayLike, boundaries: Iterable[int] = ()) -> Prompt:
        """Return a prompt of any sequence of ids; boundaries are sorted and deduplicated."""
        ids = as_tokens(tokens)
        return cls(ids, tuple(sorted({int(b) for b in boundaries if 0 < b < ids.size})))

    @property
    def is_raw(self) -> bool:
        """True for text without messages and images, which may change anywhere."""
        return not (self.boundaries or self.pictures)

    @property
    def end(self) -> int:
        """Position of the generation header; the whole length if there are no boundaries."""
        return self.boundaries[-1] if self.boundaries else len(self)

    @property
    def opening(self) -> int:
        """Position of the first reply; 0 if unknown, or if no message precedes the first header.

        A prompt of one message is a task whose conversation grows inside the message.
        """
        return self.headers[0] if self.headers and self.headers[0] > self.boundaries[0] else 0

    def first(self, n: int) -> Prompt:
        """Return the first ``n`` tokens, or fewer so as not to split an image, with the boundaries
        and images within them.
        """
        n = next((picture.start for picture in self.pictures if picture.start < n < picture.end), n)
        return Prompt(
            as_tokens(self.tokens[:n]),
            tuple(boundary for boundary in self.boundaries if boundary < n),
            None
            if self.headers is None
            else tuple(header for header in self.headers if header < n),
            self.turn if self.turn < n else 0,
            tuple(picture for picture in self.pictures if picture.end <= n),
            min(self.n_raw, n),
        )

    def image_at(self, n: int) -> ImageSpan | None:
        """Return the image that contains token ``n``, if any."""
        index = bisect.bisect_right(self.pictures, n, key=lambda picture: picture.start)
        picture = self.pictures[index - 1] if index else None
        return picture if picture is not None and n < picture.end else None

    def is_inside(self, n: int) -> bool:
        """Return whether tokens ``n`` - 1 and ``n`` belong to one image."""
        picture = self.image_at(n)
        return picture is not None and picture.start < n

    def __len__(self) -> int:
        return int(self.tokens.size)
