"""Llama 3's calls: JSON that is the whole message, or a call as in Python after a control token::

    {"name": "look_up", "parameters": {"city": "Paris"}}

    <|python_tag|>look_up.call(city="Paris")

Without the control token, JSON is a call only where the message begins, and of a known function. Several calls may be
parted by semicolons.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence

from pyctl.chat.call_formats.call_format import TaggedFormat, json_arguments
from pyctl.chat.call_formats.scan import (
    CallScanner,
    NeedMoreInput,
    ValueEnd,
    coerce_argument,
    from_python,
    json_head,
    parse_json,
    skip_blanks,
    starts_with,
    whole_call,
)
from pyctl.chat.constraint import GrammarBuilder
from pyctl.chat.template import SAMPLE_TOOL
from pyctl.chat.tools import Tool, Tools
from pyctl.text import random_id

__all__ = ["LlamaFormat"]

_TAG = "<|python_tag|>"
_MEMBERS = ('"name"', '"type"', '"parameters"', '"arguments"', '"id"')
_PYTHON_CALL = re.compile(r"([A-Za-z_][\w-]{0,63})\.call\(")
_PYTHON_CALL_BEGUN = re.compile(r"(?:[A-Za-z_][\w-]{0,63}(?:\.(?:c(?:a(?:ll?)?)?)?)?)?")
_PYTHON_MARKS = re.compile(r"""[()\[\]{},"'\\]""")


class LlamaFormat(TaggedFormat):
    """Calls as JSON that is the whole message, as Llama 3.1 and its successors write them."""

    name = "Llama 3"
    control_tokens = (_TAG,)
    is_bare_json = True
    trigger = rf'^\s*(?:{re.escape(_TAG)})?\s*(\{{\s*"name")'
    _sample = re.compile(rf'<\|end_header_id\|>\s*(?:{re.escape(_TAG)})?\{{"name": "{SAMPLE_TOOL}", "parameters": \{{')

    def call_parser(self, tools: Tools, new_id: Callable[[], str] = random_id) -> CallScanner:
        """Reads JSON and calls as in Python."""
        return _Parser(tools, (_TAG, "{"), new_id)

    def call(self, grammar: GrammarBuilder, tool: Tool) -> str:
        """A call as JSON."""
        name = grammar.quoted(json.dumps(tool.name, ensure_ascii=False))
        head, middle = grammar.text('{"name": '), grammar.text(', "parameters": ')
        end = grammar.text("}")
        return f"({grammar.text(_TAG)})? {head} {name} {middle} {json_arguments(grammar, tool)} {end}"


class _Parser(CallScanner):
    def __init__(self, tools: Tools, openers: Sequence[str], new_id: Callable[[], str]) -> None:
        super().__init__(tools, openers, new_id)
        self._json_end, self._python_end = ValueEnd(), ValueEnd(python=True)

    def _begin(self, final: bool) -> bool:
        tagged = self._held.startswith(_TAG)
        if not tagged and self._speaking:
            return False
        at = skip_blanks(self._held, len(_TAG)) if tagged else 0
        if at == len(self._held):
            raise NeedMoreInput
        if self._held[at] == "{":
            return self._begin_json(at)
        return tagged and self._begin_python(at)

    def _begin_json(self, at: int) -> bool:
        first = skip_blanks(self._held, at + 1)
        if not any(starts_with(member, self._held, first) for member in _MEMBERS):
            return False
        for key in ("parameters", "arguments"):
            name, begin = json_head(self._held, at, key)
            if name and self._has(name):
                return self._start(name, begin, self._json)
        # The members come in another order, or it is no call: only the whole text decides.
        end = self._json_end.find(self._held, at)
        name, arguments = whole_call(self._held[at:end]) if end >= 0 else ("", "")
        if not name or not self._has(name):
            return False
        self._start(name, end, self._tail)
        self._append(arguments)
        return True

    def _begin_python(self, at: int) -> bool:
        call = _PYTHON_CALL.match(self._held, at)
        if call is None:
            if _PYTHON_CALL_BEGUN.fullmatch(self._held, at):
                raise NeedMoreInput
            return False
        name = call[1]
        end = self._python_end.find(self._held, call.end() - 1) if self._has(name) else -1
        values = [piece.partition("=") for piece in _pieces(self._held[call.end() : end - 1])]
        if end < 0 or not all(key.strip().isidentifier() and equals for key, equals, _ in values):
            return False
        members = [
            f"{json.dumps(key.strip())}: {_json_of(value.strip(), self._tools.types(name, key.strip()))}"
            for key, _, value in values
        ]
        self._start(name, end, self._tail)
        self._append(f"{{{', '.join(members)}}}")
        return True

    def _tail(self, final: bool) -> bool:
        rest = self._held.lstrip()
        if not rest and not final:
            return False
        if rest.startswith(";"):
            self._held = rest[1:]
        self._state = self._text
        return True


def _pieces(text: str) -> Iterator[str]:
    """The arguments that stand in ``text``, which no bracket closes, with commas between them."""
    start, depth, at, quote = 0, 0, 0, ""
    while mark := _PYTHON_MARKS.search(text, at):
        at, letter = mark.end(), mark[0]
        if letter == "\\":
            at += bool(quote)
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "," and not depth:
            yield text[start : at - 1]
            start = at
        elif letter != ",":
            depth += 1 if letter in "([{" else -1
    if start or text.strip():
        yield text[start:]


def _json_of(value: str, types: frozenset[str]) -> str:
    """A value as Python writes it as JSON text."""
    candidate = from_python(value)
    try:
        text = parse_json(candidate)
    except ValueError:
        return coerce_argument(value, types)
    return coerce_argument(text, types) if isinstance(text, str) else candidate
