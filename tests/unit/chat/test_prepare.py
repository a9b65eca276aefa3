from __future__ import annotations

from typing import Any

import pytest

from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.constraint import Constraint
from pyctl.chat.reply import ReplyDelta
from pyctl.chat.template import Template
from pyctl.errors import RequestError
from pyctl.reasoning import ReasoningLimit
from tests.unit.chat import toy
from tests.unit.chat.conftest import unpacked
from tests.unit.chat.toy import prepare

HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'


@pytest.fixture
def thinking() -> ChatFormat:
    return ChatFormat(Template(toy.THINKING), toy.chatml_tokenizer())


def test_one_answer_holds_all(thinking: ChatFormat) -> None:
    prepared = prepare(thinking, HI, tools=[TOOL])
    assert prepared.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert len(prepared.prompt) == len(thinking.prompt_from_text(prepared.text))
    assert prepared.open_reasoning == ""
    assert prepared.constraint.triggers
    assert prepared.reasoning is None
    for _ in range(2):  # each reply gets a splitter of its own
        (delta,) = (prepared.splitter().feed(f"hm</think>Well{CALL}"),)
        assert (delta.reasoning, delta.content, [call.name for call in delta.calls][:1]) == ("hm", "Well", ["look_up"])


def test_without_a_reasoning_format_the_content_begins_with_the_open_tag(thinking: ChatFormat) -> None:
    prepared = prepare(thinking, HI, reasoning_format="none")
    assert prepared.open_reasoning == "<think>\n"
    assert prepared.splitter().feed("hm</think>") == ReplyDelta(content="hm</think>")


def test_what_binds_the_reply(thinking: ChatFormat) -> None:
    assert prepare(thinking, HI, grammar='root ::= "a"').constraint == Constraint('root ::= "a"')
    schema = prepare(thinking, HI, schema={"type": "integer"}).constraint
    assert "<[259]>" in schema.grammar  # the end of the reasoning, a token of its own
    assert (schema.prefill, schema.triggers) == ("", ())
    continued = prepare(thinking, [*HI, {"role": "assistant", "content": "4"}], schema={"type": "integer"}).constraint
    assert continued.prefill == "4"
    forced = prepare(thinking, HI, tools=[TOOL], tool_choice="required").constraint
    assert forced.triggers == ()
    single = prepare(thinking, HI, tools=[TOOL], parallel_tool_calls=False).constraint
    assert single.triggers
    assert prepare(thinking, HI, tools=[TOOL], schema={"type": "integer"}, tool_choice="required").constraint == forced


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tools": {}}, "must be a list of objects"),
        ({"tools": [{"type": "x"}]}, r"tools\[0\] must be of type function"),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "must be auto, none, required or an object"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x', which is none"),
        ({"tools": [TOOL], "grammar": ""}, "Cannot use custom grammar constraints with tools"),
    ],
)
def test_what_is_wrong_is_said_at_once(thinking: ChatFormat, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        prepare(thinking, HI, **fields)


def test_what_is_wrong_with_a_constraint_is_said_when_it_is_asked_for(thinking: ChatFormat) -> None:
    for fields, why in (
        ({"schema": {}, "grammar": "x"}, "both json_schema and grammar"),
        ({"schema": {"type": "nothing"}}, "Field 'json_schema': JSON schema conversion failed"),
    ):
        prepared = prepare(thinking, HI, **fields)
        assert prepared.text
        with pytest.raises(RequestError, match=why):
            _ = prepared.constraint


def test_the_tokens_of_a_reasoning_budget(thinking: ChatFormat, qwen_template: str) -> None:
    ids = toy.chatml_tokenizer().tokenize
    ends, texts = ("</think>", "<tool_call>"), {258: b"<think>", 259: b"</think>", 260: b"<tool_call>"}
    limited = prepare(thinking, HI, reasoning_budget=3, reasoning_budget_message="So:").reasoning
    assert limited == ReasoningLimit(3, "<think>", ends, (*b"So:", 259), tuple(ids("<think>\n")), texts)
    newer = ChatFormat(Template(qwen_template), toy.chatml_tokenizer())
    qwen = prepare(newer, HI, reasoning_budget=0).reasoning
    assert (qwen.ends[0], qwen.forced) == ("\n</think>", (10, 259))  # the tag has a line of its own
    older = ChatFormat(Template(unpacked("templates/Qwen-Qwen3-0.6B.jinja").read_text()), toy.chatml_tokenizer())
    three = prepare(older, HI, reasoning_budget=0).reasoning
    assert (three.ends, three.read) == (ends, ())
    continued = prepare(
        thinking, [*HI, {"role": "assistant", "content": "", "reasoning_content": "I"}], reasoning_budget=1
    )
    assert continued.reasoning.read == tuple(ids("<think>\nI"))


def test_the_control_tokens_that_the_splitter_has_to_see() -> None:
    source = unpacked("templates/mistralai-Mistral-Nemo-Instruct-2407.jinja").read_text()
    tokenizer = toy.ByteTokenizer(("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"), bos="<s>", eos="</s>")
    prepared = prepare(ChatFormat(Template(source, "<s>", "</s>"), tokenizer), HI)
    assert prepared.control_texts == {260: b"[TOOL_CALLS]"}
