"""Llama 3's calls: JSON that is the whole message, with or without a control token before it::

    {"name": "look_up", "parameters": {"city": "Paris"}}

Without the control token, JSON is a call only where the message starts, and of a known function.
Several calls may be parted by semicolons.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pyctl.chat.call_formats.call_format import TaggedFormat, json_arguments
from pyctl.chat.call_formats.scan import (
    CallScanner,
    NeedMoreInput,
    ValueEnd,
    json_head,
    skip_blanks,
    starts_with,
    whole_call,
)
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.template import SAMPLE_TOOL
from pyctl.chat.tool_definitions import Tool, Tools

__all__ = ["LlamaFormat"]

_TAG = "<|python_tag|>"
_MEMBERS = ('"name"', '"type"', '"parameters"', '"arguments"', '"id"')


class LlamaFormat(TaggedFormat):
    """The format of calls as JSON that is the whole message, as Llama 3.1 and its successors write
    them.
    """

    name = "Llama 3"
    control_tokens = (_TAG,)
    is_bare_json = True
    trigger = rf'^\s*(?:{re.escape(_TAG)})?\s*(\{{\s*"name")'
    _sample = re.compile(
        rf'<\|end_header_id\|>\s*(?:{re.escape(_TAG)})?\{{"name": "{SAMPLE_TOOL}", '
        rf'"parameters": \{{'
    )

    def call_parser(self, tools: Tools) -> CallScanner:
        """Return a scanner of calls as JSON."""
        return _Parser(tools, (_TAG, "{"))

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """Return the expression for a call as JSON."""
        name = grammar.quoted(json.dumps(tool.name, ensure_ascii=False))
        head = grammar.text('{"name": ')
        middle = grammar.text(', "parameters": ')
        end = grammar.text("}")
        return (
            f"({grammar.text(_TAG)})? {head} {name} {middle} {json_arguments(grammar, tool)} {end}"
        )


class _Parser(CallScanner):
    def __init__(self, tools: Tools, openers: Sequence[str]) -> None:
        super().__init__(tools, openers)
        self._json_end = ValueEnd()

    def _begin(self, final: bool) -> bool:
        tagged = self._held.startswith(_TAG)
        if not tagged and self._speaking:
            return False
        pos = skip_blanks(self._held, len(_TAG)) if tagged else 0
        if pos == len(self._held):
            raise NeedMoreInput
        return self._held[pos] == "{" and self._begin_json(pos)

    def _begin_json(self, pos: int) -> bool:
        first = skip_blanks(self._held, pos + 1)
        if not any(starts_with(member, self._held, first) for member in _MEMBERS):
            return False
        for key in ("parameters", "arguments"):
            name, begin = json_head(self._held, pos, key)
            if name and self._has(name):
                return self._start(name, begin, self._json)
        # The members come in another order, or it is not a call: only the whole text decides.
        end = self._json_end.find(self._held, pos)
        name, arguments = whole_call(self._held[pos:end]) if end >= 0 else ("", "")
        if not name or not self._has(name):
            return False
        self._start(name, end, self._tail)
        self._append(arguments)
        return True

    def _tail(self, final: bool) -> bool:
        rest = self._held.lstrip()
        if not rest and not final:
            return False
        if rest.startswith(";"):
            self._held = rest[1:]
        self._state = self._text
        return True
