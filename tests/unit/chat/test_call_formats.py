"""What holds for every format of calls, on the real templates; each family has its own cases below."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.chat.call_formats import FORMATS, find_call_format
from pyctl.chat.call_formats.call_format import CallFormat
from pyctl.chat.call_formats.gpt_oss import HarmonyFormat
from pyctl.chat.call_formats.llama3 import LlamaFormat
from pyctl.chat.call_formats.mistral import MistralFormat, MistralListFormat
from pyctl.chat.call_formats.qwen import HermesFormat, QwenFormat
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.constraint import reply_constraint
from pyctl.chat.reply import ReplyPart
from pyctl.chat.template import Template
from pyctl.chat.tools import Tools
from tests.effort import examples
from tests.unit.chat.accepted import accepts
from tests.unit.chat.conftest import unpacked
from tests.unit.chat.parsing import STOP_TOOL, TOOLS, Parsed, parse_reply
from tests.unit.chat.toy import ByteTokenizer, prepare


@dataclass(frozen=True)
class Family:
    """A template with its format: what stands before and after a reply, and texts that lead its parser astray."""

    name: str
    form: CallFormat
    header: str
    end: str
    call: str
    marks: tuple[str, ...]

    def template(self) -> Template:
        return _template(self.name)


@cache
def _template(name: str) -> Template:
    return Template(unpacked(f"templates/{name}.jinja").read_text(), "<s>", "</s>")


LLAMA = ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>")
LLAMA_CALL = '{"name": "stop", "parameters": {}}'
LLAMA_MARKS = ("<|python_tag|>", "stop", ".call(", ")", "=", "'", ";", '{"name": "stop", "parameters": ', '"type"')
MISTRAL_MARKS = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "Ab3dEf7hI", "[THINK]", "[/THINK]", "stop")
LIST_CALL = '[TOOL_CALLS][{"name": "stop", "arguments": {}, "id": "Ab3dEf7hI"}]'
NAMED_CALL = "[TOOL_CALLS]stop[ARGS]{}"
HARMONY_MARKS = (
    *("<|start|>", "assistant", "<|channel|>", "analysis", "final", "commentary", "<|message|>", "<|end|>", "<|call|>"),
    *(" to=functions.stop", "to=", "<|return|>", " <|constrain|>", "json", "<|start|>assistant"),
)
FAMILIES = (
    Family(
        "Qwen3.5-4B",
        QwenFormat(),
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
        "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
        ("<tool_call>", "</tool_call>", "<function=stop>", "</function>", "<parameter=text>", "</parameter>"),
    ),
    Family(
        "Qwen-Qwen3-0.6B",
        HermesFormat(),
        "<|im_start|>assistant\n",
        "<|im_end|>\n",
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        ("<tool_call>", "</tool_call>", '{"name": "stop", "arguments": '),
    ),
    Family("meta-llama-Llama-3.1-8B-Instruct", LlamaFormat(), *LLAMA, LLAMA_CALL, LLAMA_MARKS),
    Family("meta-llama-Llama-3.3-70B-Instruct", LlamaFormat(), *LLAMA, LLAMA_CALL, LLAMA_MARKS),
    Family("mistralai-Mistral-Nemo-Instruct-2407", MistralListFormat(), "[/INST]", "</s>", LIST_CALL, MISTRAL_MARKS),
    Family("Mistral-Small-3.2-24B-Instruct-2506", MistralFormat(), "[/INST]", "</s>", NAMED_CALL, MISTRAL_MARKS),
    Family("mistralai-Ministral-3-14B-Reasoning-2512", MistralFormat(), "[/INST]", "</s>", NAMED_CALL, MISTRAL_MARKS),
    Family(
        "openai-gpt-oss-120b",
        HarmonyFormat(),
        "<|start|>assistant",
        "<|call|>",
        "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}<|call|>",
        HARMONY_MARKS,
    ),
)
BY_NAME = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
HI = {"role": "user", "content": "Hi"}
NOISE = ("\n", " ", "<", "[", "]", "{", "}", '"', "\\", ",", ":", "é", "7", "null", "x", "<think>", "</think>", "text")


def parse(form: CallFormat, text: str, tools: Tools | None = TOOLS, reply_part: ReplyPart = "start") -> Parsed:
    """Whole and letter by letter, which gives the same."""
    whole = parse_reply(form, [text], tools, reply_part)
    assert parse_reply(form, list(text), tools, reply_part) == whole
    return whole


def calls_of(parsed: Parsed) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in parsed[2]]


@BY_NAME
def test_the_format_is_found_by_rendering(family: Family) -> None:
    template = family.template()
    assert type(find_call_format(template)) is type(family.form)


def test_every_format_is_tested() -> None:
    assert {type(form) for form in FORMATS} == {type(family.form) for family in FAMILIES}


@BY_NAME
@settings(max_examples=examples(40), deadline=None)
@given(
    arguments=st.fixed_dictionaries(
        {},
        optional={
            "text": st.text(max_size=30).filter(lambda text: "</" not in text and "<|" not in text),
            "count": st.integers(-(10**12), 10**12),
            "where": st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=5), max_size=3),
            "tags": st.lists(st.none() | st.booleans() | st.text(max_size=5), max_size=4),
        },
    ),
    n_calls=st.integers(1, 3),
)
def test_every_rendered_call_parses_back(family: Family, arguments: dict[str, Any], n_calls: int) -> None:
    template = family.template()
    n_calls = 1 if family.form.control_tokens in (LlamaFormat.control_tokens, HarmonyFormat.control_tokens) else n_calls
    call = {"type": "function", "id": "Ab3dEf7hI", "function": {"name": "look_up", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call] * n_calls}
    tools = [{"type": "function", "function": STOP_TOOL}]
    text = template.render([HI, message], tools=tools, add_generation_prompt=False)
    reply = text[text.rindex(family.header) + len(family.header) :].removesuffix(family.end).lstrip("\n")
    parsed = parse(family.form, reply)
    assert calls_of(parsed) == [("look_up", arguments)] * n_calls
    assert parsed[1].strip() == ""


@BY_NAME
@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_any_cutting_gives_the_same(family: Family, data: st.DataObject) -> None:
    noise = st.lists(st.sampled_from((*NOISE, *family.marks)) | st.text(max_size=3), max_size=10).map("".join)
    cut_off = st.integers(0, len(family.call)).map(lambda size: family.call[:size])
    text = "".join(data.draw(st.lists(noise | cut_off | st.just(family.call), max_size=4)))
    reply_part: ReplyPart = data.draw(st.sampled_from(("start", "reasoning", "content")))
    tools = data.draw(st.sampled_from((TOOLS, Tools(TOOLS.tools, parallel=False), None)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(family.form, text, tools, reply_part)
    assert parse_reply(family.form, pieces, tools, reply_part) == whole
    if not whole[2] and reply_part == "content" and family.form.control_tokens != HarmonyFormat.control_tokens:
        assert whole[1] == text


@BY_NAME
@settings(max_examples=examples(60), deadline=None)
@given(text=st.lists(st.sampled_from(NOISE) | st.text(max_size=8), max_size=10).map("".join))
def test_what_has_no_marks_is_content_but_for_the_blanks_before_it(family: Family, text: str) -> None:
    marks = ["<think>", *(mark for mark in family.marks if mark.lstrip()[0] in "<[")]
    for tools in (TOOLS, None):
        if text.strip() and not any(mark in text for mark in marks):
            kept = text if isinstance(family.form, HarmonyFormat) else text.lstrip()
            assert parse(family.form, text, tools) == ("", kept, [])


@BY_NAME
def test_a_call_behind_reasoning_and_one_that_is_cut_off(family: Family) -> None:
    tags = family.form.reasoning[0]
    reasoning, content, calls = parse(family.form, f"{tags.open}hm{tags.close}{tags.next_message}{family.call}")
    assert (reasoning, content.strip(), calls) == ("hm", "", [("stop", "{}")])
    begun = family.call.replace("{}", '{"a": [1, "b')
    if begun != family.call:
        assert parse(family.form, begun.partition("b")[0] + "b")[2] in ([("stop", '{"a": [1, "b')], [])


@BY_NAME
def test_a_forced_call_is_bound_to_the_form_that_is_read(family: Family) -> None:
    form, call = family.form, family.call.removesuffix("<|call|>")
    stop = Tools(TOOLS.tools[1:], parallel=False, forced=True)
    assert accepts(form.constraint(stop, form.reasoning[0], "content"), call)
    assert not accepts(form.constraint(stop, form.reasoning[0], "content"), call.replace("stop", "other"))
    tags = form.reasoning[0]
    behind = form.constraint(stop, tags, "start")
    assert accepts(behind, f"{tags.open}hm{tags.close}{tags.next_message}{call}")
    assert accepts(behind, call)
    optional = form.constraint(Tools(stop.tools, parallel=False), tags, "start")
    assert any(re.search(trigger, family.call) for trigger in optional.triggers)
    if isinstance(form, HarmonyFormat):
        return  # whose replies end with a call
    twice = f"{call}\n{call}"
    if isinstance(form, MistralListFormat):
        twice = call.replace("]", "") + ', {"name": "stop", "arguments": {}, "id": "0123abcDE"}]'
        twice = twice.replace("[TOOL_CALLS", "[TOOL_CALLS]")
    assert len(parse(form, twice)[2]) == 2
    assert accepts(form.constraint(Tools(stop.tools, forced=True), tags, "content"), twice)


def test_content_by_a_schema_comes_on_its_channel() -> None:
    (tags,) = HarmonyFormat.reasoning
    bound = reply_constraint({"type": "integer"}, tags, "start")
    assert accepts(bound, "<|channel|>final<|message|>42")
    assert accepts(bound, f"{tags.open}hm<|end|><|start|>assistant<|channel|>final<|message|>42")
    assert not accepts(bound, "42")
    assert accepts(reply_constraint({"type": "integer"}, tags, "content"), "42")


class TestLlama:
    form = LlamaFormat()

    @pytest.mark.parametrize(
        ("text", "content", "calls"),
        [
            ('\n{"name": "look_up", "parameters": {"text": "}"}}', "", [("look_up", {"text": "}"})]),
            ('{"type": "function", "name": "stop", "parameters": {}}', "", [("stop", {})]),
            ('{"name": "stop", "arguments": {"a": 1}}', "", [("stop", {"a": 1})]),
            ('<|python_tag|>{"name": "stop", "parameters": {}}', "", [("stop", {})]),
            (f"{LLAMA_CALL}; {LLAMA_CALL}\n{LLAMA_CALL}", "", [("stop", {})] * 3),
            (
                "<|python_tag|>look_up.call(text=\"a, (b\", count=3, tags=['x', None], ratio=1e3)",
                "",
                [("look_up", {"text": "a, (b", "count": 3, "tags": ["x", None], "ratio": 1000.0})],
            ),
            ("<|python_tag|>stop.call()", "", [("stop", {})]),
            # content: an unknown function, JSON that is an answer, a call in the middle of a sentence
            ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
            ('{"answer": 42}', '{"answer": 42}', []),
            (f"I say {LLAMA_CALL}", f"I say {LLAMA_CALL}", []),
            ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
            ("<|python_tag|>stop.call(1)", "<|python_tag|>stop.call(1)", []),
            ("<|python_tag|>stop.call(text='a", "<|python_tag|>stop.call(text='a", []),
        ],
    )
    def test_replies(self, text: str, content: str, calls: list[Any]) -> None:
        parsed = parse(self.form, text)
        assert (parsed[1], calls_of(parsed)) == (content, calls)

    def test_json_that_is_no_call_is_not_held_back_for_long(self) -> None:
        parser = self.form.call_parser(TOOLS)
        assert parser.feed('{"an').content == '{"an'
        text = '{"type": "' + "x" * 10_000
        held = self.form.call_parser(TOOLS)
        assert len("".join(held.feed(piece).content for piece in text)) > 5_000

    def test_arguments_come_out_as_they_stream(self) -> None:
        parser = self.form.call_parser(TOOLS)
        parser.feed('{"name": "look_up", "parameters": {"text": "a')
        assert [call.arguments for call in parser.feed("bc").calls] == ["bc"]


class TestMistral:
    form = MistralFormat()

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
        assert (parsed[1], calls_of(parsed)) == (content, calls)

    def test_calls_get_ids_that_the_templates_take(self) -> None:
        (given,) = self.form.call_parser(TOOLS).feed("[TOOL_CALLS]stop[CALL_ID]0123abcDE[ARGS]{").calls[:1]
        (made,) = self.form.call_parser(TOOLS).feed("[TOOL_CALLS]stop[ARGS]{").calls[:1]
        assert given.id == "0123abcDE"
        assert len(made.id) == 9
        assert made.id.isalnum()


class TestHarmony:
    form = HarmonyFormat()

    @pytest.mark.parametrize(
        ("text", "parsed"),
        [
            ("<|channel|>final<|message|>Hi", ("", "Hi", [])),
            (
                "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
                ("hm", "Hi", []),
            ),
            (
                ' to=functions.stop<|channel|>commentary json<|message|>{"a": 1}<|call|>',
                ("", "", [("stop", '{"a": 1}')]),
            ),
            (
                "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
                "<|start|>assistant<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}<|call|>",
                ("a", "I look.", [("stop", "{}")]),
            ),
            ("<|channel|>commentary to=functions.stop<|message|><|call|>", ("", "", [("stop", "{}")])),
            ("<|channel|>commentary to=functions.stop<|message|>", ("", "", [("stop", "")])),
            ("<|message|>Hi", ("", "Hi", [])),
            ("Hi", ("", "Hi", [])),
            ("<|channel|>fin", ("", "<|channel|>fin", [])),
            ("<|channel|>" + "x" * 500, ("", "<|channel|>" + "x" * 500, [])),
            ("a<|end|><|start|>user<|message|>b", ("", "a<|start|>user<|message|>b", [])),
            (
                "<|channel|>commentary to=python<|message|>1",
                ("", "<|channel|>commentary to=python<|message|>1", []),
            ),
        ],
    )
    def test_replies(self, text: str, parsed: Parsed) -> None:
        assert parse(self.form, text) == parsed

    def test_without_tools_a_call_is_content_and_without_tags_reasoning_is(self) -> None:
        call = "<|channel|>commentary to=functions.stop<|message|>{}"
        assert parse(self.form, call, None) == ("", call, [])
        raw = self.form.parser(None, None, "start")
        text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
        assert raw.feed(text).content + raw.finish().content == "<|channel|>analysis<|message|>hmHi"

    def test_what_is_continued_begins_in_its_part(self) -> None:
        assert parse(self.form, "on<|return|>", reply_part="content") == ("", "on", [])
        assert parse(self.form, "on<|end|><|start|>assistant<|message|>a", reply_part="reasoning") == ("on", "a", [])

    def test_reasoning_before_a_call_goes_back_into_the_prompt(self) -> None:
        template = Template(unpacked("templates/openai-gpt-oss-120b.jinja").read_text())
        chat = ChatFormat(template, ByteTokenizer(("<|start|>", "<|end|>", "<|return|>"), eos="<|return|>"))
        call = {"type": "function", "function": {"name": "stop", "arguments": "{}"}}
        answer = {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]}
        text = prepare(chat, [HI, answer, {"role": "tool", "tool_call_id": "x", "content": "done"}]).text
        assert "<|start|>assistant<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.stop" in text
