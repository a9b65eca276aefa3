from __future__ import annotations

import pytest

from pyctl.chat.call_formats.families import QWEN
from pyctl.chat.reply import ReasoningSplitter, ReplyDelta, ReplyPart


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
