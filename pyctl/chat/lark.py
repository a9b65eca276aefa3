"""Grammars of custom tools, Lark's or regular expressions, as one pattern for a JSON schema.

A pattern binds a string wherever a model writes it, escaped or not. A grammar that refers to itself has none.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pyctl.chat.json_schema import MAX_PATTERN, regular_pattern
from pyctl.errors import RequestError
from pyctl.limit import limit

__all__ = ["pattern_of"]

_MAX_DEFINITION = limit(16_384, "a grammar of a custom tool", "400", "request", "characters")
_MAX_DEPTH = 64

_BLANKS = re.compile(r"(?:\s|//[^\n]*)*")
_TOKEN = re.compile(
    r"(?P<name>[!?]?[A-Za-z_]\w*)|(?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)"
    r'|(?P<text>"(?:[^"\\\n]|\\.)*"i?)|(?P<sign>->|\.\.|%[a-z]+|[][:|()?*+~.,]|[0-9]+)'
)
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
"""Of Lark's own terminals, those that grammars import."""


def pattern_of(syntax: Any, definition: Any, at: str) -> str:
    """The pattern of all strings that ``definition`` describes; RequestError, which names ``at``, if there is none."""
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise RequestError(f"{at} must have a syntax, lark or regex, and a definition")
    if len(definition) > _MAX_DEFINITION:
        raise RequestError(f"{at}.definition has more than {_MAX_DEFINITION} characters")
    try:
        pattern = f"^(?:{definition if syntax == 'regex' else _Grammar(definition).rule('start', 0)})$"
        if regular_pattern(pattern) is None:
            raise RequestError("a look-around or a back reference is not supported")
    except RequestError as error:
        raise RequestError(f"{at}.definition: {error}") from error
    return pattern


class _Grammar:
    """Rules and terminals by name: the tokens of their bodies, then their patterns."""

    def __init__(self, definition: str) -> None:
        self._tokens = _tokens(definition)
        self._at = 0
        self._starts: dict[str, int] = {}
        self._patterns: dict[str, str | None] = {}
        tokens = self._tokens
        for index, (kind, text) in enumerate(tokens):
            if kind == "name" and self._is_rule(index):
                self._starts[text.lstrip("!?")] = index + (4 if tokens[index + 1][1] == "." else 2)
            elif text == "%import":
                self._import(index + 1)
            elif text.startswith("%"):
                raise RequestError(f"{text} is not supported")

    def _is_rule(self, index: int) -> bool:
        """Whether a rule begins there: ``name:``, or ``name.1:``."""
        signs = [text for _, text in self._tokens[index + 1 : index + 4]]
        return signs[:1] == [":"] or (signs[:1] == ["."] and signs[2:] == [":"])

    def _import(self, at: int) -> None:
        """``common.NAME``, or ``common (NAME, NAME)``."""
        words = [text for _, text in self._tokens[at : at + 64]]
        names = words[2:3] if words[1:2] == ["."] else [word for word in words[2:] if word != ","]
        names = names[: names.index(")")] if ")" in names else names[:1]
        if words[:1] != ["common"] or not names or not set(names) <= set(_COMMON):
            raise RequestError(f"%import of {' '.join(words[:3])[:80]} is not supported")
        self._patterns |= {name: _COMMON[name] for name in names}

    def rule(self, name: str, depth: int) -> str:
        """The pattern of a rule."""
        if name not in self._patterns:
            if name not in self._starts:
                raise RequestError(f"{name[:80]!r} is not defined")
            self._patterns[name] = None
            back, self._at = self._at, self._starts[name]
            self._patterns[name] = self._alternatives(depth + 1)
            if not self._ends():
                raise RequestError(f"{self._tokens[self._at][1][:80]!r} in {name[:80]!r} is not supported")
            self._at = back
        pattern = self._patterns[name]
        if pattern is None:
            raise RequestError(f"{name[:80]!r} refers to itself; only grammars without recursion are supported")
        return pattern

    def _ends(self) -> bool:
        at = self._at
        return at == len(self._tokens) or self._is_rule(at) or self._tokens[at][1] == "%import"

    def _takes(self, *signs: str) -> str:
        """The next token if it is one of ``signs``, which is passed; empty if it is not."""
        kind, text = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        if kind != "sign" or text not in signs:
            return ""
        self._at += 1
        return text

    def _alternatives(self, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise RequestError("it is nested too deeply")
        found = [self._sequence(depth)]
        n = len(found[0])
        while self._takes("|"):
            found.append(self._sequence(depth))
            n = _checked_size(n + len(found[-1]) + 1)
        return f"(?:{'|'.join(found)})" if len(found) > 1 else found[0]

    def _sequence(self, depth: int) -> str:
        pattern = ""
        while not self._ends() and (atom := self._atom(depth)) is not None:
            pattern += atom
            _checked_size(len(pattern))
        if self._takes("->"):
            self._at += 1  # the name of an alternative
        return pattern

    def _atom(self, depth: int) -> str | None:
        kind, text = self._tokens[self._at]
        if kind == "sign" and text not in ("(", "["):
            return None
        self._at += 1
        if kind == "name":
            atom = self.rule(text, depth)
        elif kind != "sign":
            atom = _literal(kind, text)
        else:
            atom = self._alternatives(depth + 1)
            if not self._takes("]" if text == "[" else ")"):
                raise RequestError(f"{text} is not closed")
            atom = f"(?:{atom})?" if text == "[" else atom
        if sign := self._takes("?", "*", "+"):
            return f"(?:{atom}){sign}"
        return atom


def _checked_size(n: int) -> int:
    if n > MAX_PATTERN:
        raise RequestError(f"its pattern has more than {MAX_PATTERN} characters")
    return n


def _tokens(definition: str) -> list[tuple[str, str]]:
    found, at = [], _end_of_blanks(definition, 0)
    while at < len(definition):
        token = _TOKEN.match(definition, at)
        if token is None:
            raise RequestError(f"cannot read {definition[at : at + 40]!r}")
        found.append((str(token.lastgroup), token.group()))
        at = _end_of_blanks(definition, token.end())
    return found


def _end_of_blanks(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    return blanks.end() if blanks is not None else at


def _literal(kind: str, text: str) -> str:
    """The pattern of a text in quotes, or of a regular expression between slashes."""
    body, _, flags = text[1:].rpartition(text[0])
    if kind == "text":
        try:
            body = re.sub(r"[][\\.^$*+?(){}|]", r"\\\g<0>", json.loads(f'"{body}"', strict=False))
        except ValueError:
            raise RequestError(f"cannot read {text[:80]}") from None
    else:
        body = re.sub(r"\\(.)", lambda found: "/" if found[1] == "/" else found[0], body)
    if not set(flags) <= set("is"):
        raise RequestError(f"flags other than i and s are not supported: {text[:80]}")
    return f"(?{flags}:{body})"
