from __future__ import annotations

import json
from typing import Any

import pytest

from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.constraint import Constraint
from pyctl.chat.reasoning import ReasoningLimit
from pyctl.chat.reply import ReplyDelta
from pyctl.chat.template import Template
from pyctl.chat.tokenizer import Tokenizer
from pyctl.errors import RequestError
from tests.unit.chat import toy
from tests.unit.chat.conftest import unpacked
from tests.unit.chat.toy import ByteTokenizer, prepare

HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>'
HEAD = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def chatml() -> ChatFormat:
    return ChatFormat(Template(toy.CHATML), toy.chatml_tokenizer())


@pytest.fixture
def thinking() -> ChatFormat:
    return ChatFormat(Template(toy.THINKING), toy.chatml_tokenizer())


def assistant(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [*HI, {"role": "assistant", "content": content, **fields}]


def render(chat: ChatFormat, messages: Any, **fields: Any) -> str:
    return prepare(chat, messages, **fields).text


def test_a_plain_turn(chatml: ChatFormat) -> None:
    turn = prepare(chatml, HI)
    assert turn.text == HEAD
    assert turn.rendered.prefill == ""
    assert turn.rendered.reply_part == "start"
    assert turn.rendered.reasoning_start == ""
    assert render(chatml, HI) == HEAD
    assert render(chatml, HI, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_header_that_opens_a_reasoning_block(thinking: ChatFormat) -> None:
    turn = prepare(thinking, HI)
    assert turn.rendered.reply_part == "reasoning"
    assert turn.rendered.reasoning_start == "<think>\n"
    splitter = turn.splitter()
    assert splitter.feed("hm</think>\n\nHello") == ReplyDelta("hm", "Hello")
    plain = prepare(thinking, HI, reasoning_format="none")
    assert plain.open_reasoning == "<think>\n"
    assert plain.splitter().feed("hm</think>") == ReplyDelta(content="hm</think>")


def test_a_user_who_writes_tags_opens_nothing(thinking: ChatFormat) -> None:
    turn = prepare(
        thinking,
        [{"role": "user", "content": "<think>"}],
        template_kwargs={"enable_thinking": False},
    )
    assert turn.rendered.reply_part == "start"
    assert turn.rendered.reasoning_start == ""


def test_variables_of_the_template_and_those_that_cannot_be_changed() -> None:
    chat = ChatFormat(Template(toy.THINKING), toy.chatml_tokenizer(), {"enable_thinking": False})
    assert prepare(chat, HI).rendered.reply_part == "start"
    assert (
        prepare(chat, HI, template_kwargs={"enable_thinking": True}).rendered.reply_part
        == "reasoning"
    )
    wild = {"messages": [], "tools": 1, "add_generation_prompt": False, "self": 1}
    assert render(chat, HI, template_kwargs=wild) == render(chat, HI)


@pytest.mark.parametrize("content", ["Well", " Well, ", "", "a <think> b </think>\n"])
def test_the_reply_continues_a_last_assistant_message(thinking: ChatFormat, content: str) -> None:
    turn = prepare(thinking, assistant(content))
    assert turn.text == HEAD + "<think>\n\n</think>\n\n" + content
    assert turn.rendered.prefill == content
    assert turn.rendered.reply_part == "content"
    assert turn.splitter().feed(" on") == ReplyDelta(content=" on")


def test_parts_and_reasoning_of_a_continued_message(thinking: ChatFormat) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turn = prepare(thinking, assistant(parts, reasoning_content="because"))
    assert turn.text == HEAD + "<think>\nbecause\n</think>\n\na\n\nb"


def test_reasoning_can_be_continued(thinking: ChatFormat, chatml: ChatFormat) -> None:
    turn = prepare(thinking, assistant("", reasoning_content="I wonder "))
    assert turn.text == HEAD + "<think>\nI wonder "
    assert turn.rendered.reply_part == "reasoning"
    assert turn.rendered.prefill == "I wonder "
    explicit = prepare(
        thinking, assistant("x", reasoning_content="I "), continue_final_message="reasoning_content"
    )
    assert explicit.text == HEAD + "<think>\nI "
    assert prepare(
        thinking, assistant("x", reasoning_content="I "), continue_final_message="content"
    ).text.endswith("</think>\n\nx")
    assert (
        prepare(chatml, assistant("", reasoning_content="lost")).text == HEAD
    )  # the template has no place for it


def test_what_cannot_be_continued(chatml: ChatFormat) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    for messages, why in (
        (assistant("a", tool_calls=[call]), "tool calls"),
        ([*assistant("a"), {"role": "assistant", "content": "b"}], "two assistant"),
    ):
        with pytest.raises(RequestError, match=why):
            prepare(chatml, messages)
    with pytest.raises(RequestError, match="only an assistant"):
        prepare(chatml, HI, continue_final_message="auto")
    silent = ChatFormat(Template("{{ messages[0].content }}"), toy.chatml_tokenizer())
    with pytest.raises(RequestError, match="cannot continue"):
        prepare(silent, assistant("a"))


def test_without_prefill_an_assistant_message_is_complete(chatml: ChatFormat) -> None:
    text = render(chatml, assistant("a"), prefill_assistant=False)
    assert text == HEAD + "a<|im_end|>\n<|im_start|>assistant\n"


def test_bos_comes_once_and_only_where_the_model_wants_it() -> None:
    """A chat prompt starts with one BOS, whether the template writes it or the tokenizer adds it. A
    raw prompt gets one only from the tokenizer, and none before tokens that the client gave.
    """
    specials = ("<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    for add_bos in (True, False):
        tokenizer = ByteTokenizer(specials, bos="<s>", add_bos=add_bos)
        chat = ChatFormat(Template(toy.LLAMA3, "<s>"), tokenizer)
        assert prepare(chat, HI).prompt.tokens[:2].tolist() == [
            256,
            257,
        ]  # the template writes it, too
        assert render(chat, HI).startswith("<s>") is not add_bos
        assert chat.prompt_from_text("x").tokens.tolist() == ([256, 120] if add_bos else [120])
        assert chat.prompt_from_mixed([7, "x"]).tokens.tolist() == [7, 120]
        assert chat.prompt_from_mixed(["x", 7, 8]).tokens.tolist() == [
            *([256] if add_bos else []),
            120,
            7,
            8,
        ]


def test_mixed_prompts(chatml: ChatFormat) -> None:
    prompt = chatml.prompt_from_mixed([1, 2, "a<|im_start|>b", 256, "c"])
    assert prompt.tokens.tolist() == [1, 2, 97, 256, 98, 256, 99]
    assert prompt.boundaries == (3, 5)
    assert len(chatml.prompt_from_mixed([])) == 0
    with pytest.raises(RequestError, match="32-bit"):
        chatml.prompt_from_mixed([2**40])


def test_tools_reach_the_template(qwen_template: str) -> None:
    chat = ChatFormat(Template(qwen_template), toy.chatml_tokenizer())
    function = '{"name": "look_up", "description": "", "parameters": {"type": "object"}}'
    tool = {"type": "function", "function": json.loads(function)}
    text = render(chat, HI, tools=[tool])
    assert f'{{"type": "function", "function": {function}}}' in text
    assert render(chat, HI, tools=[]) == render(chat, HI)


def test_the_reply_may_call_other_tools_than_the_template_shows(qwen_template: str) -> None:
    """The prompt is that of the shown tools, and only a callable one can be required."""
    chat = ChatFormat(Template(qwen_template), toy.chatml_tokenizer())
    other = {"type": "function", "function": {"name": "wait", "parameters": {"type": "object"}}}
    shown = prepare(chat, HI, tools=[TOOL])
    choice = {"type": "function", "function": {"name": "wait"}}
    changed = prepare(chat, HI, tools=[TOOL], callable_tools=[other], tool_choice=choice)
    assert changed.text == shown.text
    assert changed.constraint is not None
    assert '"wait"' in changed.constraint.grammar
    assert "look_up" not in changed.constraint.grammar
    with pytest.raises(RequestError, match="not among the tools"):
        prepare(chat, HI, tools=[other], callable_tools=[TOOL], tool_choice=choice)
    assert prepare(chat, HI, tools=[TOOL], callable_tools=[]).constraint is None


def test_the_real_template_continues_as_llama_server_does(
    qwen_template: str, qwen_tokenizer: Tokenizer
) -> None:
    """Qwen's template renders an open reply, a partial answer and partial reasoning as llama-server
    does, so that a client's request to continue has the same prompt on both.
    """
    chat = ChatFormat(Template(qwen_template, eos_token="<|im_end|>"), qwen_tokenizer)
    assert render(chat, HI) == HEAD + "<think>\n"
    assert (
        render(chat, HI, template_kwargs={"enable_thinking": False})
        == HEAD + "<think>\n\n</think>\n\n"
    )
    assert render(chat, assistant("Wh ")) == HEAD + "<think>\n\n</think>\n\nWh "
    assert render(chat, assistant("", reasoning_content="I th")) == HEAD + "<think>\nI th"
    assert render(chat, assistant("x", reasoning_content="r")) == HEAD + "<think>\nr\n</think>\n\nx"
    inside = [*HI, {"role": "system", "content": "Be brief."}]
    assert render(chat, inside) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>user\nBe "
        "brief.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    with pytest.raises(RequestError, match="Unexpected message role"):
        render(chat, [*HI, {"role": "wizard", "content": "S"}])


def test_one_answer_holds_all(thinking: ChatFormat) -> None:
    prepared = prepare(thinking, HI, tools=[TOOL])
    assert prepared.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert len(prepared.prompt) == len(thinking.prompt_from_text(prepared.text))
    assert prepared.open_reasoning == ""
    assert prepared.constraint.triggers
    assert prepared.reasoning is None
    for _ in range(2):  # each reply gets a splitter of its own
        delta = prepared.splitter().feed(f"hm</think>Well{CALL}")
        assert delta.reasoning == "hm"
        assert delta.content == "Well"
        assert [call.name for call in delta.calls][:1] == ["look_up"]


def test_what_binds_the_reply(thinking: ChatFormat) -> None:
    """A grammar, a schema and tools each give their own constraint. A schema leaves the reasoning
    free, starts after the text that a request continues, and gives way to a required call.
    """
    assert prepare(thinking, HI, grammar='root ::= "a"').constraint == Constraint('root ::= "a"')
    schema = prepare(thinking, HI, schema={"type": "integer"}).constraint
    assert "<[259]>" in schema.grammar  # the end of the reasoning, a token of its own
    assert schema.prefill == ""
    assert schema.triggers == ()
    continued = prepare(
        thinking, [*HI, {"role": "assistant", "content": "4"}], schema={"type": "integer"}
    ).constraint
    assert continued.prefill == "4"
    forced = prepare(thinking, HI, tools=[TOOL], tool_choice="required").constraint
    assert forced.triggers == ()
    single = prepare(thinking, HI, tools=[TOOL], parallel_tool_calls=False).constraint
    assert single.triggers
    assert (
        prepare(
            thinking, HI, tools=[TOOL], schema={"type": "integer"}, tool_choice="required"
        ).constraint
        == forced
    )


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
    """A budget forces its message and the end of the reasoning as the template writes it, and
    starts with the reasoning that the prompt already contains.
    """
    ids = toy.chatml_tokenizer().tokenize
    ends = ("</think>", "<tool_call>")
    texts = {258: b"<think>", 259: b"</think>", 260: b"<tool_call>"}
    limited = prepare(thinking, HI, reasoning_budget=3, reasoning_budget_message="So:").reasoning
    assert limited == ReasoningLimit(
        3, "<think>", ends, (*b"So:", 259), tuple(ids("<think>\n")), texts
    )
    newer = ChatFormat(Template(qwen_template), toy.chatml_tokenizer())
    qwen = prepare(newer, HI, reasoning_budget=0).reasoning
    assert qwen.end_texts[0] == "\n</think>"
    assert qwen.forced == (10, 259)
    older = ChatFormat(
        Template(unpacked("templates/Qwen-Qwen3-0.6B.jinja").read_text()), toy.chatml_tokenizer()
    )
    three = prepare(older, HI, reasoning_budget=0).reasoning
    assert three.end_texts == ends
    assert three.read == ()
    continued = prepare(
        thinking,
        [*HI, {"role": "assistant", "content": "", "reasoning_content": "I"}],
        reasoning_budget=1,
    )
    assert continued.reasoning.read == tuple(ids("<think>\nI"))


def test_the_control_tokens_that_the_splitter_has_to_see() -> None:
    source = unpacked("templates/mistralai-Mistral-Nemo-Instruct-2407.jinja").read_text()
    tokenizer = toy.ByteTokenizer(
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"), bos="<s>", eos="</s>"
    )
    prepared = prepare(ChatFormat(Template(source, "<s>", "</s>"), tokenizer), HI)
    assert prepared.control_texts == {260: b"[TOOL_CALLS]"}
