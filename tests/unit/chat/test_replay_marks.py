"""Marks in place of remembered replies."""

from __future__ import annotations

from typing import Any

from pyctl.chat.replay import Replay, conversation_keys
from pyctl.chat.replay_marks import ReplyPlaceholders

START = "<|start|>"
HI: dict[str, Any] = {"role": "user", "content": "Hi"}
YES: dict[str, Any] = {"role": "assistant", "content": "Yes."}
HEADER = f"{START}assistant\n"


def marks_of(*messages: dict[str, Any], call_end: str = "") -> ReplyPlaceholders:
    """Return marks with the last of ``messages`` remembered after the others."""
    replay = Replay()
    replay.remember(messages[-1], conversation_keys(messages[:-1])[-1], HEADER, "raw", None)
    return ReplyPlaceholders(replay, starts=[START], call_end=call_end)


def test_a_remembered_reply_takes_the_place_of_its_mark() -> None:
    marks = marks_of(HI, YES)
    place, attempts, replayed = marks.insert([HI, YES, HI], None, is_continued=False)
    assert place == conversation_keys([HI, YES, HI])[-1]
    (marked,) = attempts
    assert [message["role"] for message in marked] == ["user", "assistant", "user"]
    question = f"{START}user\nHi"
    text = f"{question}{HEADER}{marked[1]['content']}{question}"
    first, reply, last = marks.parts(text, replayed)
    assert first == question + HEADER
    assert reply.text == "raw"
    assert last == question


def test_a_mark_after_another_header_replaces_nothing() -> None:
    marks = marks_of(HI, YES)
    _, attempts, replayed = marks.insert([HI, YES], None, is_continued=False)
    text = f"{START}user\n{attempts[0][1]['content']}"
    assert marks.parts(text, replayed) is None
    assert marks.parts("no mark", replayed) is None


def test_a_continued_message_and_an_unknown_one_have_no_mark() -> None:
    marks = marks_of(HI, YES)
    assert marks.insert([HI, YES], None, is_continued=True)[1:] == ([], {})
    assert marks.insert([YES], None, is_continued=False)[1:] == ([], {})


def test_without_tokens_that_start_a_message_there_is_no_place() -> None:
    marks = ReplyPlaceholders(Replay(), starts=[])
    assert marks.insert([HI], None, is_continued=False) == (b"", [], {})
    assert marks.header(f"{HEADER}Ye", "") == ""


def test_a_message_with_calls_has_a_second_form_whose_call_has_the_mark() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    marks = marks_of(HI, message, call_end="<|end|>")
    _, attempts, replayed = marks.insert([HI, message], None, is_continued=False)
    plain, with_call = attempts
    (mark,) = replayed
    assert plain[1] == {"role": "assistant", "content": mark}
    assert mark in with_call[1]["tool_calls"][0]["function"]["arguments"]
    assert with_call[1]["tool_calls"][0]["id"] == "1"


def test_the_header_of_the_reply_starts_at_the_last_message() -> None:
    marks = marks_of(HI, YES)
    assert marks.header(f"{START}user\nHi{HEADER}Ye", "Ye") == f"{HEADER}Ye"
    assert marks.header(f"{HEADER}{START}", START) == ""
