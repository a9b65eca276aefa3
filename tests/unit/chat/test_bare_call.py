"""A reply that is nothing but the JSON of a call is a call, even without the tags of its format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.chat.call_formats.bare_call import BareCallParser
from pyctl.chat.call_formats.families import HERMES
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.reply import ParsedReply, ReplyDelta
from pyctl.chat.template import Template
from pyctl.chat.tool_definitions import Tools
from tests.effort import examples, work
from tests.unit.chat import toy
from tests.unit.chat.conftest import unpacked
from tests.unit.chat.test_replay import HI, TOOL

TOOLS = Tools.from_request([TOOL])
ARGUMENTS = '{ "days":3,\n"city":"Par\\u0069s"}'
BARE = f'{{"name": "look_up", "arguments": {ARGUMENTS}}}'
LONG = f'{{"name":"look_up","arguments":{{"city":"{"a{}[" * 9000}"}}}}'
FENCED = f"\n```json\n {BARE}\n```\n"
TAGGED = f"<tool_call>\n{BARE}\n</tool_call>"

CALLS = (BARE, f" \n{BARE}\n", FENCED, f"```\n{BARE}```", f"<think>hm</think>\n\n{BARE}", LONG)
TEXTS = (
    *(
        f"Here: {BARE}",
        f"{BARE} is it.",
        f"{BARE}\n{BARE}",
        f"[{BARE}]",
        f"{BARE}}}",
        BARE[:-1],
        "",
    ),
    *(
        f"``{BARE}``",
        f"```python\n{BARE}\n```",
        f"```json\n{BARE}",
        f"```json\n{BARE}\n```\nThat is it.",
        "```",
        "{",
    ),
    *(
        BARE.replace("look_up", "stop"),
        BARE.replace("name", "tool"),
        BARE.replace("arguments", "parameters"),
    ),
    BARE.replace("}}", '}, "id": 1}'),
    *(
        BARE.replace("\\u0069", "\\x"),
        BARE.replace(ARGUMENTS, '"Paris"'),
        BARE.replace(ARGUMENTS, "{3}"),
    ),
    *(
        BARE.replace('"city"', f'"days":{"[" * 9000}{"]" * 9000}, "city"'),
        BARE.replace("Par", "a" * (1 << 16)),
    ),
    *(
        '{"city": "Paris"}',
        "{" + " " * 2000 + BARE[1:],
        BARE[:-1] + " " * 2000 + "}",
        "<think>hm</think>\n\n{}",
    ),
)


def parser(tools: Tools = TOOLS) -> BareCallParser:
    return BareCallParser(HERMES.parser(tools, HERMES.reasoning[0], "start"), tools)


def read(pieces: list[str], tools: Tools = TOOLS) -> tuple[str, list[tuple[str, str]]]:
    """Return content and calls."""
    parts = parser(tools)
    reply = ParsedReply()
    for delta in (*map(parts.feed, pieces), parts.finish()):
        reply.add(delta)
    return reply.content, [(call.name, call.arguments) for call in reply.calls]


@settings(max_examples=examples(400))
@given(st.sampled_from((*CALLS, *TEXTS)), st.data())
def test_only_a_reply_that_is_one_call_is_a_call_however_it_is_cut(
    text: str, data: st.DataObject
) -> None:
    """A reply that is not a single call stays as it was written."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=40)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    arguments = LONG[LONG.index('{"c') : -1] if text == LONG else ARGUMENTS
    content = text.removeprefix("<think>hm</think>\n\n")
    assert read(pieces) == (("", [("look_up", arguments)]) if text in CALLS else (content, []))


def test_a_call_in_tags_is_read_as_before() -> None:
    assert read([*TAGGED]) == ("", [("look_up", ARGUMENTS)])
    within = BARE.replace("Par", f"Par{json.dumps(TAGGED)[1:-1]}")
    assert read([*within]) == (
        "",
        [("look_up", within[len('{"name": "look_up", "arguments": ') : -1])],
    )
    assert read([*f"{BARE}{TAGGED}"]) == (BARE, [("look_up", ARGUMENTS)])


def test_a_name_in_escapes_is_read_however_it_is_cut() -> None:
    name = "n" * 50
    tools = Tools.from_request([{"type": "function", "function": {"name": name}}])
    text = BARE.replace("look_up", "\\u006e" * 50)
    assert read([text], tools) == read([*text], tools) == ("", [(name, ARGUMENTS)])


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("Hello", ""),
        ("{ c", ""),
        ('{"name": "stop"', ""),
        ("```py", ""),
        (f"{BARE}x", ""),
        ("{" + " " * 1024, ""),
        (LONG + "a", ""),
        ('{"name": "look_up"', '{"name": "look_up"'),
        ("```js", "```js"),
        (FENCED.lstrip(), FENCED.lstrip()),
    ],
)
def test_text_is_held_back_only_while_it_may_be_a_call(text: str, held: str) -> None:
    parts = parser()
    said = "".join(parts.feed(letter).content for letter in text)
    assert said == (text if not held else "")
    assert parts.feed("!") == ReplyDelta(content=f"{held}!")


@pytest.mark.parametrize("sign", [" ", "\n", "a", "{", '"', "\\", '"name"', BARE, "`"])
@pytest.mark.parametrize(
    "begun", ["", "{", "```", BARE[:-1], BARE, FENCED, BARE[:45], '{"name": "']
)
def test_a_reply_is_read_in_linear_time(begun: str, sign: str) -> None:
    text = begun + sign * ((1 << 14) // len(sign))

    def read_all() -> None:
        parts = parser()
        for at in range(0, len(text), 8):
            parts.feed(text[at : at + 8])
        parts.finish()

    assert work(read_all) < 40 * len(text)


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"schema": {"type": "object"}}, [HI]),
        ({"tool_choice": "none"}, [HI]),
        ({"tools": None}, [HI]),
        ({"parse_tool_calls": False}, [HI]),
        ({}, [HI, {"role": "assistant", "content": "So: "}]),
    ],
)
def test_json_that_was_asked_for_is_text(
    fields: dict[str, Any], messages: list[dict[str, Any]]
) -> None:
    chat = ChatFormat(
        Template(unpacked("templates/Qwen-Qwen2.5-7B-Instruct.jinja").read_text()),
        toy.chatml_tokenizer(),
    )
    splitter = toy.prepare(chat, messages, **{"tools": [TOOL], **fields}).splitter()
    assert splitter.feed(BARE).content + splitter.finish().content == BARE
    calling = toy.prepare(chat, [HI], tools=[TOOL]).splitter()
    assert calling.feed(BARE) == ReplyDelta()
    assert calling.finish().calls[0].name == "look_up"
