"""Finds tool calls in a reply, as it streams. Both of Qwen's forms are read, whatever the template writes::

    <tool_call>
    <function=look_up>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

    <tool_call>
    {"name": "look_up", "arguments": {"city": "Paris"}}
    </tool_call>

A call begins where its head is complete: ``<function=name>``, or what comes before the object of the arguments. The tag
``<tool_call>`` may be missing before a known function. Text that is no head is content, byte for byte. From the head
on it is a call, come what may: what cannot belong to it ends it and is content, and a reply that ends within leaves its
arguments unfinished, so that nobody takes them for whole.

A value ends at ``</parameter>`` only if another tag follows, so that it may speak of these tags. Blanks between calls
and after the last belong to nothing.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable
from itertools import groupby

from pyctl.chat.call_formats.scan import NeedMoreInput, as_json, json_head, skip, starts_with, tag_name, whole_call
from pyctl.chat.reasoning import CallDelta, ReplyDelta, overlap
from pyctl.chat.tools import Tools

__all__ = ["CallParser", "new_call_id"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_AFTER_VALUE = (_PARAMETER, _FUNCTION_END, _CLOSE)
_JSON_MARKS = re.compile(r'[{}\[\]"\\]')
_LETTERS = string.digits + string.ascii_letters


def new_call_id() -> str:
    """32 random letters and digits, as llama-server makes them."""
    return "".join(secrets.choice(_LETTERS) for _ in range(32))


class CallParser:
    """Feed it the content of one reply; ``tools`` says what may be called, and whether more than once."""

    def __init__(self, tools: Tools, new_id: Callable[[], str] = new_call_id) -> None:
        self._tools = tools
        self._new_id = new_id
        self._openers = (_OPEN, *(f"{_FUNCTION}{tool.name}>" for tool in tools.tools))
        self._opener = re.compile("|".join(map(re.escape, self._openers)))
        self._state: Callable[[bool], bool] = self._text
        self._held = ""
        self._name = ""
        self._types: frozenset[str] = frozenset()
        self._value_end = ""
        self._n_arguments = self._depth = 0
        self._in_string = False
        self._blanks = ""  # the beginning of a stretch of content, as long as it is blank
        self._speaking = False
        self._content: list[str] = []
        self._calls: list[CallDelta] = []
        self._n_calls = 0

    def feed(self, text: str) -> ReplyDelta:
        """What became certain with ``text``."""
        self._held += text
        return self._run(final=False)

    def finish(self) -> ReplyDelta:
        """What was still held back when the reply ended."""
        delta = self._run(final=True)
        return delta if self._n_calls else delta._replace(content=delta.content + self._blanks)

    def _run(self, final: bool) -> ReplyDelta:
        while self._state(final):
            pass
        delta = ReplyDelta("", "".join(self._content), _joined(self._calls))
        self._content, self._calls = [], []
        return delta

    # Each state takes from what is held and says whether the next one should try.

    def _text(self, final: bool) -> bool:
        if self._n_calls and not self._tools.parallel:
            return self._say(len(self._held))
        match = self._opener.search(self._held)
        if match is None:
            at = self._held.rfind("<")
            partial = at >= 0 and not final and any(opener.startswith(self._held[at:]) for opener in self._openers)
            return self._say(at if partial else len(self._held))
        self._say(match.start())
        try:
            if not self._begin():
                self._say(1)  # what follows may hold another opener
        except NeedMoreInput:
            if not final:
                return False
            self._say(1)
        return True

    def _begin(self) -> bool:
        """Take the head of a call off the beginning of what is held; False if there is none."""
        at = skip(self._held, len(_OPEN)) if self._held.startswith(_OPEN) else 0
        if self._held.startswith("{", at):
            return self._begin_json(at)
        if not starts_with(_FUNCTION, self._held, at):
            return False
        name, at = tag_name(self._held, at + len(_FUNCTION))
        if name:
            self._start(name, at, self._body)
        return bool(name)

    def _begin_json(self, at: int) -> bool:
        name, begin = json_head(self._held, at)
        if name:
            self._start(name, begin, self._arguments)
            self._depth, self._in_string = 0, False
            return True
        # The members come in another order, or it is no call at all: the whole of it tells.
        end = self._held.find(_CLOSE, at)
        if end < 0:
            raise NeedMoreInput
        name, arguments = whole_call(self._held[at:end])
        if name:
            self._start(name, end, self._tail)
            self._append(arguments)
        return bool(name)

    def _body(self, final: bool) -> bool:
        """Between the tags of a call."""
        rest = self._held.lstrip()
        try:
            tag = next((tag for tag in _AFTER_VALUE if starts_with(tag, rest, 0)), "")
            name, at = tag_name(rest, len(_PARAMETER)) if tag == _PARAMETER else ("", 0)
        except NeedMoreInput:
            if final:
                self._held = ""
            return False
        if name:
            self._append(("," if self._n_arguments else "{") + json.dumps(name, ensure_ascii=False) + ":")
            self._n_arguments += 1
            self._types = self._tools.types(self._name, name)
            self._held, self._state = rest[at:], self._value_begin
            return True
        self._append("}" if self._n_arguments else "{}")
        if tag == _FUNCTION_END:
            self._held = rest[len(tag) :]
        self._state = self._tail
        return True

    def _value_begin(self, final: bool) -> bool:
        if not self._held and not final:
            return False
        self._value_end = _PARAMETER_END
        if self._held.startswith("\n"):
            self._value_end = "\n" + _PARAMETER_END
            try:
                empty = self._ends_at(0, final)  # one line break instead of two
            except NeedMoreInput:
                return False
            self._held = self._held[0 if empty else 1 :]
        if self._types == {"string"}:
            self._append('"')
        self._state = self._value
        return True

    def _value(self, final: bool) -> bool:
        at = self._held.find(self._value_end)
        try:
            while at >= 0 and not self._ends_at(at, final):
                at = self._held.find(self._value_end, at + 1)
        except NeedMoreInput:
            return self._value_goes_on(at)
        if at < 0:
            return self._value_goes_on(len(self._held) - (0 if final else overlap(self._held, self._value_end)), final)
        value = self._held[:at]
        if self._types == {"string"}:
            self._append(json.dumps(value, ensure_ascii=False)[1:])
        else:
            self._append(as_json(value, self._types))
        self._held, self._state = self._held[at + len(self._value_end) :], self._body
        return True

    def _value_goes_on(self, size: int, final: bool = False) -> bool:
        """So much of what is held belongs to the value."""
        if self._types == {"string"}:
            self._append(json.dumps(self._held[:size], ensure_ascii=False)[1:-1])
            self._held = self._held[size:]
        elif final:
            self._append(json.dumps(self._held, ensure_ascii=False)[:-1] if "string" in self._types else self._held)
            self._held = ""
        return False

    def _ends_at(self, at: int, final: bool) -> bool:
        """Whether the value ends there: another tag comes next, or nothing more."""
        if not starts_with(self._value_end, self._held, at):
            return False
        after = skip(self._held, at + len(self._value_end))
        try:
            return any(starts_with(tag, self._held, after) for tag in _AFTER_VALUE)
        except NeedMoreInput:
            if final:
                return True
            raise

    def _arguments(self, final: bool) -> bool:
        """Within the arguments as JSON, which are passed on as they are."""
        at = 0
        while mark := _JSON_MARKS.search(self._held, at):
            at = mark.end()
            if self._in_string:
                if mark[0] == "\\":
                    if at == len(self._held) and not final:
                        at -= 1
                        break
                    at += 1
                self._in_string = mark[0] != '"'
            elif mark[0] == '"':
                self._in_string = True
            elif mark[0] in "{[":
                self._depth += 1
            elif mark[0] in "}]":
                self._depth -= 1
                if not self._depth:
                    self._append(self._held[:at])
                    self._held, self._state = self._held[at:], self._json_end
                    return True
        else:
            at = len(self._held)
        self._append(self._held[:at])
        self._held = self._held[at:]
        return False

    def _json_end(self, final: bool) -> bool:
        """The brace around the members."""
        rest = self._held.lstrip()
        if not rest and not final:
            return False
        if rest.startswith("}"):
            self._held = rest[1:]
        self._state = self._tail
        return True

    def _tail(self, final: bool) -> bool:
        """The end tag around a call, which may be missing."""
        rest = self._held.lstrip()
        try:
            if starts_with(_CLOSE, rest, 0):
                self._held = rest[len(_CLOSE) :]
        except NeedMoreInput:
            if not final:
                return False
            self._held = ""
        self._state = self._text
        return True

    def _say(self, size: int) -> bool:
        """Take so much content off what is held."""
        text, self._held = self._held[:size], self._held[size:]
        if not self._speaking:
            text, self._blanks = self._blanks + text, ""
            self._speaking = bool(text.strip())
            if not self._speaking:
                self._blanks, text = text, ""
        self._content.append(text)
        return False

    def _start(self, name: str, size: int, state: Callable[[bool], bool]) -> None:
        self._calls.append(CallDelta(self._n_calls, self._new_id(), name))
        self._name, self._n_arguments = name, 0
        self._n_calls += 1
        self._blanks, self._speaking = "", False
        self._held, self._state = self._held[size:], state

    def _append(self, arguments: str) -> None:
        if arguments:
            self._calls.append(CallDelta(self._n_calls - 1, arguments=arguments))


def _joined(deltas: list[CallDelta]) -> tuple[CallDelta, ...]:
    """The deltas with neighbouring pieces of arguments put together."""
    joined: list[CallDelta] = []
    for (index, head), group in groupby(deltas, key=lambda delta: (delta.index, bool(delta.name))):
        if head:
            joined += group
        else:
            joined.append(CallDelta(index, arguments="".join(delta.arguments for delta in group)))
    return tuple(joined)
