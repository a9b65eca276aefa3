"""Calls that are a name and its arguments as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from pyctl.chat.call_formats.call_format import json_arguments
from pyctl.chat.call_formats.delimiters import CallDelimiters, CallHead
from pyctl.chat.call_formats.scan import (
    NeedMoreInput,
    starts_with,
)
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.tool_definitions import Tool, Tools

__all__ = ["NameDelimiters"]

_MAX_NAME_PART = 600

Part: TypeAlias = str | re.Pattern[str] | tuple["Part", ...] | None


@dataclass(frozen=True, kw_only=True)
class NameDelimiters(CallDelimiters):
    """A call is a name and its arguments as JSON. ``parts`` stand between ``open`` and the
    arguments: texts, None for the name, a pattern for an id, and tuples of parts that may be
    missing. The last may be missing in a reply.

    ``ids`` are the ids of calls: none, the text that the pattern matches, or all that stands before
    the last part. ``is_known`` if only the name of a tool makes it a call.
    """

    parts: tuple[Part, ...] = (None,)
    ids: Literal["", "pattern", "all"] = ""
    is_known: bool = False

    def other_openers(self, tools: Tools) -> Iterable[str]:
        """Return the opener of a single call."""
        return (self.open.strip(),) if self.begin else ()

    def head(self, text: str, pos: int) -> CallHead:
        """Return the head up to the arguments. Raises NeedMoreInput where ``text`` ends too
        early.
        """
        opening = self.open.strip()
        if not starts_with(opening, text, pos):
            return CallHead()
        pos += len(opening)
        end = text.find("{", pos, pos + _MAX_NAME_PART)
        if end < 0:
            if len(text) - pos < _MAX_NAME_PART and _is_one_word(text[pos:]):
                raise NeedMoreInput
            return CallHead()
        match = self._pattern.fullmatch(text[pos:end].strip())
        if match is None:
            return CallHead()
        call_id = match["all"]
        if self.ids != "all":
            call_id = self._id(match.groupdict().get("id"))
        return CallHead(
            name=match["name"],
            call_id=call_id,
            pos=end,
        )

    def _id(self, text: str | None) -> str:
        if not self.ids or not text:
            return ""
        for part in _flat(self.parts):
            if isinstance(part, re.Pattern):
                return text if part.fullmatch(text) else ""
        return ""

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        before = "".join(map(_matching, self.parts[:-1]))
        last = _matching((self.parts[-1],))
        return re.compile(f"(?P<all>{before}){last}", re.DOTALL)

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """Return the expression for a name and its arguments."""
        pieces = [grammar.text(self.open)]
        for part in self.parts:
            pieces.append(_written(grammar, part, tool.name))
        pieces.append(json_arguments(grammar, tool))
        pieces.append(grammar.text(self.close))
        return " ".join(filter(None, pieces))


def _is_one_word(text: str) -> bool:
    """Return whether ``text`` may be delimiters and a name, and is not a sentence."""
    second = text.split(maxsplit=2)[1:2]
    return not second or second[0][0] in "[<`"


def _flat(parts: Iterable[Part]) -> Iterator[Part]:
    for part in parts:
        if isinstance(part, tuple):
            yield from _flat(part)
        else:
            yield part


def _matching(part: Part) -> str:
    if isinstance(part, tuple):
        inner = "".join(map(_matching, part))
        return f"(?:{inner})?"
    if isinstance(part, re.Pattern):
        return r"\s*(?P<id>\w*)\s*"
    if part is None:
        return r"\s*(?P<name>[\w./:-]{1,256}?)\s*"
    text = re.escape(part.strip())
    return rf"\s*{text}\s*"


def _written(grammar: GrammarBuilder, part: Part, name: str) -> str:
    if isinstance(part, tuple):
        inner = " ".join(_written(grammar, piece, name) for piece in part)
        return f"({inner})?"
    if isinstance(part, re.Pattern):
        return f"/{part.pattern}/"
    if part is None:
        return grammar.quoted(name)
    return grammar.text(part)
