"""Mistral's calls, which begin with a control token: a list as JSON, or a name and its arguments::

    [TOOL_CALLS][{"name": "look_up", "arguments": {"city": "Paris"}, "id": "Ab3dEf7hI"}]

    [TOOL_CALLS]look_up[CALL_ID]Ab3dEf7hI[ARGS]{"city": "Paris"}

Both are read, whatever the template writes; the id may be missing. The templates take ids of nine letters and digits
only, so that calls get no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

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
from pyctl.chat.reply import BRACKETS, SEED, THINK
from pyctl.chat.template import SAMPLE_TOOL
from pyctl.chat.tools import Tool, Tools
from pyctl.text import random_id

__all__ = ["MistralFormat", "MistralListFormat"]

_CALLS, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w./:-]{1,256}")
_ID = re.compile(r"[A-Za-z0-9]*")
_ID_LETTERS = 9


class MistralFormat(TaggedFormat):
    """Names and arguments, as the templates of 2025 write them."""

    name = "Mistral (name and arguments)"
    reasoning = tuple(replace(tags, interrupts=(_CALLS,)) for tags in (BRACKETS, THINK, SEED))
    control_tokens = (_CALLS, _CALL_ID, _ARGS, BRACKETS.open, BRACKETS.close)
    trigger = f"({re.escape(_CALLS)})"
    _sample: ClassVar[re.Pattern[str]] = re.compile(
        rf"{re.escape(_CALLS)}\s*{SAMPLE_TOOL}({re.escape(_CALL_ID)}\w+)?{re.escape(_ARGS)}"
    )

    def call_parser(self, tools: Tools, new_id: Callable[[], str] = random_id) -> CallScanner:
        """Reads both forms."""
        return _Parser(tools, (_CALLS,), lambda: new_id()[:_ID_LETTERS])

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """A name and its arguments."""
        call_id = f"({grammar.text(_CALL_ID)} /[A-Za-z0-9]{{{_ID_LETTERS}}}/)?"
        head = f"{grammar.text(_CALLS)} {grammar.quoted(tool.name)} {call_id} {grammar.text(_ARGS)}"
        return f"{head} {json_arguments(grammar, tool)}"


class MistralListFormat(MistralFormat):
    """A list as JSON, as the templates of 2024 write it."""

    name = "Mistral (list)"
    _sample = re.compile(rf'{re.escape(_CALLS)}\s*\[\{{"name": "{SAMPLE_TOOL}", "arguments": \{{')

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """A member of the list."""
        name = grammar.quoted(json.dumps(tool.name, ensure_ascii=False))
        head, middle = grammar.text('{"name": '), grammar.text(', "arguments": ')
        before_id, end = grammar.text(', "id": "'), grammar.text('"}')
        call_id = f"{before_id} /[A-Za-z0-9]{{{_ID_LETTERS}}}/ {end}"
        return f"{head} {name} {middle} {json_arguments(grammar, tool)} {call_id}"

    def calls(self, grammar: GrammarBuilder, call: str, parallel: bool) -> str:
        """The list."""
        head, comma, end = (grammar.text(text) for text in (f"{_CALLS}[", ", ", "]"))
        return f"{head} {call} ({comma} {call})* {end}" if parallel else f"{head} {call} {end}"


class _Parser(CallScanner):
    def __init__(self, tools: Tools, openers: Sequence[str], new_id: Callable[[], str]) -> None:
        super().__init__(tools, openers, new_id)
        self._in_list = False
        self._value_end = ValueEnd()

    def _begin(self, final: bool) -> bool:
        at = skip_blanks(self._held, len(_CALLS))
        if at == len(self._held):
            raise NeedMoreInput
        if self._held[at] == "[":
            self._in_list = self._begin_member(skip_blanks(self._held, at + 1))
            return self._in_list
        name = _NAME.match(self._held, at)
        if name is None:
            return False
        at, call_id = skip_blanks(self._held, name.end()), ""
        if at == len(self._held):
            raise NeedMoreInput
        if self._held[at] == "{":
            return self._start(name[0], at, self._json)
        if starts_with(_CALL_ID, self._held, at):
            found = _ID.match(self._held, skip_blanks(self._held, at + len(_CALL_ID)))
            assert found is not None  # it matches nothing, too
            at, call_id = skip_blanks(self._held, found.end()), found[0]
        if not starts_with(_ARGS, self._held, at):
            return False
        at = skip_blanks(self._held, at + len(_ARGS))
        if not starts_with("{", self._held, at):
            return False
        return self._start(name[0], at, self._json, call_id if len(call_id) == _ID_LETTERS else "")

    def _begin_member(self, at: int) -> bool:
        """Take the head of a member of the list, with all before it; False if there is none."""
        if not starts_with("{", self._held, at):
            return False
        name, begin = json_head(self._held, at)
        if name:
            return self._start(name, begin, self._json)
        end = self._value_end.find(self._held, at)
        name, arguments = whole_call(self._held[at:end]) if end >= 0 else ("", "")
        if not name:
            return False
        self._start(name, end, self._tail)
        self._append(arguments)
        return True

    def _json_done(self, final: bool) -> bool:
        if self._in_list:  # the members after the arguments, which is the id
            rest = self._held.lstrip()
            try:
                end = self._value_end.find(f"{{{rest}", 0) if not rest or rest[0] in ",}" else -1
            except NeedMoreInput:
                if not final:
                    return False
                end = len(rest) + 1
            if end >= 0:
                self._held = rest[end - 1 :]
        self._state = self._tail
        return True

    def _tail(self, final: bool) -> bool:
        self._state = self._text
        if not self._in_list:
            return True
        rest = skip_blanks(self._held, 0)
        self._in_list = False
        if self._held.startswith("]", rest):
            self._held = self._held[rest + 1 :]
        elif self._held.startswith(",", rest) and self._tools.parallel:
            try:
                self._in_list = self._begin_member(skip_blanks(self._held, rest + 1))
            except NeedMoreInput:
                return self._wait(final)
        elif rest == len(self._held):
            return self._wait(final)
        return True

    def _wait(self, final: bool) -> bool:
        """For the rest of the list."""
        if not final:
            self._in_list, self._state = True, self._tail
        return final
