"""Formats of calls between delimiters."""

from __future__ import annotations

import re

from pyctl.chat.call_formats.delimited_format import DelimitedFormat
from pyctl.chat.call_formats.name_delimiters import NameDelimiters
from pyctl.chat.call_formats.object_delimiters import ObjectDelimiters
from pyctl.chat.reply import THINK, ParsedReply, ReplyParser
from pyctl.chat.template import SAMPLE_KEY, SAMPLE_TOOL, SAMPLE_VALUE
from pyctl.chat.tool_definitions import Tools

OBJECTS = ObjectDelimiters(open="<call>\n", close="\n</call>")
NAMES = NameDelimiters(open="[CALL]", parts=(None, "[ARGS]"))
FORM = DelimitedFormat("toy", OBJECTS, NAMES, reasoning=(THINK,), named_in=("calls are JSON",))
SAMPLE = f'{{"name": "{SAMPLE_TOOL}", "arguments": {{"{SAMPLE_KEY}": "{SAMPLE_VALUE}"}}}}'


def read(parser: ReplyParser, *pieces: str) -> ParsedReply:
    reply = ParsedReply()
    for piece in pieces:
        reply.add(parser.feed(piece))
    reply.add(parser.finish())
    return reply


def test_a_format_recognizes_its_own_sample() -> None:
    assert FORM.recognizes(f"text <call>\n{SAMPLE}\n</call>")
    assert not FORM.recognizes(f"text {SAMPLE}")
    assert not FORM.recognizes("")


def test_a_template_may_name_the_format() -> None:
    assert FORM.is_named_in("The calls are JSON.")
    assert not FORM.is_named_in("The calls are XML.")


def test_tokens_of_all_delimiters_and_tags_may_be_hidden() -> None:
    tokens = {"<call>", "</call>", "[CALL]", "[ARGS]", THINK.open, THINK.close}
    assert tokens <= set(FORM.control_tokens)


def test_the_first_delimiters_start_the_constraint() -> None:
    assert re.search(FORM.trigger, "text <call>")
    assert not re.search(FORM.trigger, "[CALL]")


def test_calls_in_any_of_the_forms_are_read() -> None:
    for text in ('<call>{"name": "f", "arguments": {}}</call>', "[CALL]f[ARGS]{}"):
        (call,) = read(FORM.parser(Tools(()), THINK, "content"), *text).calls
        assert call.name == "f"


def test_texts_around_content_are_removed() -> None:
    form = DelimitedFormat("toy", OBJECTS, reasoning=(THINK,), around_content=("<a>", "</a>"))
    reply = read(form.parser(None, None, "content"), *"<a>Yes, a < b.</a>")
    assert reply.content == "Yes, a < b."
