from __future__ import annotations

import pytest

from pyctl.chat.call_formats.families import QWEN
from pyctl.chat.reply import ReplyPart
from pyctl.chat.tools import Tools
from tests.unit.chat.parsing import TOOLS, Parsed, parse_reply

FORM = QWEN


def parse(pieces: list[str], tools: Tools = TOOLS, reply_part: ReplyPart = "content") -> Parsed:
    return parse_reply(FORM, pieces, tools, reply_part)


def xml(name: str, **arguments: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def look_up(arguments: str) -> list[tuple[str, str]]:
    return [("look_up", arguments)]


STOP = "<tool_call>\n<function=stop>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (xml("look_up", text="a\nb"), "", look_up('{"text":"a\\nb"}')),
        ("Let me see.\n\n" + STOP + "\n", "Let me see.\n\n", [("stop", "{}")]),
        ("\n\n" + STOP + "\n" + STOP, "", [("stop", "{}"), ("stop", "{}")]),
        (STOP + "\nAnd so on.", "\nAnd so on.", [("stop", "{}")]),
        (xml("look_up", count="3", ratio=" 1.5 ", deep="True"), "", look_up('{"count":3,"ratio":1.5,"deep":true}')),
        (xml("look_up", count="three"), "", look_up('{"count":"three"}')),
        (xml("look_up", count="NaN"), "", look_up('{"count":"NaN"}')),
        (xml("look_up", text="3", free="3", maybe="3"), "", look_up('{"text":"3","free":3,"maybe":"3"}')),
        (xml("look_up", maybe="null", text="null"), "", look_up('{"maybe":null,"text":"null"}')),
        (xml("look_up", where="{'a': \"it's\", 'b': None}"), "", look_up('{"where":{"a": "it\'s", "b": null}}')),
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
        ("<function=look_up>\n<parameter=text>\n</parameter>\n</function>", "", look_up('{"text":""}')),
        ("<function=look_up>\n<parameter=text>\na\n</parameter>\n</tool_call>", "", look_up('{"text":"a"}')),
        # no head: content, byte for byte
        ("#include <functional>\n<function=other>", "#include <functional>\n<function=other>", []),
        ("<tool_call>\nno\n</tool_call>", "<tool_call>\nno\n</tool_call>", []),
        ("<tool_call>\n<function=look up>", "<tool_call>\n<function=look up>", []),
        (" \n<tool_call>\n<funct", " \n<tool_call>\n<funct", []),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "a", "arg', '<tool_call>{"name": "a", "arg', []),
        ("<tool_call>" + STOP, "<tool_call>", [("stop", "{}")]),
        # what ends within, or goes astray
        ("<tool_call>\n<function=look_up>\n<parameter=text>\nab", "", look_up('{"text":"ab')),
        ("<tool_call>\n<function=look_up>\n<parameter=count>\n12", "", look_up('{"count":12')),
        ("<tool_call>\n<function=look_up>\n<parameter=text>\nab\n</parameter>\n", "", look_up('{"text":"ab"')),
        ("<tool_call>\n<function=look_up>\n<param", "", [("look_up", "")]),
        ("<tool_call>\n<function=look_up>\nhm", "\nhm", [("look_up", "{}")]),
        # JSON
        (
            '<tool_call>\n{"name": "look_up", "arguments": {"text": "}\\"</tool_call>"}}\n</tool_call>',
            "",
            look_up('{"text": "}\\"</tool_call>"}'),
        ),
        ('<tool_call>{"name":"stop","arguments":{}}</tool_call>' * 2, "", [("stop", "{}"), ("stop", "{}")]),
        ('<tool_call>{"arguments": {"a": [1]}, "name": "stop"}</tool_call>', "", [("stop", '{"a": [1]}')]),
        ('<tool_call>{"name": "stop", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("stop", '{"a": 1}')]),
        ('<tool_call>{"name": "stop"}</tool_call>', "", [("stop", "{}")]),
        ('<tool_call>{"name": "stop", "arguments": {"a": "b', "", [("stop", '{"a": "b')]),
        ('<tool_call>{"name": "stop", "arguments": {}}', "", [("stop", "{}")]),
        ('<tool_call>["stop"]</tool_call>', '<tool_call>["stop"]</tool_call>', []),
    ],
)
def test_whole_and_letter_by_letter(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse([text]) == ("", content, calls)
    assert parse(list(text)) == ("", content, calls)


def test_reasoning_comes_first_and_holds_no_calls() -> None:
    text = f"I could {STOP[1:]}\n</think>\n\nWell\n{STOP}"
    assert parse([text], reply_part="reasoning") == (f"I could {STOP[1:]}\n", "Well\n", [("stop", "{}")])
    assert parse([f"hm\n{STOP}"], reply_part="reasoning") == ("hm\n", "", [("stop", "{}")])


def test_without_parallel_calls_only_the_first_is_one() -> None:
    one = Tools(TOOLS.tools, parallel=False)
    assert parse([STOP + "\n" + STOP], one) == ("", "\n" + STOP, [("stop", "{}")])


def test_arguments_come_out_as_soon_as_they_are_certain() -> None:
    parser = FORM.call_parser(TOOLS)
    parser.feed("<tool_call>\n<function=look_up>\n<parameter=text>\n")
    assert [call.arguments for call in parser.feed("Hello ").calls] == ['"Hello ']
    assert parser.feed("\n</para").calls == ()
    assert [call.arguments for call in parser.feed("graph>").calls] == ["\\n</paragraph>"]
