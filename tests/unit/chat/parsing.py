"""Tools, and replies parsed with them."""

from __future__ import annotations

from typing import Any

from pyctl.chat.call_formats.call_format import CallFormat
from pyctl.chat.call_formats.tag_delimiters import TagDelimiters
from pyctl.chat.reply import ParsedReply, ReplyPart, ReplySplitter
from pyctl.chat.tool_definitions import Tools
from tests.functions import function

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "deep": {"type": "boolean"},
    "where": {"$ref": "#/$defs/place"},
    "tags": {"type": "array"},
    "maybe": {"type": ["string", "null"]},
    "free": {},
}
CALL_ID = "Ab3dEf7hI"
"""The id of calls that bring their own."""

STOP_TOOL = {"name": "stop", "description": "", "parameters": {"type": "object", "properties": {}}}
LOOK_UP = function("look_up", **PROPERTIES)
LOOK_UP["function"]["parameters"]["$defs"] = {"place": {"type": "object"}}
KEY_TAGS = TagDelimiters(
    open="<call>",
    key_open="<key>",
    key_end="</key>",
    value_opens=("<value>",),
    value_end="</value>",
    close="</call>",
)
"""Calls whose arguments are keys and values between tags."""

TOOLS = Tools.from_request([LOOK_UP, {"type": "function", "function": STOP_TOOL}])

Parsed = tuple[str, str, list[tuple[str, str]]]


def parse_reply(
    form: CallFormat, pieces: list[str], tools: Tools | None, reply_part: ReplyPart
) -> Parsed:
    """Return reasoning, content and calls of a reply in pieces; check the rules of the deltas."""
    splitter = ReplySplitter(form.parser(tools, form.reasoning[0], reply_part))
    deltas = [*map(splitter.feed, pieces), splitter.finish()]
    reply = ParsedReply()
    seen = 0
    for delta in deltas:
        reply.add(delta)
        for call in delta.calls:
            assert bool(call.id) == bool(call.name) == (call.index == seen)
            assert call.arguments == "" if call.name else call.arguments != ""
            seen = max(seen, call.index + 1)
            assert call.index == seen - 1
    own = {call.id for call in reply.calls if call.id != CALL_ID and ":" not in call.id}
    assert len(own) == sum(call.id in own for call in reply.calls)
    return reply.reasoning, reply.content, [(call.name, call.arguments) for call in reply.calls]
