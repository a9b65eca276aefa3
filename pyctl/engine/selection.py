"""Sparse attention for generated tokens (--kv-select): settings, pinned ranges, and row counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyctl.convert import choice, integer
from pyctl.errors import RequestError
from pyctl.setting import CONTEXT

if TYPE_CHECKING:  # it imports numpy, which would slow --help
    from pyctl.prompt import Prompt

__all__ = ["BLOCK", "CHUNK", "Pins", "SelectSettings"]

CHUNK = 64
"""Tokens selected as one unit."""

BLOCK = 4
"""Keys averaged into one to score chunks. Fewer are more accurate and take more memory."""

Pins = tuple[tuple[int, int], ...]
"""Ranges of tokens [first, last), ascending, neither overlapping nor adjacent."""


@dataclass(frozen=True)
class SelectSettings:
    """A generated token attends to the first ``n_sinks`` and last ``n_tail`` tokens, and to ``n_selected`` between.

    These are the pinned chunks and, in each layer, the chunks that its queries score highest. ``n_selected`` 0 means
    full attention.
    """

    n_selected: int = CONTEXT.flag(
        0,
        "--kv-select",
        "tokens that each generated token attends to, in addition to --kv-sinks and --kv-tail, 0 = all; "
        "approximate: attention skips all but the best chunks of 64 tokens",
        integer(0),
        "PYCTL_KV_SELECT",
        "TOKENS",
    )
    n_sinks: int = CONTEXT.flag(
        64, "--kv-sinks", "with --kv-select: first tokens that attention always includes", integer(0), "PYCTL_KV_SINKS"
    )
    n_tail: int = CONTEXT.flag(
        256, "--kv-tail", "with --kv-select: last tokens that attention always includes", integer(0), "PYCTL_KV_TAIL"
    )
    pinned: str = CONTEXT.flag(
        "head",
        "--kv-pin",
        "with --kv-select: messages that attention always includes, up to half of its tokens: head (all "
        "before the second message) or none; requests add messages with kv_pin",
        choice("head", "none"),
        "PYCTL_KV_PIN",
        "head|none",
    )

    @property
    def n_chosen(self) -> int:
        """``n_selected`` rounded up to whole chunks."""
        return _whole(self.n_selected)

    @property
    def n_rows(self) -> int:
        """The most rows that a token attends to, excluding those of its own batch."""
        return _whole(self.n_sinks) + self.n_chosen + self.n_tail if self.n_selected else 0

    def pins(self, prompt: Prompt, asked: Iterable[tuple[int, int]] = ()) -> Pins:
        """Return the pinned ranges of a reply to ``prompt``, without sinks and tail: chunks of ``asked`` and the head.

        The head takes up to half of ``n_selected``, or the remaining room. RequestError if ``asked`` leaves no room for
        one selected chunk.
        """
        most, begin = self.n_chosen - CHUNK, _whole(self.n_sinks)
        ranges = _joined((max(first, begin), min(last, len(prompt))) for first, last in asked)
        n_pinned = _size(ranges)
        if n_pinned > max(most, 0):
            raise RequestError(
                f"'kv_pin' has {n_pinned} tokens in whole chunks of {CHUNK}: there is room for {max(most, 0)} "
                f"(--kv-select {self.n_selected})"
            )
        if self.pinned == "head" and prompt.boundaries:
            room = min(self.n_chosen // 2, most - n_pinned) // CHUNK * CHUNK
            ranges = _joined([*ranges, (begin, min(prompt.boundaries[0], begin + room))])
        return ranges


def _joined(ranges: Iterable[tuple[int, int]]) -> Pins:
    """Return the chunks that ``ranges`` touch, merged into as few ranges as possible."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if first >= last:
            continue
        first, last = first // CHUNK * CHUNK, _whole(last)
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def _size(ranges: Pins) -> int:
    return sum(last - first for first, last in ranges)


def _whole(n: int) -> int:
    return -(-n // CHUNK) * CHUNK
