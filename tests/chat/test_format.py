from __future__ import annotations

from typing import Any

import pytest

from pyctl.chat.cached_tokenizer import Tokenizer
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.reasoning import ReplyDelta
from pyctl.chat.template import Template
from pyctl.errors import RequestError
from tests.chat import toy
from tests.chat.toy import ByteTokenizer

HI = [{"role": "user", "content": "Hi"}]
HEAD = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def chatml() -> ChatFormat:
    return ChatFormat(Template(toy.CHATML), toy.chatml_tokenizer())


@pytest.fixture
def thinking() -> ChatFormat:
    return ChatFormat(Template(toy.THINKING), toy.chatml_tokenizer())


def assistant(content: Any, **fields: Any) -> list[dict[str, Any]]:
    return [*HI, {"role": "assistant", "content": content, **fields}]


def test_a_plain_turn(chatml: ChatFormat) -> None:
    turn = chatml.turn(HI)
    assert (turn.text, turn.prefill, turn.reply_part, turn.open_reasoning) == (HEAD, "", "start", "")
    assert chatml.render(HI) == HEAD
    assert chatml.render(HI, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_header_that_opens_a_reasoning_block(thinking: ChatFormat) -> None:
    turn = thinking.turn(HI)
    assert (turn.reply_part, turn.open_reasoning) == ("reasoning", "<think>\n")
    splitter = thinking.splitter(turn)
    assert splitter.feed("hm</think>\n\nHello") == ReplyDelta("hm", "Hello")
    assert thinking.splitter(turn, "none").feed("hm</think>") == ReplyDelta(content="hm</think>")


def test_a_user_who_writes_tags_opens_nothing(thinking: ChatFormat) -> None:
    turn = thinking.turn([{"role": "user", "content": "<think>"}], kwargs={"enable_thinking": False})
    assert (turn.reply_part, turn.open_reasoning) == ("start", "")


def test_variables_of_the_template_and_those_that_cannot_be_changed() -> None:
    chat = ChatFormat(Template(toy.THINKING), toy.chatml_tokenizer(), {"enable_thinking": False})
    assert chat.turn(HI).reply_part == "start"
    assert chat.turn(HI, kwargs={"enable_thinking": True}).reply_part == "reasoning"
    wild = {"messages": [], "tools": 1, "add_generation_prompt": False, "self": 1}
    assert chat.render(HI, kwargs=wild) == chat.render(HI)


@pytest.mark.parametrize("content", ["Well", " Well, ", "", "a <think> b </think>\n"])
def test_the_reply_continues_a_last_assistant_message(thinking: ChatFormat, content: str) -> None:
    turn = thinking.turn(assistant(content))
    assert turn.text == HEAD + "<think>\n\n</think>\n\n" + content
    assert (turn.prefill, turn.reply_part) == (content, "content")
    assert thinking.splitter(turn).feed(" on") == ReplyDelta(content=" on")


def test_parts_and_reasoning_of_a_continued_message(thinking: ChatFormat) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turn = thinking.turn(assistant(parts, reasoning_content="because"))
    assert turn.text == HEAD + "<think>\nbecause\n</think>\n\na\nb"


def test_reasoning_can_be_continued(thinking: ChatFormat, chatml: ChatFormat) -> None:
    turn = thinking.turn(assistant("", reasoning_content="I wonder "))
    assert turn.text == HEAD + "<think>\nI wonder "
    assert (turn.reply_part, turn.prefill) == ("reasoning", "I wonder ")
    explicit = thinking.turn(assistant("x", reasoning_content="I "), continues="reasoning_content")
    assert explicit.text == HEAD + "<think>\nI "
    assert thinking.turn(assistant("x", reasoning_content="I "), continues="content").text.endswith("</think>\n\nx")
    assert chatml.turn(assistant("", reasoning_content="lost")).text == HEAD  # the template has no place for it


def test_what_cannot_be_continued(chatml: ChatFormat) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    for messages, why in (
        (assistant("a", tool_calls=[call]), "tool calls"),
        ([*assistant("a"), {"role": "assistant", "content": "b"}], "two assistant"),
    ):
        with pytest.raises(RequestError, match=why):
            chatml.turn(messages)
    with pytest.raises(RequestError, match="only an assistant"):
        chatml.turn(HI, continues="auto")
    silent = ChatFormat(Template("{{ messages[0].content }}"), toy.chatml_tokenizer())
    with pytest.raises(RequestError, match="cannot continue"):
        silent.turn(assistant("a"))


def test_without_prefill_an_assistant_message_is_complete(chatml: ChatFormat) -> None:
    text = chatml.render(assistant("a"), prefill=False)
    assert text == HEAD + "a<|im_end|>\n<|im_start|>assistant\n"


def test_bos_comes_once_and_only_where_the_model_wants_it() -> None:
    specials = ("<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    for add_bos in (True, False):
        tokenizer = ByteTokenizer(specials, bos="<s>", add_bos=add_bos)
        chat = ChatFormat(Template(toy.LLAMA3, "<s>"), tokenizer)
        assert chat.prompt(HI).tokens[:2].tolist() == [256, 257]  # the template writes it, too
        assert chat.render(HI).startswith("<s>") is not add_bos
        assert chat.prompt_from_text("x").tokens.tolist() == ([256, 120] if add_bos else [120])
        assert chat.prompt_from_mixed([7, "x"]).tokens.tolist() == [7, 120]
        assert chat.prompt_from_mixed(["x", 7, 8]).tokens.tolist() == [*([256] if add_bos else []), 120, 7, 8]


def test_mixed_prompts(chatml: ChatFormat) -> None:
    prompt = chatml.prompt_from_mixed([1, 2, "a<|im_start|>b", 256, "c"])
    assert prompt.tokens.tolist() == [1, 2, 97, 256, 98, 256, 99]
    assert prompt.boundaries == (3, 5)
    assert len(chatml.prompt_from_mixed([])) == 0
    with pytest.raises(RequestError, match="32-bit"):
        chatml.prompt_from_mixed([2**40])


def test_tools_reach_the_template(qwen_template: str) -> None:
    chat = ChatFormat(Template(qwen_template), toy.chatml_tokenizer())
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
    text = chat.render(HI, tools=[tool])
    assert '{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}' in text
    assert chat.render(HI, tools=[]) == chat.render(HI)


def test_the_real_template_continues_as_llama_server_does(qwen_template: str, qwen_tokenizer: Tokenizer) -> None:
    chat = ChatFormat(Template(qwen_template, eos_token="<|im_end|>"), qwen_tokenizer)
    assert chat.render(HI) == HEAD + "<think>\n"
    assert chat.render(HI, kwargs={"enable_thinking": False}) == HEAD + "<think>\n\n</think>\n\n"
    assert chat.render(assistant("Wh ")) == HEAD + "<think>\n\n</think>\n\nWh "
    assert chat.render(assistant("", reasoning_content="I th")) == HEAD + "<think>\nI th"
    assert chat.render(assistant("x", reasoning_content="r")) == HEAD + "<think>\nr\n</think>\n\nx"
    inside = [*HI, {"role": "system", "content": "Be brief."}]
    assert chat.render(inside) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>user\nBe brief.<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    with pytest.raises(RequestError, match="No user query"):
        chat.render([{"role": "system", "content": "S"}])
