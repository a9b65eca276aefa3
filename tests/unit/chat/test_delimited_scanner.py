"""The reader of calls between delimiters, fed in pieces of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pyctl.chat.call_formats.delimited_scanner import DelimitedScanner
from pyctl.chat.call_formats.delimiters import CallDelimiters
from pyctl.chat.call_formats.literal_delimiters import LiteralDelimiters
from pyctl.chat.call_formats.name_delimiters import NameDelimiters
from pyctl.chat.call_formats.object_delimiters import ObjectDelimiters
from pyctl.chat.reply import ParsedReply
from pyctl.chat.tool_definitions import Tool, Tools
from tests.unit.chat.parsing import KEY_TAGS

TOOLS = Tools(
    (
        Tool("f", {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}),
        Tool("g", {}),
    )
)
OBJECTS = ObjectDelimiters(open="<call>\n", close="\n</call>")
NAMES = NameDelimiters(open="<call>", parts=(None, "<sep>"), close="</call>")
KNOWN = NameDelimiters(open="```", parts=(None, "\n"), is_known=True)
LITERALS = LiteralDelimiters(begin="[", end="]", between=", ", round=True, separator="=")


def read(delimiters: CallDelimiters, text: str, n: int) -> ParsedReply:
    """Return what the scanner finds in ``text``, which comes in pieces of ``n`` characters."""
    scanner = DelimitedScanner(TOOLS, [delimiters])
    reply = ParsedReply()
    for start in range(0, len(text), n):
        reply.add(scanner.feed(text[start : start + n]))
    reply.add(scanner.finish())
    return reply


@pytest.mark.parametrize("n", [1, 3, 1000])
@pytest.mark.parametrize(
    ("delimiters", "text", "arguments"),
    [
        (OBJECTS, '<call>\n{"name": "f", "arguments": {"a": 1}}\n</call>', {"a": 1}),
        (OBJECTS, '<call>{"arguments": {"a": 1}, "name": "f"}</call>', {"a": 1}),
        (OBJECTS, '<call>{"name": "f", "arguments": {"a": 1}, "x": 2}</call>', {"a": 1}),
        (NAMES, '<call>f<sep>{"a": 1}</call>', {"a": 1}),
        (KEY_TAGS, "<call>f<key>a</key><value>1</value></call>", {"a": 1}),
        (KEY_TAGS, "<call>f<key>b</key><value>1</value></call>", {"b": "1"}),
        (KEY_TAGS, "<call>f<key>b</key><value>a </value> b</value></call>", {"b": "a </value> b"}),
        (KEY_TAGS, "<call>f</call>", {}),
        (LITERALS, "[f(a=1, b='x')]", {"a": 1, "b": "x"}),
    ],
)
def test_a_call_between_texts(
    delimiters: CallDelimiters, text: str, arguments: dict[str, Any], n: int
) -> None:
    reply = read(delimiters, f"I call. {text}", n)
    (call,) = reply.calls
    assert call.name == "f"
    assert json.loads(call.arguments) == arguments
    assert reply.content.strip() == "I call."


@pytest.mark.parametrize("n", [1, 1000])
@pytest.mark.parametrize(
    ("delimiters", "text"),
    [
        (OBJECTS, "<call> is a tag"),
        (NAMES, "<call>what is this?"),
        (KNOWN, '```json\n{"a": 1}'),
        (KEY_TAGS, "<call>this is none"),
    ],
)
def test_other_texts_stay_content(delimiters: CallDelimiters, text: str, n: int) -> None:
    reply = read(delimiters, text, n)
    assert reply.calls == []
    assert reply.content == text
