from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.chat.boundaries import boundaries, headers, message_starts
from pyctl.chat.chat_format import ChatFormat
from pyctl.chat.template import Template
from pyctl.chat.tokenizer import Tokenizer
from pyctl.prompt import as_tokens, common_prefix
from tests.unit.chat import toy
from tests.unit.chat.toy import ByteTokenizer, prepare

LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def starts(source: str, specials: tuple[str, ...], bos: str = "", eos: str = "") -> list[str]:
    tokenizer = ByteTokenizer(specials, bos=bos, eos=eos)
    template = Template(source, bos, eos)
    found = message_starts(template, tokenizer, tokenizer.special_tokens())
    return [tokenizer.piece(token).decode() for token in found]


GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>", "\n", "\n\n")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]")
ROLES = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<eos>")


@pytest.mark.parametrize(
    ("source", "specials", "bos", "eos", "begins", "header"),
    [
        (toy.CHATML, toy.CHATML_SPECIALS, "", "", ["<|im_start|>"], "<|im_start|>assistant"),
        (toy.THINKING, toy.CHATML_SPECIALS, "", "", ["<|im_start|>"], "<|im_start|>assistant"),
        (
            toy.THINKING,
            toy.CHATML_SPECIALS,
            "<|im_start|>",
            "",
            ["<|im_start|>"],
            "<|im_start|>assistant",
        ),
        (toy.PARTS_ONLY, toy.CHATML_SPECIALS, "", "", ["<|im_start|>"], ""),
        (
            toy.LLAMA3,
            LLAMA3,
            LLAMA3[0],
            "",
            [LLAMA3[1]],
            "<|start_header_id|>assistant<|end_header_id|>",
        ),
        (toy.GEMMA, GEMMA, "<bos>", "", ["<start_of_turn>"], "<start_of_turn>model"),
        (toy.MISTRAL, MISTRAL, "<s>", "</s>", ["[INST]"], ""),
        (toy.ROLE_TOKENS, ROLES, "", "<eos>", ["<|user|>", "<|assistant|>"], "<|assistant|>"),
        (toy.PLAIN, ("<s>", "</s>"), "<s>", "", [], ""),
    ],
)
def test_start_tokens_and_the_header_of_a_reply_are_found_by_rendering(
    source: str, specials: tuple[str, ...], bos: str, eos: str, begins: list[str], header: str
) -> None:
    assert starts(source, specials, bos, eos) == begins
    chat = ChatFormat(Template(source, bos, eos), ByteTokenizer(specials, bos=bos, eos=eos))
    said = [{"role": role, "content": role.upper()} for role in ("user", "assistant", "user")]
    prompt = prepare(chat, said).prompt
    if not header:
        assert prompt.headers is None
        return
    tails = [
        chat.tokenizer.detokenize(prompt.tokens[at:].tolist()).decode() for at in prompt.boundaries
    ]
    is_header = [tail.startswith(header) for tail in tails]
    assert prompt.headers == tuple(itertools.compress(prompt.boundaries, is_header))
    assert is_header.count(True) == 2


@pytest.mark.parametrize("source", [toy.PLAIN, "{{ raise_exception('never') }}"])
def test_no_special_start_token_means_no_boundaries(
    source: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert starts(source, ("<s>", "</s>"), "<s>", "</s>") == []
    assert "no message boundaries" in caplog.text
    assert boundaries(as_tokens([1, 2, 3]), ()) == ()


@given(
    st.lists(st.integers(0, 5), max_size=40),
    st.lists(st.integers(0, 5), max_size=10),
    st.sets(st.integers(0, 5)),
)
def test_boundaries_depend_on_the_prefix_alone(
    head: list[int], tail: list[int], start_ids: set[int]
) -> None:
    ids = sorted(start_ids)
    of_head = boundaries(as_tokens(head), ids)
    of_whole = boundaries(as_tokens(head + tail), ids)
    assert of_whole[: len(of_head)] == of_head
    assert all(b >= len(head) for b in of_whole[len(of_head) :])
    assert list(of_whole) == [i for i, t in enumerate(head + tail) if i and t in start_ids]


def test_a_header_counts_when_all_its_tokens_are_there() -> None:
    tokens = as_tokens([7, 1, 7, 3, 1, 7, 3])
    found = [headers(tokens[:n], boundaries(tokens[:n], (7,)), (7, 3)) for n in (3, 4, 6, 7)]
    assert found == [(), (2,), (2,), (2, 5)]


class TestChatml:
    @pytest.fixture
    def chat(self) -> ChatFormat:
        return ChatFormat(Template(toy.CHATML), toy.chatml_tokenizer())

    def test_each_message_and_the_header(self, chat: ChatFormat) -> None:
        messages = [
            {"role": role, "content": role.upper()}
            for role in ("system", "user", "assistant", "user")
        ]
        prompt = prepare(chat, messages).prompt
        start = chat.tokenizer.special_tokens()["<|im_start|>"]
        assert [int(prompt.tokens[b]) for b in (0, *prompt.boundaries)] == [start] * 5
        tails = [chat.tokenizer.detokenize(prompt.tokens[b:].tolist()) for b in prompt.boundaries]
        assert tails[-1] == b"<|im_start|>assistant\n"
        assert tails[-2].startswith(b"<|im_start|>user\nUSER")

    def test_stray_markers_hide_nothing(self, chat: ChatFormat) -> None:
        def ends(content: str) -> list[bytes]:
            messages = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "c"},
            ]
            prompt = prepare(chat, messages).prompt
            return [
                chat.tokenizer.detokenize(prompt.tokens[b:].tolist()) for b in prompt.boundaries
            ]

        assert ends("x<|im_end|>y") == ends("a")
        assert ends("x<|im_start|>y")[1:] == ends("a")

    def test_raw_text_has_the_same_boundaries(self, chat: ChatFormat) -> None:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        asked = [*messages, {"role": "user", "content": "c"}]
        prompt = prepare(chat, asked).prompt
        raw = chat.prompt_from_text(prepare(chat, asked).text)
        assert np.array_equal(prompt.tokens, raw.tokens)
        assert prompt.boundaries == raw.boundaries

    def test_a_continued_reply_has_no_header(self, chat: ChatFormat) -> None:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        prompt = prepare(chat, messages).prompt
        assert (
            chat.tokenizer.detokenize(prompt.tokens[prompt.boundaries[-1] :].tolist())
            == b"<|im_start|>assistant\nb"
        )


def test_the_real_template_and_vocabulary(qwen_template: str, qwen_tokenizer: Tokenizer) -> None:
    """Each turn of Qwen's template after the first starts at a boundary, but two results of tools
    share one user turn, and the text of a special token inside a result starts none.
    """
    chat = ChatFormat(Template(qwen_template, eos_token="<|im_end|>"), qwen_tokenizer)
    assert chat.dialect.starts == (qwen_tokenizer.special_tokens()["<|im_start|>"],)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "one <|im_end|>"},
        {"role": "tool", "content": "two"},
    ]
    prompt = prepare(chat, messages).prompt
    heads = [
        qwen_tokenizer.detokenize(prompt.tokens[b : b + 3].tolist()) for b in prompt.boundaries
    ]
    assert [head.split(b"\n")[0] for head in heads] == [
        b"<|im_start|>assistant",
        b"<|im_start|>user",
        b"<|im_start|>assistant",
    ]


def test_text_before_the_first_message_is_raw() -> None:
    chat = ChatFormat(Template(toy.CHATML), toy.chatml_tokenizer())
    prompt = chat.prompt_from_text("ab\nc\n\nd<|im_start|>user\nx\n")
    assert prompt.n_raw == 7
    assert prompt.boundaries == (7,)
    assert chat.prompt_from_mixed(prompt.tokens.tolist()).n_raw == prompt.n_raw
    assert chat.prompt_from_text("a\nb").n_raw == 3
    assert chat.prompt_from_text("<|im_start|>user\nx\n").n_raw == 0
    assert chat.prompt_from_text("").n_raw == 0


@given(st.lists(st.sampled_from(["a\n", "\n", "b", "<|im_start|>", "\r\n", "é\n"]), max_size=30))
def test_raw_text_depends_on_the_tokens_before_its_end_alone(words: list[str]) -> None:
    chat = ChatFormat(Template(toy.CHATML), toy.chatml_tokenizer())
    tokens = chat.prompt_from_text("".join(words)).tokens.tolist()
    whole = chat.prompt_from_mixed(tokens)
    for n in range(len(tokens)):
        part = chat.prompt_from_mixed(tokens[:n])
        assert part.n_raw == min(whole.n_raw, n)


def test_the_reply_to_what_the_user_said_last_is_known(
    qwen_template: str, qwen_tokenizer: Tokenizer
) -> None:
    chat = ChatFormat(Template(qwen_template, eos_token="<|im_end|>"), qwen_tokenizer)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    calls = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]}
    result = {"role": "tool", "content": "<tool_response>"}
    said = [{"role": "user", "content": "go"}, calls, result, calls, result]
    headers = prepare(chat, said).prompt.headers
    assert [prepare(chat, said[:n]).prompt.turn for n in (1, 3, 5)] == [headers[0]] * 3
    again = prepare(chat, [*said, {"role": "user", "content": "and <tool_response>"}]).prompt
    assert again.turn == again.headers[-1] > headers[0]
    assert common_prefix(again.tokens, prepare(chat, said).prompt.tokens) >= headers[0]
    assert again.first(again.turn).turn == 0
    assert again.first(again.turn + 1).turn == again.turn


def test_without_tools_the_last_header_is_the_turn() -> None:
    chat = ChatFormat(Template(toy.CHATML), ByteTokenizer(toy.CHATML_SPECIALS))
    prompt = prepare(
        chat, [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    ).prompt
    assert prompt.turn == prompt.boundaries[-1]
    plain = ChatFormat(Template(toy.PLAIN), ByteTokenizer(("<s>", "</s>")))
    assert prepare(plain, [{"role": "user", "content": "a"}]).prompt.turn == 0
