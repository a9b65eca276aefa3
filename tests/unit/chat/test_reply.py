"""A reply in its parts: reasoning, content and calls."""

from __future__ import annotations

import pytest

from pyctl.chat.call_formats.families import QWEN
from pyctl.chat.reply import (
    THINK,
    CallDelta,
    ParsedReply,
    ReasoningSplitter,
    ReasoningTags,
    ReplyDelta,
    ReplyPart,
    ReplySplitter,
    reasoning_limit,
)
from tests.unit.chat.toy import ByteTokenizer


def split(pieces: list[str], reply_part: ReplyPart = "start") -> tuple[str, str]:
    splitter = ReasoningSplitter(QWEN.reasoning[0], reply_part)
    deltas = [*map(splitter.feed, pieces), splitter.finish()]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)


@pytest.mark.parametrize(
    ("reply_part", "text", "reasoning", "content"),
    [
        ("start", "Hello", "", "Hello"),
        ("start", "  Hello ", "", "Hello "),
        ("start", "\n\nHello", "", "Hello"),
        ("start", " \n", "", ""),
        ("start", "<think>\nhm\n</think>\n\nHello ", "hm\n", "Hello "),
        ("start", " \n<think>hm</think>Hello", "hm", "Hello"),
        ("start", "<thinking>Hello", "", "<thinking>Hello"),
        ("start", "<thin", "", "<thin"),
        ("start", "Hello <think>no</think>", "", "Hello <think>no</think>"),
        ("start", "", "", ""),
        ("reasoning", "\nhm\n</think>\n\nHello", "hm\n", "Hello"),
        ("reasoning", "never ends </thin", "never ends </thin", ""),
        ("reasoning", "\n\n</think>\n\nHello", "", "Hello"),
        ("reasoning", "a < b and <i>", "a < b and <i>", ""),
        ("reasoning", "hm</think>a</think>b", "hm", "a</think>b"),
        ("reasoning", "hm\n<tool_call>\n{}", "hm\n", "<tool_call>\n{}"),
        ("reasoning", "hm</think>\n<tool_call>\n{}", "hm", "<tool_call>\n{}"),
        ("content", " and <think>so</think> on", "", " and <think>so</think> on"),
    ],
)
def test_whole_and_letter_by_letter(
    reply_part: ReplyPart, text: str, reasoning: str, content: str
) -> None:
    assert split([text], reply_part) == (reasoning, content)
    assert split(list(text), reply_part) == (reasoning, content)


def test_text_comes_out_as_soon_as_it_is_certain() -> None:
    splitter = ReasoningSplitter(QWEN.reasoning[0], "reasoning")
    assert splitter.feed("I think <") == ReplyDelta("I think ")
    assert splitter.feed("b") == ReplyDelta("<b")
    assert splitter.feed("</think> ") == ReplyDelta()
    assert splitter.feed("\nYes") == ReplyDelta(content="Yes")
    assert splitter.feed(" ") == ReplyDelta(content=" ")


def test_blanks_stay_where_the_template_knows_no_reasoning() -> None:
    splitter = ReasoningSplitter(QWEN.tags("a template"), "start")
    assert splitter.feed("\n\nHello") == ReplyDelta(content="\n\nHello")
    known = ReasoningSplitter(QWEN.tags("<think>"), "start")
    assert known.feed("\n\nHello") == ReplyDelta(content="Hello")


def test_without_tags_everything_is_content() -> None:
    splitter = ReasoningSplitter()
    assert splitter.feed(" <think>a</think>") == ReplyDelta(content=" <think>a</think>")
    assert splitter.finish() == ReplyDelta()


# -- a whole reply
# ----------------------------------------------------------------------------------


def test_deltas_add_up_to_a_reply() -> None:
    reply = ParsedReply()
    reply.add(ReplyDelta(reasoning="let me "))
    reply.add(ReplyDelta(reasoning="see", content="It "))
    reply.add(ReplyDelta(content="rains"))
    assert reply.reasoning == "let me see"
    assert reply.content == "It rains"
    assert reply.calls == []


def test_the_pieces_of_calls_are_put_together_by_their_index() -> None:
    reply = ParsedReply()
    first = CallDelta(0, "a", "look_up")
    reply.add(ReplyDelta(calls=(first, CallDelta(0, arguments='{"n": '))))
    reply.add(ReplyDelta(calls=(CallDelta(0, arguments="1}"), CallDelta(1, "b", "stop"))))
    reply.add(ReplyDelta(calls=(CallDelta(1, arguments="{}"),)))
    assert reply.calls == [
        CallDelta(0, "a", "look_up", '{"n": 1}'),
        CallDelta(1, "b", "stop", "{}"),
    ]


def test_a_reply_is_a_message_that_continues_the_one_before() -> None:
    reply = ParsedReply()
    reply.add(ReplyDelta(content=" world", calls=(CallDelta(0, "a", "stop"),)))
    message = reply.message(ReplyDelta(reasoning="hm", content="Hello"))
    assert message == {
        "role": "assistant",
        "content": "Hello world",
        "reasoning_content": "hm",
        "tool_calls": [
            {"type": "function", "id": "a", "function": {"name": "stop", "arguments": ""}}
        ],
    }


def test_a_message_has_no_members_for_empty_parts() -> None:
    assert ParsedReply().message() == {"role": "assistant", "content": ""}


def test_the_end_of_a_reply_is_reported_once_with_its_tokens() -> None:
    seen: list[tuple[str, list[int], str]] = []
    splitter = ReplySplitter(
        ReasoningSplitter(THINK),
        on_end=lambda text, tokens, reply: seen.append((text, tokens, reply.content)),
    )
    splitter.feed("<think>hm</th", (1, 2))
    splitter.feed("ink>Yes", (3,))
    assert seen == []
    splitter.finish()
    splitter.finish()
    assert seen == [("<think>hm</think>Yes", [1, 2, 3], "Yes")]


def test_tokens_count_as_reasoning_if_their_text_is_nothing_else() -> None:
    splitter = ReplySplitter(ReasoningSplitter(THINK, "reasoning"))
    splitter.feed("let me ", (1, 2))
    splitter.feed("see</think>Yes", (3, 4))
    splitter.feed(", it rains", (5,))
    assert splitter.n_reasoning == 2
    assert splitter.reply.reasoning == "let me see"


@pytest.mark.parametrize(
    ("tags", "ends"),
    [
        (THINK, ("</think>",)),
        (ReasoningTags("<t>", "</t>", ("<call>",)), ("</t>", "<call>")),
        (
            ReasoningTags("<t>", "</t>", ("<call>",), forced_close="</t>\n"),
            ("</t>\n", "</t>", "<call>"),
        ),
        (ReasoningTags("<t>", "</t>", forced_close="</t>"), ("</t>",)),
    ],
)
def test_the_first_end_of_reasoning_is_the_one_that_cuts_it_short(
    tags: ReasoningTags, ends: tuple[str, ...]
) -> None:
    assert tags.end_texts == ends


def test_a_limit_forces_the_message_and_the_end_of_the_reasoning() -> None:
    tokenizer = ByteTokenizer([])
    tags = ReasoningTags("<t>", "</t>")
    limit = reasoning_limit(tokenizer, tags, 7, message="Enough.", read="<t>", recurs=True)
    assert limit.n_tokens == 7
    assert bytes(limit.forced) == b"Enough.</t>"
    assert limit.start == "<t>"
    assert limit.end_texts == ("</t>",)
    assert limit.recurs


def test_a_prompt_that_opens_no_block_reads_nothing() -> None:
    limit = reasoning_limit(ByteTokenizer([]), THINK, 7, message="", read="", recurs=False)
    assert limit.read == ()
    assert limit.texts == {}, "all tokens show their text"
