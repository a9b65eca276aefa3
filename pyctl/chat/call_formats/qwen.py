"""Qwen's calls: between tags, and as JSON between tags. Both forms are read, whatever the template writes::

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
``<tool_call>`` may be missing before a known function. A value ends at ``</parameter>`` only if another tag follows, so
that it may speak of these tags.

Bound by a grammar, values between tags are text up to the end tag where the schema allows a string, one of its words
where it lists them, and JSON by their schema elsewhere; the required ones may come in any order.

The form with JSON is Hermes', too: most models with no better form were taught it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from pyctl.chat.call_formats.call_format import TaggedFormat, json_arguments
from pyctl.chat.call_formats.scan import (
    CallScanner,
    NeedMoreInput,
    coerce_argument,
    json_head,
    skip_blanks,
    starts_with,
    tag_name,
    whole_call,
)
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.reply import BRACKETS, SEED, THINK
from pyctl.chat.template import SAMPLE_KEY, SAMPLE_TOOL, SAMPLE_VALUE
from pyctl.chat.tools import Tool, Tools
from pyctl.text import overlap, random_id

__all__ = ["HermesFormat", "QwenFormat"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_HEAD_END = ">\n"
_AFTER_VALUE = (_PARAMETER, _FUNCTION_END, CLOSE)
_MAX_ANY_ORDER = 5
"""So many required arguments take 32 rules; more of them come in the order of the schema."""


class QwenFormat(TaggedFormat):
    """Calls between tags, as Qwen3-Coder and its successors write them. The end of reasoning has a line of its own."""

    name = "Qwen (between tags)"
    reasoning = (
        replace(THINK, interrupts=(OPEN,), forced_close=f"\n{THINK.close}"),
        replace(SEED, forced_close=f"\n{SEED.close}"),
        BRACKETS,
    )
    control_tokens = (OPEN, CLOSE)
    trigger = f"({OPEN})"
    _sample = re.compile(
        rf"{OPEN}\s*{_FUNCTION}{SAMPLE_TOOL}>\s*{_PARAMETER}{SAMPLE_KEY}>\s*{SAMPLE_VALUE}\s*{_PARAMETER_END}"
    )

    def call_parser(self, tools: Tools, new_id: Callable[[], str] = random_id) -> CallScanner:
        """Reads both forms."""
        return QwenParser(tools, new_id)

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """A call between tags."""
        return _call(grammar, tool)


class QwenParser(CallScanner):
    """Reads both forms of calls."""

    def __init__(self, tools: Tools, new_id: Callable[[], str] = random_id) -> None:
        super().__init__(tools, (OPEN, *(f"{_FUNCTION}{tool.name}>" for tool in tools.tools)), new_id)
        self._types: frozenset[str] = frozenset()
        self._value_end, self._searched = "", 0
        self._n_arguments = 0

    def _begin(self, final: bool) -> bool:
        """Take the head of a call off the beginning of what is held; False if there is none."""
        at = skip_blanks(self._held, len(OPEN)) if self._held.startswith(OPEN) else 0
        if self._held.startswith("{", at):
            return self._begin_json(at)
        if not starts_with(_FUNCTION, self._held, at):
            return False
        name, at = tag_name(self._held, at + len(_FUNCTION))
        if not name:
            return False
        self._n_arguments = 0
        return self._start(name, at, self._body)

    def _begin_json(self, at: int) -> bool:
        name, begin = json_head(self._held, at)
        if name:
            return self._start(name, begin, self._json)
        # The members come in another order, or it is no call at all: the whole of it tells.
        end = self._held.find(CLOSE, at)
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
        self._value_end, self._searched = _PARAMETER_END, 0
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
        at = self._held.find(self._value_end, self._searched)
        try:
            while at >= 0 and not self._ends_at(at, final):
                at = self._held.find(self._value_end, at + 1)
        except NeedMoreInput:
            self._searched = at
            return self._value_goes_on(at)
        if at < 0:
            self._searched = max(len(self._held) - len(self._value_end), 0)
            return self._value_goes_on(len(self._held) - (0 if final else overlap(self._held, self._value_end)), final)
        value = self._held[:at]
        if self._types == {"string"}:
            self._append(json.dumps(value, ensure_ascii=False)[1:])
        else:
            self._append(coerce_argument(value, self._types))
        self._held, self._state = self._held[at + len(self._value_end) :], self._body
        return True

    def _value_goes_on(self, size: int, final: bool = False) -> bool:
        """So much of what is held belongs to the value."""
        if self._types == {"string"}:
            self._append(json.dumps(self._held[:size], ensure_ascii=False)[1:-1])
            self._held, self._searched = self._held[size:], 0
        elif final:
            self._append(json.dumps(self._held, ensure_ascii=False)[:-1] if "string" in self._types else self._held)
            self._held = ""
        return False

    def _ends_at(self, at: int, final: bool) -> bool:
        """Whether the value ends there: another tag comes next, or nothing more."""
        if not starts_with(self._value_end, self._held, at):
            return False
        after = skip_blanks(self._held, at + len(self._value_end))
        try:
            return any(starts_with(tag, self._held, after) for tag in _AFTER_VALUE)
        except NeedMoreInput:
            if final:
                return True
            raise

    def _tail(self, final: bool) -> bool:
        """The end tag around a call, which may be missing."""
        rest = self._held.lstrip()
        try:
            if starts_with(CLOSE, rest, 0):
                self._held = rest[len(CLOSE) :]
        except NeedMoreInput:
            if not final:
                return False
            self._held = ""
        self._state = self._text
        return True


def _call(grammar: GrammarBuilder, tool: Tool) -> str:
    value_end = f"\n{_PARAMETER_END}\n"
    arguments: dict[str, str] = {}
    for key, schema in tool.properties.items():
        if words := _words(schema):
            value = f"({' | '.join(map(grammar.quoted, words))}) {grammar.text(value_end)}"
        elif "string" in tool.types(key):
            value = grammar.until(value_end)
        else:
            value = f"{grammar.json(schema, tool.parameters)} {grammar.text(value_end)}"
        arguments[key] = _argument(grammar, grammar.quoted(key), value)
    required = [arguments[key] for key in dict.fromkeys(tool.required)]
    others = [argument for key, argument in arguments.items() if key not in tool.required]
    has_others = tool.parameters.get("additionalProperties") not in (None, False)
    if not arguments and (has_others or tool.parameters.get("type", "object") != "object"):
        others = [_argument(grammar, r"/[^<>\n]{1,100}/", grammar.until(value_end))]
    any_other = f"({' | '.join(others)})*" if others else ""
    if len(required) > _MAX_ANY_ORDER:
        body = f"{' '.join(required)} {any_other}"
    else:
        body = _any_order(grammar, required, any_other)
    head, end = grammar.text(f"{OPEN}\n{_FUNCTION}"), grammar.text(f"{_FUNCTION_END}\n{CLOSE}")
    return grammar.rule(f"{head} {grammar.quoted(tool.name)} {grammar.text(_HEAD_END)} {body} {end}")


def _words(schema: object) -> list[str]:
    """The values of an enumeration of strings."""
    values = schema.get("enum") if isinstance(schema, dict) else None
    return values if isinstance(values, list) and all(isinstance(value, str) for value in values) else []


def _argument(grammar: GrammarBuilder, key: str, value: str) -> str:
    """``value`` has the end tag."""
    return grammar.rule(f"{grammar.text(_PARAMETER)} {key} {grammar.text(_HEAD_END)} {value}")


def _any_order(grammar: GrammarBuilder, required: Sequence[str], between: str) -> str:
    """Each of ``required`` once, in any order, and ``between`` around them: one rule per set of those that are left."""
    if not required:
        return between
    rules: dict[frozenset[int], str] = {frozenset(): between}
    by_size = sorted((frozenset(_members(mask)) for mask in range(1, 2 ** len(required))), key=len)
    for left in by_size:
        choices = [f"{required[index]} {rules[left - {index}]}".rstrip() for index in sorted(left)]
        rules[left] = grammar.rule(f"{between} ({' | '.join(choices)})".strip())
    return rules[by_size[-1]]


def _members(mask: int) -> list[int]:
    return [index for index in range(mask.bit_length()) if mask >> index & 1]


class HermesFormat(TaggedFormat):
    """Also what is looked for where a template writes calls in no form that is known."""

    name = "Hermes (JSON between tags)"
    reasoning = (replace(THINK, interrupts=(OPEN,)), replace(SEED, forced_close=f"\n{SEED.close}"), BRACKETS)
    control_tokens = (OPEN, CLOSE)
    trigger = f"({OPEN})"
    _sample = re.compile(rf'{OPEN}\s*\{{"name": "{SAMPLE_TOOL}", "arguments": \{{')

    def call_parser(self, tools: Tools, new_id: Callable[[], str] = random_id) -> CallScanner:
        """Reads both of Qwen's forms."""
        return QwenParser(tools, new_id)

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """A call with arguments by the schema as a whole."""
        name = grammar.quoted(json.dumps(tool.name, ensure_ascii=False))
        middle = grammar.text(', "arguments": ')
        head, end = grammar.text(f'{OPEN}\n{{"name": '), grammar.text(f"}}\n{CLOSE}")
        return f"{head} {name} {middle} {json_arguments(grammar, tool)} {end}"
