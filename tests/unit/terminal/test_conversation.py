from __future__ import annotations

import pytest

from pyctl.chat.reply import CallDelta
from pyctl.errors import RequestError
from pyctl.terminal.conversation import Call, Conversation

TWO_TURNS = Conversation().asked("a").answered("A").asked("b").answered("B", "because")


def test_changes_leave_the_original_alone() -> None:
    before = TWO_TURNS.messages
    TWO_TURNS.asked("c"), TWO_TURNS.undone(), TWO_TURNS.edited("d")
    assert TWO_TURNS.messages == before


@pytest.mark.parametrize(
    "conversation",
    [
        Conversation(),
        TWO_TURNS,
        Conversation("s").asked("a").answered("A", stopped=True),
        Conversation().asked("a").answered("", "hm", (Call("1", "f", '{"x": 2}'), Call("2", "g", "{}"))).asked("b"),
    ],
)
def test_file_form_round_trips(conversation: Conversation) -> None:
    assert Conversation.from_file(conversation.for_model(marked=True)) == conversation


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        (["hello"], "message 1 has no text"),
        ([{"role": "user", "content": "a"}, {"role": "assistant"}], "message 2 has no text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 1 has no text"),
        ([{"role": "tool", "content": "a"}], "message 1 has the role 'tool'"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "message 2 has the role 'system'"),
        ([{"content": "a"}], "message 1 has the role None"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "message 1 has a tool call without a function"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "message 1 has a tool call without a function and its arguments",
        ),
    ],
)
def test_what_a_chat_cannot_hold_is_refused(turns: list[object], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        Conversation.from_file(turns)


def test_lone_surrogates_do_not_get_in() -> None:
    conversation = Conversation().instructed("\ud800").asked("a\udcff")
    assert conversation.for_model() == [{"role": "system", "content": "?"}, {"role": "user", "content": "a?"}]
    assert Conversation.from_file([{"role": "user", "content": "\udcff"}]).question() == "?"


def test_calls_are_joined_and_given_back_to_the_model() -> None:
    deltas = [CallDelta(1, "b", "g", "{"), CallDelta(0, "a", "f", '{"x":'), CallDelta(0, arguments=" 1}")]
    assert Call.joined(deltas) == (Call("a", "f", '{"x": 1}'),)  # the other was cut short
    calls = Call.joined([*deltas, CallDelta(1, arguments="}")])
    assert Conversation().asked("q").answered("", "", calls).for_model()[-1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
