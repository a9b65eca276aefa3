from __future__ import annotations

from pathlib import Path

import pytest

from pyctl.chat.reply import CallDelta
from pyctl.errors import RequestError
from pyctl.terminal.conversation import Call, Conversation, load, save

TWO_TURNS = Conversation().with_user("a").with_reply("A").with_user("b").with_reply("B", "because")


@pytest.mark.parametrize(
    "conversation",
    [
        Conversation(),
        TWO_TURNS,
        Conversation("s").with_user("a").with_reply("A", stopped=True),
        Conversation()
        .with_user("a")
        .with_reply("", "hm", (Call("1", "f", '{"x": 2}'), Call("2", "g", "{}")))
        .with_user("b"),
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
        (
            [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
            "message 2 has the role 'system'",
        ),
        ([{"content": "a"}], "message 1 has the role None"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{}]}],
            "message 1 has a tool call without a function",
        ),
        (
            [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                }
            ],
            "message 1 has a tool call without a function and its arguments",
        ),
    ],
)
def test_what_a_chat_cannot_hold_is_refused(turns: list[object], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        Conversation.from_file(turns)


def test_lone_surrogates_do_not_get_in() -> None:
    conversation = Conversation().with_system("\ud800").with_user("a\udcff")
    assert conversation.for_model() == [
        {"role": "system", "content": "?"},
        {"role": "user", "content": "a?"},
    ]
    assert Conversation.from_file([{"role": "user", "content": "\udcff"}]).question() == "?"


def test_calls_are_joined_and_given_back_to_the_model() -> None:
    deltas = [
        CallDelta(1, "b", "g", "{"),
        CallDelta(0, "a", "f", '{"x":'),
        CallDelta(0, arguments=" 1}"),
    ]
    assert Call.joined(deltas) == (Call("a", "f", '{"x": 1}'),)  # the other was cut short
    calls = Call.joined([*deltas, CallDelta(1, arguments="}")])
    assert Conversation().with_user("q").with_reply("", "", calls).for_model()[-1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_bare_lists_of_messages_load(tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "a"}]')
    assert load(tmp_path / "chat.json") == Conversation().with_user("a")


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot save .*: No such file or directory"):
        save(tmp_path / "no" / "chat.json", TWO_TURNS)
    with pytest.raises(RequestError, match=r"cannot save .*: Is a directory"):
        save(tmp_path, TWO_TURNS)
    with pytest.raises(RequestError, match="cannot save"):
        save(tmp_path / "a\0b", TWO_TURNS)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not JSON in UTF-8"),
        (b"{", "not JSON in UTF-8"),
        (b"\xff", "not JSON in UTF-8"),
        (b"[" * 100_000, "not JSON in UTF-8"),
        (b"{}", "no list of messages"),
        (b"3", "no list of messages"),
        (b'{"messages": 3}', "no list of messages"),
        (b'{"messages": [], "version": 2}', "unknown version 2"),
        (b"[1]", "message 1 has no text"),
    ],
)
def test_bad_files_are_one_clear_line(tmp_path: Path, content: bytes, text: str) -> None:
    (tmp_path / "chat.json").write_bytes(content)
    with pytest.raises(RequestError, match=text) as caught:
        load(tmp_path / "chat.json")
    assert str(caught.value).startswith(f"cannot load {tmp_path / 'chat.json'}: ")


def test_a_byte_order_mark_is_no_part_of_a_chat(tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text('[{"role": "user", "content": "hi"}]', encoding="utf-8-sig")
    assert [message.content for message in load(tmp_path / "chat.json").messages] == ["hi"]
