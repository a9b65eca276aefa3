"""Every call format, on the real templates; each family has its own cases below."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.chat.call_formats import FORMATS, find_call_format
from pyctl.chat.call_formats.families import FALLBACK
from pyctl.chat.call_formats.llama3 import LlamaFormat
from pyctl.chat.call_formats.message_format import HARMONY, MessageFormat
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.constraint import reply_constraint
from pyctl.chat.replay import Replay
from pyctl.chat.reply import ParsedReply, ReplyPart
from pyctl.chat.template import Template
from pyctl.chat.tool_definitions import Tools
from tests.effort import examples
from tests.unit.chat import toy
from tests.unit.chat.accepted import accepts
from tests.unit.chat.conftest import unpacked
from tests.unit.chat.families import (
    BY_NAME,
    CASES,
    HI,
    Family,
    calls_of,
    parse,
)
from tests.unit.chat.parsing import STOP_TOOL, TOOLS, parse_reply
from tests.unit.chat.toy import ByteTokenizer, prepare

NOISE = (
    "\n",
    " ",
    "<",
    "[",
    "]",
    "{",
    "}",
    '"',
    "\\",
    ",",
    ":",
    "é",
    "7",
    "null",
    "x",
    "<think>",
    "</think>",
    "text",
)


@BY_NAME
def test_the_format_is_found_by_rendering(family: Family) -> None:
    template = family.template()
    assert find_call_format(template).name == family.form.name


@pytest.mark.parametrize("name", ["Kimi-K3", "MiniMax-M3", "muse-glimmer"])
def test_calls_of_an_unknown_format_are_rendered_and_come_as_text(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A template whose call format is unknown still serves: a warning is logged, calls of the
    history are rendered, and a reply in that form comes back as content, with no call lost in
    parsing.
    """
    chat = ChatFormat(Template(unpacked(f"templates/{name}.jinja").read_text()), ByteTokenizer(()))
    assert chat.dialect.call_format is FALLBACK
    assert "unknown format of the chat template" in caplog.text
    call = {"type": "function", "id": "a", "function": {"name": "stop", "arguments": "{}"}}
    asked = [
        HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {**HI, "role": "tool", "tool_call_id": "a"},
    ]
    turn = prepare(chat, asked, tools=[{"type": "function", "function": STOP_TOOL}])
    reply = turn.text[turn.text.index(HI["content"]) + 2 : turn.text.rindex(HI["content"])]
    assert "stop" in reply
    splitter = turn.splitter()
    parsed = ParsedReply()
    for delta in (splitter.feed(reply), splitter.finish()):
        parsed.add(delta)
    assert parsed.content.strip() == reply.strip()
    assert parsed.calls == []


def test_a_template_without_calls_has_the_fallback() -> None:
    assert find_call_format(Template(toy.LLAMA3)) is FALLBACK


def test_every_format_is_tested() -> None:
    assert {form.name for form in FORMATS} - {"Granite 3"} == {family.form.name for family in CASES}


LITERALS = ("true", "false", "null")  # in a text without quotes they are no words
PLAIN = st.text(st.characters(categories=("Ll",)), min_size=1, max_size=6).filter(
    lambda text: text not in LITERALS
)
KEYS = {False: st.text(max_size=4), True: PLAIN}


def arguments_of(*, is_plain: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Return arguments of a call; with ``is_plain`` nothing in them would need an escape."""
    others = st.booleans() | st.none()
    words = (
        PLAIN
        if is_plain
        else st.text(max_size=30).filter(lambda text: "</" not in text and "<|" not in text)
    )
    inner = PLAIN if is_plain else st.text(max_size=5)
    return st.fixed_dictionaries(
        {},
        optional={
            "text": words,
            "count": st.integers(-(10**12), 10**12),
            "deep": st.booleans(),
            "where": st.dictionaries(KEYS[is_plain], st.integers() | inner, max_size=3),
            "tags": st.lists(others | inner, max_size=4),
        },
    )


def reply_of(family: Family, arguments: dict[str, Any], n_calls: int) -> str:
    """Return the reply with these calls, as the template renders it."""
    given = arguments if family.template().capabilities.object_arguments else json.dumps(arguments)
    call = {
        "type": "function",
        "id": "Ab3dEf7hI",
        "function": {"name": "look_up", "arguments": given},
    }
    message = {"role": "assistant", "content": "", "tool_calls": [call] * n_calls}
    tools = [{"type": "function", "function": STOP_TOOL}]
    text = family.template().render([HI, message], tools=tools, add_generation_prompt=False)
    reply = text[text.index(family.header, text.rindex(HI["content"])) + len(family.header) :]
    reply = reply[: reply.rindex(family.end)] if family.end else reply
    return reply.lstrip("\n")


@BY_NAME
@settings(max_examples=examples(20))
@given(st.data())
def test_every_rendered_call_parses_back(family: Family, data: st.DataObject) -> None:
    capabilities = family.template().capabilities
    arguments = data.draw(arguments_of(is_plain=family.is_plain))
    n_calls = data.draw(st.integers(1, 3 if capabilities.parallel_calls else 1))
    parsed = parse(family.form, reply_of(family, arguments, n_calls))
    assert calls_of(parsed) == [("look_up", arguments)] * n_calls
    assert parsed[1].strip() == ""


QUOTED = (
    "don't",
    'it\'s "so"',
    "a', b='c",
    "'",
    '"',
    "''",
    "'a'",
    "dogs' bones",
    "x'y'",
    'a", "b": "c',
    "f(x='1')",
    "it's (so)",
)


@BY_NAME
@pytest.mark.parametrize("text", QUOTED)
@pytest.mark.parametrize("others", [{}, {"count": 3}])
def test_quotes_within_a_value_are_a_part_of_it(
    family: Family, text: str, others: dict[str, Any]
) -> None:
    """Quotes within a value are read as the template writes them, also where the template escapes
    nothing.
    """
    if family.name == "CohereForAI-c4ai-command-r-plus-tool_use" and '"' in text:
        pytest.skip("its template writes JSON without escapes, which no reader can understand")
    arguments = {"text": text, **others}
    assert calls_of(parse(family.form, reply_of(family, arguments, 1))) == [("look_up", arguments)]


@BY_NAME
@settings(max_examples=examples(60))
@given(st.data())
def test_any_cutting_gives_the_same(family: Family, data: st.DataObject) -> None:
    noise = st.lists(
        st.sampled_from((*NOISE, *family.marks)) | st.text(max_size=3), max_size=10
    ).map("".join)
    cut_off = st.integers(0, len(family.call)).map(lambda size: family.call[:size])
    text = "".join(data.draw(st.lists(noise | cut_off | st.just(family.call), max_size=4)))
    reply_part: ReplyPart = data.draw(st.sampled_from(("start", "reasoning", "content")))
    tools = data.draw(st.sampled_from((TOOLS, Tools(TOOLS.tools, parallel=False), None)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(family.form, text, tools, reply_part)
    assert parse_reply(family.form, pieces, tools, reply_part) == whole
    if not whole[2] and reply_part == "content" and not isinstance(family.form, MessageFormat):
        assert whole[1] == text


@BY_NAME
@settings(max_examples=examples(20))
@given(text=st.lists(st.sampled_from(NOISE) | st.text(max_size=8), max_size=10).map("".join))
def test_what_has_no_marks_is_content_but_for_the_blanks_before_it(
    family: Family, text: str
) -> None:
    marks = ["<think>", *(mark for mark in family.marks if mark.lstrip()[0] in "<[")]
    for tools in (TOOLS, None):
        if text.strip() and not any(mark in text for mark in marks):
            kept = text if isinstance(family.form, MessageFormat) else text.lstrip()
            assert parse(family.form, text, tools) == ("", kept, [])


@BY_NAME
def test_a_call_behind_reasoning_and_one_that_is_cut_off(family: Family) -> None:
    tags = family.form.reasoning[0]
    reasoning, content, calls = parse(
        family.form, f"{tags.open}hm{tags.close}{tags.next_message}{family.call}"
    )
    assert reasoning == "hm"
    assert content.strip() == ""
    assert calls == [("stop", "{}")]
    begun = family.call.replace("{}", '{"a": [1, "b')
    if begun != family.call and not family.is_plain:
        assert parse(family.form, begun.partition("b")[0] + "b")[2] in (
            [("stop", '{"a": [1, "b')],
            [],
        )


@BY_NAME
def test_a_forced_call_is_bound_to_the_form_that_is_read(family: Family) -> None:
    """The grammar of a forced call accepts only a call that the parser of the same family reads: of
    a tool that exists, after reasoning where that may come first, and twice where calls are
    parallel.
    """
    form = family.form
    call = family.call.removesuffix("<|call|>")
    stop = Tools(TOOLS.tools[1:], parallel=False, forced=True)
    assert accepts(form.constraint(stop, form.reasoning[0], "content"), call)
    assert not accepts(
        form.constraint(stop, form.reasoning[0], "content"), call.replace("stop", "other")
    )
    tags = form.reasoning[0]
    behind = form.constraint(stop, tags, "start")
    assert accepts(behind, f"{tags.open}hm{tags.close}{tags.next_message}{call}")
    assert accepts(behind, call)
    optional = form.constraint(Tools(stop.tools, parallel=False), tags, "start")
    assert any(re.search(trigger, family.call) for trigger in optional.triggers)
    if form is HARMONY:
        return  # whose replies end with a call
    twice = f"{call}\n{call}" if isinstance(form, LlamaFormat) else family.twice
    assert len(parse(form, twice)[2]) == 2
    assert accepts(form.constraint(Tools(stop.tools, forced=True), tags, "content"), twice)


OTHER_WORDS = {
    "ByteDance-Seed-OSS": "writes objects as Python does",
    "openbmb-MiniCPM5-1B": "writes objects as Python does",
    "openai-gpt-oss-120b": "writes the recipient before the channel",
}
"""Templates that write calls in other words than the model is bound to."""


@BY_NAME
def test_a_grammar_takes_what_the_template_writes(family: Family) -> None:
    """But for the templates in `OTHER_WORDS`, a grammar accepts a call as the template renders it
    in a history, so that a model may imitate its history. A call without a required argument is
    rejected.
    """
    parameters = {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "where": {"type": "object"},
            "tags": {"type": "array"},
        },
        "required": ["text"],
    }
    tool = {"type": "function", "function": {"name": "look_up", "parameters": parameters}}
    tags = family.form.tags(family.template().source)
    bound = family.form.constraint(
        Tools.from_request([tool], parallel=True, forced=True), tags, "content"
    )

    def taken(arguments: dict[str, Any]) -> bool:
        reply = re.sub(
            rf"^\s*{re.escape(tags.open)}\s*{re.escape(tags.close)}\s*",
            "",
            reply_of(family, arguments, 1),
        )
        return accepts(bound, reply.strip("\n"))

    whole = {"text": "Paris", "count": 3, "where": {"a": 1, "b": "x"}, "tags": [1, "x"]}
    assert taken(whole) is (family.name not in OTHER_WORDS)
    assert taken({"text": "Paris"}) is (family.name != "openai-gpt-oss-120b")
    assert not taken({"count": 3})


NEED_CALLS = {
    "MiniMax-M2": ("]~!b[", "]~b]", "[e~["),
    "openai-gpt-oss-120b": (
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ),
}
"""Templates that refuse a result without a call before it, and special tokens of their models."""


@BY_NAME
def test_a_reply_that_calls_goes_back_into_the_prompt_as_it_was_sampled(family: Family) -> None:
    start = family.header.removesuffix(">>>").strip().removesuffix("</think>")
    chat = ChatFormat(
        family.template(), ByteTokenizer(NEED_CALLS.get(family.name, (start,))), replay=Replay()
    )
    if not chat.dialect.marks.replay.n_bytes and chat.dialect.starts == ():
        pytest.skip("nothing begins a message here")
    tools = [{"type": "function", "function": STOP_TOOL}]
    turn = prepare(chat, [HI], tools=tools)
    reasons = turn.rendered.reply_part == "reasoning"
    sampled = (f"hm{chat.dialect.tags.close}" if reasons else "") + family.call + " "
    said = toy.told(turn, sampled)
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["stop"]
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "done"}
    following = prepare(chat, [HI, said, result], tools=tools).prompt.tokens.tolist()
    before = [*turn.prompt.tokens.tolist(), *sampled.encode()]
    assert following[: len(before)] == before


@pytest.mark.parametrize("name", NEED_CALLS)
def test_a_whole_chain_of_calls_stays_as_it_was_sampled(name: str) -> None:
    """Each prompt of a conversation with single and repeated calls starts with the exact tokens of
    the prompt and reply before it. Only then does the prefix cache resume at the end of the reply.
    """
    family = next(each for each in CASES if each.name == name)
    chat = ChatFormat(family.template(), ByteTokenizer(NEED_CALLS[name]), replay=Replay())
    tools = [{"type": "function", "function": STOP_TOOL}]
    last = {"openai-gpt-oss-120b": "<|channel|>final<|message|>Well"}.get(
        name, f"hm{chat.dialect.tags.close}Well"
    )
    calls = family.call if isinstance(family.form, MessageFormat) else family.twice
    messages = [HI]
    before = list[int]()
    for sampled in (family.call, calls, last, last):
        turn = prepare(chat, messages, tools=tools, parallel_tool_calls=True)
        tokens = turn.prompt.tokens.tolist()
        assert tokens[: len(before)] == before
        if turn.rendered.reply_part == "reasoning" and chat.dialect.tags.close not in sampled:
            sampled = f"so{chat.dialect.tags.close}{sampled}"
        said = toy.told(turn, sampled)
        before = [*tokens, *sampled.encode()]
        calls_said = said.get("tool_calls", ())
        messages += [
            said,
            *({"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls_said),
        ]
        messages += [] if calls_said else [HI]


def test_content_by_a_schema_comes_on_its_channel() -> None:
    (tags,) = HARMONY.reasoning
    bound = reply_constraint({"type": "integer"}, tags, "start")
    assert accepts(bound, "<|channel|>final<|message|>42")
    assert accepts(bound, f"{tags.open}hm<|end|><|start|>assistant<|channel|>final<|message|>42")
    assert not accepts(bound, "42")
    assert accepts(reply_constraint({"type": "integer"}, tags, "content"), "42")
