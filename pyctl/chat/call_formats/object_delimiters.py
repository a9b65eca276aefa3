"""Calls that are JSON objects."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pyctl.chat.call_formats.call_format import json_arguments
from pyctl.chat.call_formats.delimiters import CallDelimiters, CallHead
from pyctl.chat.call_formats.scan import (
    json_head,
    skip_blanks,
    starts_with,
)
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.tool_definitions import Tool

__all__ = ["ObjectDelimiters"]


@dataclass(frozen=True, kw_only=True)
class ObjectDelimiters(CallDelimiters):
    """A call is a JSON object, which may start with an id under ``id_before``, or end with one
    under ``id_after``.

    Without a ``name_key`` its only member has the arguments, under the name. ``blanks`` stand
    before the name, before the arguments, and after them.
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    id_before: str = ""
    id_after: str = ""
    blanks: tuple[str, str, str] = ("", " ", "")

    def head(self, text: str, pos: int) -> CallHead:
        """Return the head up to the arguments. Other members may come before them."""
        name, pos = json_head(text, self.object_at(text, pos), self.arguments_key, self.name_key)
        return CallHead(
            name=name,
            call_id="",
            pos=pos,
        )

    def object_at(self, text: str, pos: int) -> int:
        """Return the position of the object of the call at ``pos``, after the opening delimiter if
        that is there.
        """
        opening = self.open.strip()
        if self.open and starts_with(opening, text, pos):
            pos = skip_blanks(text, pos + len(opening))
        return pos

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """Return the expression for a call whose arguments follow the schema as a whole."""
        name = grammar.quoted(json.dumps(tool.name, ensure_ascii=False))
        first, second, last = self.blanks
        name_key = first
        middle = grammar.text(": ")
        if self.name_key:
            name_key = f'{first}"{self.name_key}": '
            middle = grammar.text(f',{second}"{self.arguments_key}": ')
        head = grammar.text(f"{self.open}{{{name_key}")
        end = grammar.text(f"{last}}}{self.close}")
        if self.id_before:
            before = grammar.text(f'{self.open}{{"{self.id_before}": "')
            after = grammar.text(f'", {name_key}')
            head = f"{before} /[0-9]{{1,3}}/ {after}"
        if self.id_after:
            before = grammar.text(f', "{self.id_after}": "')
            after = grammar.text('"')
            end = f"{before} /[A-Za-z0-9]{{9}}/ {after} {end}"
        arguments = json_arguments(grammar, tool)
        return f"{head} {name} {middle} {arguments} {end}"
