"""Calls between delimiters: tags, JSON, and names before their arguments."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pyctl.chat.call_formats.delimited_format import DelimitedFormat
from pyctl.chat.call_formats.families import FAMILIES, QWEN
from pyctl.chat.call_formats.name_delimiters import NameDelimiters
from pyctl.chat.call_formats.object_delimiters import ObjectDelimiters
from pyctl.chat.reply import THINK, ParsedReply, ReplyParser
from pyctl.chat.template import SAMPLE_KEY, SAMPLE_TOOL, SAMPLE_VALUE
from pyctl.chat.tool_definitions import Tools
from tests.unit.chat.families import LIST_CALL, NAMED_CALL, QWEN_CALL, calls_of, look_up, parse, xml
from tests.unit.chat.parsing import TOOLS, Parsed

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


class TestQwen:
    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            (xml("look_up", text="a\nb"), "", look_up('{"text":"a\\nb"}')),
            ("Let me see.\n\n" + QWEN_CALL + "\n", "Let me see.\n\n", [("stop", "{}")]),
            ("\n\n" + QWEN_CALL + "\n" + QWEN_CALL, "", [("stop", "{}"), ("stop", "{}")]),
            (QWEN_CALL + "\nAnd so on.", "\nAnd so on.", [("stop", "{}")]),
            (
                xml("look_up", count="3", ratio=" 1.5 ", deep="True"),
                "",
                look_up('{"count":3,"ratio":1.5,"deep":true}'),
            ),
            (xml("look_up", count="three"), "", look_up('{"count":"three"}')),
            (xml("look_up", count="NaN"), "", look_up('{"count":"NaN"}')),
            (
                xml("look_up", text="3", free="3", maybe="3"),
                "",
                look_up('{"text":"3","free":3,"maybe":"3"}'),
            ),
            (
                xml("look_up", maybe="null", text="null"),
                "",
                look_up('{"maybe":null,"text":"null"}'),
            ),
            (
                xml("look_up", where="{'a': \"it's\", 'b': None}"),
                "",
                look_up('{"where":{"a": "it\'s", "b": null}}'),
            ),
            (xml("look_up", tags='["a",\n 1]'), "", look_up('{"tags":["a",\n 1]}')),
            (xml("look_up", unknown="x"), "", look_up('{"unknown":"x"}')),
            (xml("other", a="x"), "", [("other", '{"a":"x"}')]),
            (xml("look_up", text=""), "", look_up('{"text":""}')),
            (xml("look_up", text="\n x \n"), "", look_up('{"text":"\\n x \\n"}')),
            (
                xml("look_up", text="a\n</parameter>\nb </function>"),
                "",
                look_up('{"text":"a\\n</parameter>\\nb </function>"}'),
            ),
            (xml("look_up", text="</parameter>"), "", look_up('{"text":"</parameter>"}')),
            (
                "<tool_call><function=look_up><parameter=text>a</parameter></function></tool_call>",
                "",
                look_up('{"text":"a"}'),
            ),
            (
                "<function=look_up>\n<parameter=text>\n</parameter>\n</function>",
                "",
                look_up('{"text":""}'),
            ),
            (
                "<function=look_up>\n<parameter=text>\na\n</parameter>\n</tool_call>",
                "",
                look_up('{"text":"a"}'),
            ),
            # no head: content, byte for byte
            (
                "#include <functional>\n<function=other>",
                "#include <functional>\n<function=other>",
                [],
            ),
            ("<tool_call>\nno\n</tool_call>", "<tool_call>\nno\n</tool_call>", []),
            ("<tool_call>\n<function=look up>", "<tool_call>\n<function=look up>", []),
            (" \n<tool_call>\n<funct", " \n<tool_call>\n<funct", []),
            ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
            ('<tool_call>{"name": "a", "arg', '<tool_call>{"name": "a", "arg', []),
            ("<tool_call>" + QWEN_CALL, "<tool_call>", [("stop", "{}")]),
            # what ends within, or goes astray
            ("<tool_call>\n<function=look_up>\n<parameter=text>\nab", "", look_up('{"text":"ab')),
            ("<tool_call>\n<function=look_up>\n<parameter=count>\n12", "", look_up('{"count":12')),
            (
                "<tool_call>\n<function=look_up>\n<parameter=text>\nab\n</parameter>\n",
                "",
                look_up('{"text":"ab"'),
            ),
            ("<tool_call>\n<function=look_up>\n<param", "", [("look_up", "")]),
            ("<tool_call>\n<function=look_up>\nhm", "\nhm", [("look_up", "{}")]),
            # JSON
            (
                (
                    '<tool_call>\n{"name": "look_up", "arguments": {"text": '
                    '"}\\"</tool_call>"}}\n</tool_call>'
                ),
                "",
                look_up('{"text": "}\\"</tool_call>"}'),
            ),
            (
                '<tool_call>{"name":"stop","arguments":{}}</tool_call>' * 2,
                "",
                [("stop", "{}"), ("stop", "{}")],
            ),
            (
                '<tool_call>{"arguments": {"a": [1]}, "name": "stop"}</tool_call>',
                "",
                [("stop", '{"a": [1]}')],
            ),
            (
                '<tool_call>{"name": "stop", "arguments": "{\\"a\\": 1}"}</tool_call>',
                "",
                [("stop", '{"a": 1}')],
            ),
            ('<tool_call>{"name": "stop"}</tool_call>', "", [("stop", "{}")]),
            ('<tool_call>{"name": "stop", "arguments": {"a": "b', "", [("stop", '{"a": "b')]),
            ('<tool_call>{"name": "stop", "arguments": {}}', "", [("stop", "{}")]),
            ('<tool_call>["stop"]</tool_call>', '<tool_call>["stop"]</tool_call>', []),
        ],
    )
    def test_replies(self, text: str, content: str, calls: list[tuple[str, str]]) -> None:
        assert parse(QWEN, text, reply_part="content") == ("", content, calls)

    def test_reasoning_comes_first_and_holds_no_calls(self) -> None:
        text = f"I could {QWEN_CALL[1:]}\n</think>\n\nWell\n{QWEN_CALL}"
        assert parse(QWEN, text, reply_part="reasoning") == (
            f"I could {QWEN_CALL[1:]}\n",
            "Well\n",
            [("stop", "{}")],
        )
        assert parse(QWEN, f"hm\n{QWEN_CALL}", reply_part="reasoning") == (
            "hm\n",
            "",
            [("stop", "{}")],
        )

    def test_without_parallel_calls_only_the_first_is_one(self) -> None:
        one = Tools(TOOLS.tools, parallel=False)
        assert parse(QWEN, QWEN_CALL + "\n" + QWEN_CALL, one) == (
            "",
            "\n" + QWEN_CALL,
            [("stop", "{}")],
        )

    def test_arguments_come_out_as_soon_as_they_are_certain(self) -> None:
        parser = QWEN.call_parser(TOOLS)
        parser.feed("<tool_call>\n<function=look_up>\n<parameter=text>\n")
        assert [call.arguments for call in parser.feed("Hello ").calls] == ['"Hello ']
        assert parser.feed("\n</para").calls == ()
        assert [call.arguments for call in parser.feed("graph>").calls] == ["\\n</paragraph>"]


class TestMistral:
    form = next(form for form in FAMILIES if form.name == "Mistral (name and arguments)")

    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            ('Well.[TOOL_CALLS]look_up[ARGS]{"text": "]"}', "Well.", [("look_up", {"text": "]"})]),
            ("[TOOL_CALLS]stop[CALL_ID]Ab3dEf7hI[ARGS]{}", "", [("stop", {})]),
            ("[TOOL_CALLS]stop{}", "", [("stop", {})]),
            (NAMED_CALL * 2, "", [("stop", {})] * 2),
            (LIST_CALL, "", [("stop", {})]),
            ('[TOOL_CALLS] [{"name": "stop", "arguments": {}}]', "", [("stop", {})]),
            ('[TOOL_CALLS][{"arguments": {"a": 1}, "name": "stop"}]', "", [("stop", {"a": 1})]),
            (
                LIST_CALL[:-1] + ', {"name": "stop", "arguments": {"b": 2}}] so',
                " so",
                [("stop", {}), ("stop", {"b": 2})],
            ),
            ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
            ("[TOOL_CALLS]what is this", "[TOOL_CALLS]what is this", []),
            ("a [list] of [TOOL", "a [list] of [TOOL", []),
        ],
    )
    def test_replies(self, text: str, content: str, calls: list[Any]) -> None:
        parsed = parse(self.form, text)
        assert parsed[1] == content
        assert calls_of(parsed) == calls

    def test_calls_get_ids_that_the_templates_take(self) -> None:
        (given,) = (
            self.form.call_parser(TOOLS).feed("[TOOL_CALLS]stop[CALL_ID]0123abcDE[ARGS]{").calls[:1]
        )
        (made,) = self.form.call_parser(TOOLS).feed("[TOOL_CALLS]stop[ARGS]{").calls[:1]
        assert given.id == "0123abcDE"
        assert len(made.id) == 9
        assert made.id.isalnum()


class TestFunctionary:
    form = next(form for form in FAMILIES if form.name == "Functionary 3.2")

    @pytest.mark.parametrize(
        ("text", "parsed"),
        [
            ("all\nHi", ("", "Hi", [])),
            ("Hi", ("", "Hi", [])),
            (
                'look_up\n{"text": ">>>stop\\n{}"}',
                ("", "", [("look_up", '{"text": ">>>stop\\n{}"}')]),
            ),
            ("stop\n{}>>>stop\n{}", ("", "", [("stop", "{}")] * 2)),
            ("all\nI look.>>>stop\n{}", ("", "I look.", [("stop", "{}")])),
            # content: Python's prompt, and a function that is none
            ("all\n>>> x = {1: 2}", ("", ">>> x = {1: 2}", [])),
            ("all\n>>>x\n{1: 2}", ("", ">>>x\n{1: 2}", [])),
        ],
    )
    def test_replies(self, text: str, parsed: Parsed) -> None:
        assert parse(self.form, text) == parsed

    def test_without_tools_the_mark_of_content_goes(self) -> None:
        assert parse(self.form, "all\nHi >>> you", None) == ("", "Hi >>> you", [])
