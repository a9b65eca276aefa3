"""Grammars in llama.cpp's GBNF notation, put together rule by rule."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["Grammar", "literal", "none_of", "repeated"]

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9-]+")
_ESCAPES = str.maketrans({"\r": "\\r", "\n": "\\n", '"': '\\"', "\\": "\\\\"})
_CLASS_ESCAPES = str.maketrans({"\r": "\\r", "\n": "\\n", "\\": "\\\\", "]": "\\]", "-": "\\-", "^": "\\x5E"})


def literal(text: str) -> str:
    """What matches ``text`` itself."""
    return f'"{text.translate(_ESCAPES)}"'


def none_of(characters: Iterable[str], also: str = "") -> str:
    """What matches one character that is not among ``characters`` nor in ``also``, which is in class notation."""
    return f"[^{also}{''.join(characters).translate(_CLASS_ESCAPES)}]"


def repeated(item: str, low: int, high: int | None, separator: str = "") -> str:
    """``item`` from ``low`` to ``high`` times, None for any number; empty if that is 0."""
    if high == 0:
        return ""
    if separator:
        rest = repeated(f"({separator} {item})", max(low - 1, 0), None if high is None else high - 1)
        some = f"{item} {rest}".rstrip()
        return some if low else f"({some})?"
    if (low, high) in _SIGNS:
        return item + _SIGNS[low, high]
    return f"{item}{{{low},{'' if high is None else high}}}"


_SIGNS = {(0, 1): "?", (0, None): "*", (1, None): "+", (1, 1): ""}


class Grammar:
    """Named rules; the one called ``root`` is where a text begins.

    grammar = Grammar()
    answer = grammar.add("answer", '"yes" | "no"')
    grammar.add("root", f'"<" {answer} ">"')
    grammar.text()
    """

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}

    def add(self, name: str, body: str) -> str:
        """A rule that matches ``body``, and the name that it got: ``name`` unless another rule has it."""
        name = _NOT_A_NAME.sub("-", name)
        if self._rules.get(name) == body:
            return name
        name = self.reserve(name)
        self._rules[name] = body
        return name

    def reserve(self, name: str) -> str:
        """A name like ``name`` that no rule has, for a rule that refers to itself; `define` says what it matches."""
        wanted = name = _NOT_A_NAME.sub("-", name)
        number = 0
        while name in self._rules:
            number += 1
            name = f"{wanted}-{number}"
        self._rules[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Say what the reserved ``name`` matches."""
        self._rules[name] = body

    def until(self, name: str, word: str) -> str:
        """A rule for any text, also none, in which ``word`` does not occur.

        One rule per letter: what may follow when so many of ``word`` have just been read (Knuth, Morris, Pratt).
        """
        names = [self.reserve(name) for _ in word]
        for read, own in enumerate(names):
            steps: dict[str, int] = {}
            for letter in dict.fromkeys(word):
                text = word[:read] + letter
                if to := next(n for n in range(len(text), -1, -1) if text.endswith(word[:n])):
                    steps[letter] = to
            parts = [f"{literal(letter)} {names[to]}" for letter, to in steps.items() if to < len(word)]
            self._rules[own] = f"({' | '.join(parts)} | {none_of(steps)} {names[0]})?"
        return names[0]

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def text(self) -> str:
        """The whole grammar."""
        return "".join(f"{name} ::= {body}\n" for name, body in self._rules.items())
