"""Vocabularies without tokens for tags, which join the last letter of a tag with what follows:
Qwen2.5's, Llama 3's.
"""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.template import Template
from pyctl.engine.stream import ReasoningBudget
from tests.effort import examples
from tests.unit.chat import toy
from tests.unit.chat.conftest import tokenizer_of, unpacked
from tests.unit.chat.toy import ByteTokenizer, prepare

HI = [{"role": "user", "content": "Hi"}]
WORDS = ("so", " we", "\n", "\n\n", ".", " ", "<", "</", "think", ">", "é", "🙂", "<tool_call>")
VOCABULARIES = ("qwen2", "llama-bpe")


@cache
def chat_of(vocabulary: str, template: str) -> ChatFormat:
    return ChatFormat(
        Template(unpacked(f"templates/{template}.jinja").read_text()), tokenizer_of(vocabulary)
    )


def used_up(chat: ChatFormat, read: list[int], tokens: list[int], n: int) -> int | None:
    """After how many of ``tokens`` a block has ``n``, going by their text; None if it ends
    before.
    """
    n_within = 0
    for k in range(len(read) + len(tokens) + 1):
        data = chat.tokenizer.detokenize([*read, *tokens][:k])
        text = data.decode("utf-8", "ignore")
        n_within += len(data) > len(chat.dialect.tags.open)
        if any(end in text for end in (chat.dialect.tags.close, *chat.dialect.tags.interrupts)):
            return None
        if (
            k >= len(read)
            and text.startswith(chat.dialect.tags.open)
            and n_within >= n
            and text.encode() == data
        ):
            return k - len(read)
    return None


def limited(chat: ChatFormat, n: int, tokens: list[int]) -> list[int]:
    """Return the tokens that come out when the model would write ``tokens``, forced ones
    included.
    """
    limit = prepare(chat, HI, reasoning_budget=n).reasoning
    budget = ReasoningBudget(limit, lambda token: chat.tokenizer.piece(token, special=False))
    out: list[int] = []
    for token in tokens:
        while (forced := budget.next()) is not None:
            out.append(forced)
            budget.observe_token(forced)
        out.append(token)
        budget.observe_token(token)
    return out


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(
    "template", ["Qwen-QwQ-32B", "Qwen-Qwen3-0.6B", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"]
)
@settings(max_examples=examples(150))
@given(
    n=st.integers(0, 12),
    gaps=st.lists(st.sampled_from(["", "\n", "\n\n", " "]), min_size=2, max_size=2),
    reasoning=st.lists(st.sampled_from(WORDS), max_size=14),
    answer=st.lists(st.sampled_from((*WORDS, "<think>", "</think>")), max_size=14),
)
def test_a_budget_ends_the_reasoning_and_never_writes_into_the_answer(
    vocabulary: str, template: str, n: int, gaps: list[str], reasoning: list[str], answer: list[str]
) -> None:
    """The end of the reasoning is forced exactly where the budget is used up, or nowhere, even if
    the vocabulary joins a tag with the characters around it.
    """
    chat = chat_of(vocabulary, template)
    tags = chat.dialect.tags
    header = prepare(chat, HI).rendered.reasoning_start
    text = (
        ("" if header else tags.open)
        + gaps[0]
        + "".join(reasoning)
        + tags.close
        + gaps[1]
        + "".join(answer)
    )
    tokens = chat.tokenizer.tokenize(text)
    at = used_up(chat, chat.tokenizer.tokenize(header), tokens, n)
    forced = chat.tokenizer.tokenize(tags.end_texts[0])
    assert limited(chat, n, tokens) == (
        tokens if at is None else [*tokens[:at], *forced, *tokens[at:]]
    )


@pytest.mark.parametrize("text", ["ok", "\nok", "\n\nok", "", " ok", "{}"])
@pytest.mark.parametrize("template", ["Qwen-Qwen2.5-7B-Instruct", "Qwen-QwQ-32B"])
def test_the_result_of_a_tool_is_none_of_the_users_messages(template: str, text: str) -> None:
    chat = chat_of("qwen2", template)
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": text},
    ]
    prompt = prepare(chat, messages).prompt
    again = prepare(chat, [*messages[:2], *HI]).prompt
    assert len(prompt.headers) == len(again.headers) == 2
    assert prompt.turn == prompt.headers[0]
    assert again.turn == again.headers[1]


def test_the_tag_of_reasoning_begins_no_message() -> None:
    """The tag of reasoning begins no message of a vocabulary whose only tokens of the template are
    the tags.
    """
    source = unpacked("templates/MiniMax-M2.jinja").read_text()
    chat = ChatFormat(Template(source), ByteTokenizer(("<think>", "</think>")))
    for question in ("Hi", "What is <think>", "<think>\n"):
        rendered = prepare(chat, [{"role": "user", "content": question}]).rendered
        assert rendered.reply_part == "reasoning"
        assert rendered.reasoning_start == "<think>\n"
    assert chat.dialect.starts == ()
    without = ChatFormat(Template(toy.PLAIN), ByteTokenizer(("<think>", "</think>")))
    assert prepare(without, [{"role": "user", "content": "<think>"}]).rendered.reply_part == "start"
