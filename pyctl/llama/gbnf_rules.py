"""The parsed form of a GBNF grammar: rules of characters, tokens, references and repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    "bare_rule",
    "inverse",
    "letter",
    "normal",
]

MAX_CODE_POINT = 0x10FFFF

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Inclusive ranges of code points, sorted, neither overlapping nor adjacent."""


class Characters(NamedTuple):
    """One code point of ``ranges``; matches nothing if they are empty."""

    ranges: Ranges


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


@dataclass(frozen=True)
class Rules:
    """The alternatives of each rule; ``root`` is the index of the start rule."""

    alternatives: list[list[Alternative]]
    root: int


def bare_rule(item: Item) -> int | None:
    """Return the rule that ``item`` refers to, once or repeatedly; None for none."""
    bare = item.item if isinstance(item, Repeat) else item
    return bare.rule if isinstance(bare, Reference) else None


_SURROGATES = (0xD800, 0xDFFF)


@lru_cache(maxsize=1024)
def letter(text: str) -> Characters:
    """Return the characters that match only ``text``, one character."""
    return Characters(normal([(ord(text), ord(text))]))


def normal(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return ``ranges`` sorted and merged, without NUL and surrogates, which valid text cannot contain."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted((max(low, 1), min(high, MAX_CODE_POINT)) for low, high in ranges):
        if low > high:
            continue
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    texts: list[tuple[int, int]] = []
    for low, high in joined:
        texts += [
            part
            for part in ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high))
            if part[0] <= part[1]
        ]
    return tuple(texts)


def inverse(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return all code points of valid text outside ``ranges``."""
    others, start = [], 1
    for low, high in normal(ranges):
        others.append((start, low - 1))
        start = high + 1
    return normal([*others, (start, MAX_CODE_POINT)])


ANY = normal([(1, MAX_CODE_POINT)])
