"""Calls that are a name and arguments between tags."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pyctl.chat.call_formats.delimiters import CALL_NAME, CallDelimiters, CallHead, either_word
from pyctl.chat.call_formats.scan import (
    skip_blanks,
    starts_with,
    tag_name,
)
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.tool_definitions import Tool, Tools

__all__ = ["TagDelimiters"]

_LINE = r" /\n/?"
"""The line break that a model may write after a tag, or not."""

_MAX_ANY_ORDER = 5
"""Required arguments in any order: 5 take 32 rules; more of them come in the order of the schema.
"""


@dataclass(frozen=True, kw_only=True)
class TagDelimiters(CallDelimiters):
    """A call is a name and arguments between tags. ``name_end`` follows the name; ``key_open`` and
    ``key_end`` are around the name of an argument, then comes one of ``value_opens``, and
    ``value_end`` after the value.

    Of two ``value_opens``, the first starts a string, the second JSON. ``is_loose`` if a
    model may start a line after each tag, or not.
    """

    name_end: str = ""
    key_open: str
    key_end: str
    value_opens: tuple[str, ...] = ("",)
    value_end: str
    is_loose: bool = False

    def other_openers(self, tools: Tools) -> Iterable[str]:
        """Yield the openers of a single call, with the name of a function where its tag is
        ambiguous.
        """
        if self.begin and self.open.endswith(">"):
            yield self.open
        elif self.begin:
            yield from (f"{self.open}{tool.name}{self.name_end.strip()}" for tool in tools.tools)

    @property
    def has_lines(self) -> bool:
        """True if values are on separate lines."""
        return (self.key_end + self.value_opens[0]).endswith("\n")

    @property
    def after_value(self) -> tuple[str, ...]:
        """The tags of which one follows the end of a value."""
        delimiters = (self.key_open, self.close, self.end)
        return tuple(delimiter.strip() for delimiter in delimiters if delimiter)

    def head(self, text: str, pos: int) -> CallHead:
        """Return the head up to the first tag of an argument."""
        opening = self.open.strip()
        if not starts_with(opening, text, pos):
            return CallHead()
        pos += len(opening)
        name_end = self.name_end.strip()
        if name_end:
            name, pos = tag_name(text, pos, name_end)
            return CallHead(
                name=name,
                call_id="",
                pos=pos,
            )
        pos = skip_blanks(text, pos)
        name = ""
        match = CALL_NAME.match(text, pos)
        if match is not None:
            name = match[0]
            pos = skip_blanks(text, match.end())
        elif pos < len(text):
            return CallHead()
        for tag in self.after_value:
            if starts_with(tag, text, pos):
                return CallHead(
                    name=name,
                    call_id="",
                    pos=pos,
                )
        return CallHead()

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """Return the expression for a call between tags. A value is text up to the end tag where
        the schema allows a string, one of its words if it lists them, and JSON by its schema
        otherwise. Required arguments may have any order.
        """
        arguments = {key: self._argument(grammar, tool, key) for key in tool.properties}
        required = [arguments[key] for key in dict.fromkeys(tool.required)]
        others = [argument for key, argument in arguments.items() if key not in tool.required]
        has_others = tool.parameters.get("additionalProperties") not in (None, False)
        if not arguments and (has_others or tool.parameters.get("type", "object") != "object"):
            any_name = r"/[^<>\n]{1,100}/"
            others = [self._tagged(grammar, any_name, grammar.until(self.value_end))]
        any_other = ""
        if others:
            either = " | ".join(others)
            any_other = f"({either})*"
        if len(required) > _MAX_ANY_ORDER:
            in_order = " ".join(required)
            body = f"{in_order} {any_other}"
        else:
            body = _any_order(grammar, required, any_other)
        head = grammar.text(self.open)
        end = grammar.text(self.close)
        name = grammar.quoted(tool.name)
        name_end = grammar.text(self.name_end)
        if self.is_loose:
            name_end += _LINE
        return grammar.rule(f"{head} {name} {name_end} {body} {end}")

    def _argument(self, grammar: GrammarBuilder, tool: Tool, key: str) -> str:
        """Return the expression for the argument ``key``, bound by its schema."""
        name = grammar.quoted(key)
        end = grammar.text(self.value_end)
        words = tool.words(key)
        if words:
            either = either_word(grammar, words)
            return self._tagged(grammar, name, f"{either} {end}")
        if "string" in tool.types(key):
            return self._tagged(grammar, name, grammar.until(self.value_end, tool.grammar))
        value = grammar.json(tool.properties[key], tool.parameters)
        return self._tagged(grammar, name, f"{value} {end}", is_json=True)

    def _tagged(
        self, grammar: GrammarBuilder, key: str, value: str, *, is_json: bool = False
    ) -> str:
        """Return the expression for an argument; ``value`` includes the end tag."""
        line = _LINE if self.is_loose else ""
        key_open = grammar.text(self.key_open)
        key_end = grammar.text(self.key_end)
        value_open = grammar.text(self.value_opens[-1 if is_json else 0])
        return grammar.rule(f"{key_open} {key} {key_end}{line} {value_open} {value}{line}")


def _any_order(grammar: GrammarBuilder, required: Sequence[str], between: str) -> str:
    """Return the expression for each of ``required`` once, in any order, with ``between`` around
    them. It has one rule for each set of arguments that remain.
    """
    if not required:
        return between
    rules: dict[frozenset[int], str] = {frozenset(): between}
    subsets = [frozenset(_members(mask)) for mask in range(1, 2 ** len(required))]
    subsets.sort(key=len)
    for remaining in subsets:
        choices = []
        for index in sorted(remaining):
            rest = rules[remaining - {index}]
            choices.append(f"{required[index]} {rest}".rstrip())
        either = " | ".join(choices)
        rules[remaining] = grammar.rule(f"{between} ({either})".strip())
    return rules[subsets[-1]]


def _members(mask: int) -> list[int]:
    """Return the positions of the bits that are set in ``mask``."""
    return [index for index in range(mask.bit_length()) if mask >> index & 1]
