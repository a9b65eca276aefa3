"""JSON itself as rules of a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from pyctl.chat.grammar import Grammar, literal, none_of

__all__ = ["JsonRules", "constant"]

_JSON = {
    "space": r'| " " | "\n"{1,2} [ \t]{0,20}',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "integral": '"0" | [1-9] [0-9]{0,15}',
    "integer": '"-"? json-integral',
    "number": '"-"? json-integral ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,3})?',
    "char": r'[^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})',
    "string": r'"\"" json-char* "\""',
    "member": 'json-string ":" json-space json-value',
    "object": '"{" json-space (json-member ("," json-space json-member)*)? json-space "}"',
    "array": '"[" json-space (json-value ("," json-space json-value)*)? json-space "]"',
    "value": "json-object | json-array | json-string | json-number | json-boolean | json-null",
    "date": '[0-9]{4} "-" ("0" [1-9] | "1" [0-2]) "-" ("0" [1-9] | [1-2] [0-9] | "3" [0-1])',
    "time": (
        '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{3})?'
        ' ("Z" | [-+] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])'
    ),
    "date-time": 'json-date "T" json-time',
    "uuid": ' "-" '.join(f"[0-9a-fA-F]{{{n}}}" for n in (8, 4, 4, 4, 12)),
}
"""JSON itself (RFC 8259), with little white space, so that a model does not lose itself in it."""

_QUOTED = r'"\\\x7F\x00-\x1F'
_ESCAPES = {letter: literal(letter) for letter in '"\\/bfnrt'} | {"u": '"u" [0-9a-fA-F]{4}'}
_PART = re.compile("json-([a-z-]+)")


def constant(value: Any) -> str:
    """What matches ``value`` as JSON writes it."""
    return literal(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


class JsonRules:
    """Adds to ``grammar`` what is asked for, and what that needs, once."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar

    def rule(self, name: str) -> str:
        """The rule for ``name``: value, object, array, string, number, integer, boolean, null, char, space, date..."""
        rule = f"json-{name}"
        if rule not in self._grammar:
            self._grammar.add(rule, _JSON[name])
            for part in _PART.findall(_JSON[name]):
                self.rule(part)
        return rule

    def other_string(self, keys: Iterable[str], name: str) -> str:
        """A rule for any string that is none of ``keys``, made of one for each of their beginnings."""
        char = self.rule("char")
        words = {tuple(json.dumps(letter, ensure_ascii=False)[1:-1] for letter in key) for key in keys}
        next_letters: dict[tuple[str, ...], set[str]] = {word: set() for word in ((), *words)}
        for word in words:
            for size, letter in enumerate(word):
                next_letters.setdefault(word[:size], set()).add(letter)
        rules = {start: self._grammar.reserve(f"{name}-rest") for start in sorted(next_letters)}
        for start, letters in next_letters.items():
            longer = {letter: (*start, letter) for letter in sorted(letters)}
            parts = [f"{literal(letter)} {rules[word]}" for letter, word in longer.items()]
            parts.append(f"{none_of((x for x in letters if len(x) == 1), also=_QUOTED)} {char}*")
            escapes = [x for x in _ESCAPES if x not in {letter[1:2] for letter in letters}]
            parts.append(rf'"\\" ({" | ".join(_ESCAPES[x] for x in escapes)}) {char}*')
            self._grammar.define(rules[start], f"({' | '.join(parts)}){'' if start in words else '?'}")
        return self._grammar.add(name, rf'"\"" {rules[()]} "\""')
