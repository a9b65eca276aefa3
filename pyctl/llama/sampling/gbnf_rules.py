"""The parsed form of a GBNF grammar: rules of characters, tokens, references and repetitions."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

__all__ = [
    "ANY",
    "MAX_CODE_POINT",
    "Alternative",
    "Characters",
    "Item",
    "Ranges",
    "Reference",
    "Repeat",
    "Rules",
    "Token",
    "in_text",
    "letter",
]

MAX_CODE_POINT = 0x10FFFF

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Inclusive ranges of code points that text may have, sorted."""


class Characters(NamedTuple):
    """A terminal for one code point of ``ranges``, or with ``other`` for one outside of them that
    text may have.
    """

    ranges: Ranges
    other: bool = False


class Token(NamedTuple):
    """The token ``number``, or with ``other`` any token except it."""

    number: int
    other: bool


class Reference(NamedTuple):
    """The rule with this index."""

    rule: int


class Repeat(NamedTuple):
    """``item`` from ``low`` to ``high`` times, None for any number."""

    item: Reference | Characters | Token
    low: int
    high: int | None


Item: TypeAlias = "Characters | Token | Reference | Repeat"
Alternative: TypeAlias = "list[Item]"
Rules: TypeAlias = "list[list[Alternative]]"
"""The alternatives of each rule."""


_TEXT = ((1, 0xD7FF), (0xE000, MAX_CODE_POINT))
"""The characters of valid text: neither NUL nor surrogates."""


@lru_cache(maxsize=1024)
def letter(text: str) -> Characters:
    """Return the characters that match only ``text``, one character."""
    return Characters(in_text([(ord(text), ord(text))]))


def in_text(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the parts of ``ranges`` that text may have."""
    parts = ((max(low, first), min(high, last)) for low, high in ranges for first, last in _TEXT)
    return tuple(sorted({(low, high) for low, high in parts if low <= high}))


ANY = Characters((), other=True)
