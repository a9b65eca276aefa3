"""Calls that are a name and arguments as literals of a programming language."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyctl.chat.call_formats.delimiters import CALL_NAME, CallDelimiters, CallHead, either_word
from pyctl.chat.call_formats.scan import (
    NeedMoreInput,
    skip_blanks,
    starts_with,
)
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.tool_definitions import Tool, Tools

__all__ = ["LiteralDelimiters"]


@dataclass(frozen=True, kw_only=True)
class LiteralDelimiters(CallDelimiters):
    """A call is a name and arguments in ``round`` brackets as in Python, or in braces with bare
    keys. ``separator`` stands after the name of an argument; ``quotes`` around strings, which have
    escapes unless one is a tag.
    """

    round: bool = False
    separator: str = ":"
    quotes: tuple[str, ...] = ('"', "'")
    is_sorted: bool = False

    def other_openers(self, tools: Tools) -> Iterable[str]:
        """Return no openers: a name alone starts no call."""
        return ()

    def head(self, text: str, pos: int) -> CallHead:
        """Return the head up to the bracket around the arguments. Raises NeedMoreInput where
        ``text`` ends too early.
        """
        if self.open:
            opening = self.open.strip()
            if not starts_with(opening, text, pos):
                return CallHead()
            pos = skip_blanks(text, pos + len(opening))
        match = CALL_NAME.match(text, pos)
        end = match.end() if match is not None else pos
        if end == len(text) and end - pos < 256:
            raise NeedMoreInput
        name = ""
        if match is not None and text[end] == self.around[0]:
            name = match[0]
        return CallHead(
            name=name,
            call_id="",
            pos=end,
        )

    @property
    def around(self) -> tuple[str, str]:
        """The brackets around the arguments."""
        return ("(", ")") if self.round else ("{", "}")

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """Return the expression for a call with arguments in the order of the schema, or of their
        names with ``is_sorted``. Strings and words are bound, numbers and constants by their
        schema, objects and lists only to their form.
        """
        keys = sorted(tool.properties, key=str.lower) if self.is_sorted else tool.properties
        pairs = [(self._pair(grammar, tool, key), key in tool.required) for key in keys]
        comma = grammar.text(", " if self.round else ",")
        body = _in_order(grammar, pairs, comma)
        if not pairs and tool.parameters.get("additionalProperties") not in (None, False):
            name = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
            separator = grammar.text(self.separator)
            value = self._any(grammar)
            pair = f"{name} {separator} {value}"
            body = f"({pair} ({comma} {pair})*)?"
        opening = grammar.text(self.open)
        tool_name = grammar.quoted(tool.name)
        before = grammar.text(self.around[0])
        after = grammar.text(self.around[1] + self.close)
        return grammar.rule(f"{opening} {tool_name} {before} {body} {after}")

    def _pair(self, grammar: GrammarBuilder, tool: Tool, key: str) -> str:
        """Return the rule for the argument ``key`` and its value.

        Words of the schema are bound to their spelling, numbers and constants to JSON, also with
        Python's names in round brackets. Other values may be any literal.
        """
        types = tool.types(key)
        words = tool.words(key)
        if words:
            value = self._word(grammar, words)
        elif types <= {"integer", "number", "boolean", "null"}:
            value = grammar.json(tool.properties[key], tool.parameters)
            if self.round and not types.isdisjoint({"boolean", "null"}):
                value = f'({value} | "True" | "False" | "None")'
        else:
            value = self._string(grammar, is_argument=True)
            if types != {"string"}:
                value = f"({value} | {self._any(grammar)})"
        name = grammar.quoted(key)
        separator = grammar.text(self.separator)
        return grammar.rule(f"{name} {separator} {value}")

    def _word(self, grammar: GrammarBuilder, words: Sequence[str | None]) -> str:
        """Return the expression for one of ``words`` in quotes, or for null where it is one."""
        strings = [word for word in words if word is not None]
        if self.has_escapes:
            strings = [_escaped(word, self.quotes[0]) for word in strings]
        quote = grammar.text(self.quotes[0])
        either = either_word(grammar, strings)
        value = f"{quote} {either} {quote}"
        if None not in words:
            return value
        null = grammar.quoted("None" if self.round else "null")
        return f"({value} | {null})"

    @property
    def after_arguments(self) -> tuple[str, ...]:
        """The texts of which one follows the arguments in round brackets; none for braces, whose
        quotes are tags.
        """
        texts = (self.brackets[1].strip(), self.between.strip(), self.end.strip())
        return tuple(filter(None, texts)) if self.round else ()

    @property
    def has_escapes(self) -> bool:
        """True if a backslash in a string starts an escape."""
        return len(self.quotes[0]) == 1

    def _string(self, grammar: GrammarBuilder, *, is_argument: bool = False) -> str:
        """Return the expression for a string. Within the value of an argument, quotes that cannot
        end it are allowed: see `LiteralReader`.
        """
        if not self.has_escapes:
            tag = self.quotes[0]
            opening = grammar.text(tag)
            rest = grammar.until(tag)
            return f"{opening} {rest}"
        strings = []
        for quote in self.quotes:
            inner = rf"[^{quote}\\\n]|\\."
            end = quote
            if is_argument and self.after_arguments:
                inner = rf"{inner}|{quote}+[ \t]*([^{quote}\\\s,)\]}}]|\\.)"
                end = f"{quote}+"
            strings.append(f"/{quote}({inner})*{end}/")
        return grammar.one_of(strings)

    def _any(self, grammar: GrammarBuilder) -> str:
        """Return the expression for any value."""
        string = self._string(grammar)
        scalar = grammar.json({"type": ["number", "boolean", "null"]})
        key = string if self.has_escapes else r'/[^:{}\[\],"<>]{1,100}/'

        def value(itself: str) -> str:
            pair = f'{key} ":" " "? {itself}'
            mapping = f'"{{" ({pair} ("," " "? {pair})*)? "}}"'
            sequence = f'"[" ({itself} ("," " "? {itself})*)? "]"'
            return f"{string} | {scalar} | {mapping} | {sequence}"

        return grammar.recursive(value)


def _escaped(text: str, quote: str) -> str:
    """Return ``text`` as a string between such quotes has it."""
    inner = json.dumps(text, ensure_ascii=False)[1:-1]
    return inner.replace('\\"', '"').replace(quote, f"\\{quote}")


def _in_order(grammar: GrammarBuilder, pairs: Sequence[tuple[str, bool]], comma: str) -> str:
    """Return the expression for the members in this order, with commas between them. Those that are
    not required may be missing.
    """
    # `first` has no member before it, `following` has one.
    first = ""
    following = ""
    for pair, required in reversed(pairs):
        start = f"{pair} {following}".strip()
        mark = "" if required else "?"
        without = grammar.rule(f"{start} | {first}") if first else f"({start})?"
        first = start if required else without
        following = grammar.rule(f"({comma} {pair}){mark} {following}".strip())
    return first
