"""Regular expressions of JSON schemas (ECMA-262) as GBNF for the JSON strings that match them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

from pyctl.chat.grammar import literal, repeated
from pyctl.errors import RequestError

__all__ = ["string_of"]

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Code points, each range with both ends."""

_LAST = 0x10FFFF
_DEPTH = 100
_DIGIT = ((48, 57),)
_WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
_BLANK = ((9, 13), (32, 32), (160, 160), (0xFEFF, 0xFEFF))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _BLANK}
_CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_ESCAPED = '"\\\b\f\n\r\t'
"""Characters that a JSON string holds as a backslash and one more."""


class _Unsupported(Exception):
    """A regular expression without an equivalent grammar."""


def string_of(pattern: str, char: str) -> str | None:
    """What matches the JSON strings that ``pattern`` finds something in; ``char`` is the rule of one character.

    None if no grammar can say it (a look-around, a back reference); RequestError if it is no regular expression.
    """
    try:
        return rf'"\"" ({_Reader(pattern, char).read()}) "\""'
    except _Unsupported:
        return None


class _Reader:
    def __init__(self, pattern: str, char: str) -> None:
        self._pattern, self._char, self._at, self._depth = pattern, char, 0, 0

    def read(self) -> str:
        choices = []
        while True:
            before = "" if self._take("^") else f"{self._char}* "
            body = self._sequence()
            after = "" if self._take("$") else f" {self._char}*"
            choices.append(f"{before}{body}{after}")
            if self._at == len(self._pattern):
                return " | ".join(choices)
            if self._take(")"):
                self._fail("unbalanced parentheses")
            if not self._take("|"):
                raise _Unsupported  # an anchor in the middle

    def _fail(self, reason: str) -> NoReturn:
        raise RequestError(f"invalid pattern {self._pattern!r} in the JSON schema: {reason}")

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _next(self) -> str:
        letter = self._peek()
        if not letter:
            self._fail("it ends too soon")
        self._at += 1
        return letter

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _sequence(self) -> str:
        parts = []
        while (letter := self._peek()) and letter not in "|)^$":
            parts.append(self._quantified(self._atom()))
        return " ".join(parts) or '""'

    def _atom(self) -> str:
        letter = self._next()
        if letter == "(":
            return self._group()
        if letter == "[":
            return _one_of(self._class())
        if letter == ".":
            return _one_of(_all_but([(10, 10), (13, 13)]))
        if letter in "*+?":
            self._fail("nothing to repeat")
        if letter == "\\":
            return _one_of(self._escape(inside=False))
        return _one_of([(ord(letter), ord(letter))])

    def _group(self) -> str:
        if self._peek() == "?" and not self._take("?:"):
            raise _Unsupported
        self._depth += 1
        if self._depth > _DEPTH:
            raise _Unsupported
        choices = [self._sequence()]
        while self._take("|"):
            choices.append(self._sequence())
        if self._peek() and self._peek() in "^$":
            raise _Unsupported
        if not self._take(")"):
            self._fail("unbalanced parentheses")
        self._depth -= 1
        return f"({' | '.join(choices)})"

    def _quantified(self, atom: str) -> str:
        low, high = 1, 1
        start = self._at
        sign = self._peek()
        if sign and sign in "*+?":
            self._at += 1
            low, high = {"*": (0, -1), "+": (1, -1), "?": (0, 1)}[sign]
        elif self._take("{"):
            end = self._pattern.find("}", self._at)
            first, comma, last = self._pattern[self._at : end].partition(",") if end >= 0 else ("", "", "")
            if not _is_count(first) or (last and not _is_count(last)):
                raise _Unsupported
            self._at = end + 1
            low = int(first)
            high = (int(last) if last else -1) if comma else low
            if 0 <= high < low:
                self._fail("the ends of a quantifier are in the wrong order")
        if self._at == start:
            return atom
        self._take("?")  # as few as possible makes no difference to what matches
        return repeated(atom, low, None if high < 0 else high) or '""'

    def _class(self) -> Ranges:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            first = self._member()
            if len(first) == 1 and first[0][0] == first[0][1] and self._peek() == "-" and not self._take("-]"):
                self._at += 1
                last = self._member()
                if len(last) > 1 or last[0][1] < first[0][0]:
                    self._fail("a range in the wrong order")
                ranges.append((first[0][0], last[0][1]))
                continue
            ranges += first
            if self._pattern.startswith("-]", self._at - 2):
                ranges.append((45, 45))
                break
        return _all_but(ranges) if negated else ranges

    def _member(self) -> Ranges:
        letter = self._next()
        return self._escape(inside=True) if letter == "\\" else [(ord(letter), ord(letter))]

    def _escape(self, *, inside: bool) -> Ranges:
        letter = self._next()
        if letter.lower() in _CLASSES:
            ranges = _CLASSES[letter.lower()]
            return ranges if letter.islower() else _all_but(ranges)
        if letter in "xu":
            size = 2 if letter == "x" else 4
            digits = self._pattern[self._at : self._at + size]
            if len(digits) < size or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                raise _Unsupported
            self._at += size
            return [(int(digits, 16),) * 2]
        if letter == "b" and inside:
            return [(8, 8)]
        if letter in _CONTROLS:
            return [(_CONTROLS[letter],) * 2]
        if letter.isalnum():
            raise _Unsupported
        return [(ord(letter),) * 2]


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 4


def _all_but(ranges: Ranges) -> Ranges:
    left, kept = 0, []
    for first, last in sorted(ranges):
        if first > left:
            kept.append((left, first - 1))
        left = max(left, last + 1)
    return [*kept, (left, _LAST)] if left <= _LAST else kept


def _one_of(ranges: Ranges) -> str:
    """One character among ``ranges`` as a JSON string holds it."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return literal(json.dumps(chr(ranges[0][0]), ensure_ascii=False)[1:-1])
    special = [letter for letter in _ESCAPED if any(first <= ord(letter) <= last for first, last in ranges)]
    hidden = _all_but([*_all_but(ranges), (0, 31), (127, 127), *((ord(letter),) * 2 for letter in _ESCAPED)])
    choices = [f"[{''.join(_span(first, last) for first, last in hidden)}]"] if hidden else []
    choices += [literal(json.dumps(letter)[1:-1]) for letter in special]
    if not choices:
        raise _Unsupported  # nothing that a JSON string can hold unescaped
    return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"


def _span(first: int, last: int) -> str:
    return _code(first) + (f"-{_code(last)}" if last > first else "")


def _code(point: int) -> str:
    return chr(point) if chr(point).isascii() and chr(point).isalnum() else f"\\U{point:08X}"
