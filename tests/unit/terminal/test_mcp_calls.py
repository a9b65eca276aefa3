"""Tools in a chat at a terminal: asked for, run, remembered, and the model goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pyctl.chat.reply import CallDelta, ReplyDelta
from pyctl.errors import RequestError
from pyctl.terminal.conversation import Call, Conversation
from pyctl.terminal.interactive import Chat
from pyctl.terminal.mcp_calls import (
    CHOICES,
    MAX_ROUNDS,
    REFUSED,
    STOPPED,
    UNREADABLE,
    OfferedTool,
    ToolCalls,
)
from tests.unit.terminal.test_interactive import Lines, Recorder

DEFINITION = {"type": "function", "function": {"name": "look"}}


class Source:
    """A source of two tools, a reader and a writer."""

    origin = "there"

    def __init__(self, result: Callable[[], str] = lambda: "seen\nall") -> None:
        self.ran: list[tuple[str, Mapping[str, Any]]] = []
        self._result = result

    def offered(self) -> Sequence[OfferedTool]:
        return [OfferedTool("look", True, DEFINITION), OfferedTool("act", False, DEFINITION)]

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        self.ran.append((name, arguments))
        return self._result()


def calls(script: Any, *names: str, reasoning: str = "hm") -> list[Any]:
    """Return a reply that calls tools."""
    made = [
        ReplyDelta(calls=(CallDelta(at, f"id{at}", name, json.dumps({"at": at})),))
        for at, name in enumerate(names)
    ]
    return [ReplyDelta(reasoning=reasoning), *made, *script.say()]


def talk(
    script: Any,
    *replies: Any,
    source: Source,
    answers: Sequence[str] = (),
    kept: Path | None = None,
) -> Any:
    """Return the backend, the view and the questions after one message."""
    backend = script.backend(*replies)
    view = Recorder()
    asked = list[str]()
    left = list(answers)

    def ask(question: str) -> str:
        asked.append(question)
        return left.pop(0) if left else ""

    chat = Chat(backend, Lines([]), view, Conversation(), interactive=True)
    chat.tools = ToolCalls(source, ask, kept)
    chat.send("Look!")
    return backend, view, asked, chat


def test_calls_run_when_the_user_says_so_and_the_model_goes_on(script: Any) -> None:
    """Each call needs the user's consent. A refused one does not run and has the refusal as its
    result. The model gets all results in one request, under the ids of the calls.
    """
    source = Source()
    replies = (calls(script, "look", "act"), script.say("Done"))
    backend, view, asked, chat = talk(script, *replies, source=source, answers=["o", "n"])
    assert [question.partition("?")[0] for question in asked] == [
        "run look (reads only)",
        "run act (can change things)",
    ]
    assert source.ran == [("look", {"at": 0})]
    assert backend.fields[0]["tools"] == [DEFINITION, DEFINITION]
    reply, *results = backend.seen[1][1:]
    assert reply["reasoning_content"] == "hm"
    assert [call["id"] for call in reply["tool_calls"]] == ["id0", "id1"]
    assert results == [
        {"role": "tool", "content": "seen\nall", "tool_call_id": "id0"},
        {"role": "tool", "content": REFUSED, "tool_call_id": "id1"},
    ]
    assert view.infos == [
        "result of look, 8 characters: seen",
        "result of act, 27 characters: " + REFUSED,
    ]
    assert chat.conversation.messages[-1].content == "Done"
    assert Conversation.from_file(chat.conversation.for_model(marked=True)) == chat.conversation
    chat.take("/undo")
    assert chat.conversation.messages == ()


def test_what_is_allowed_for_this_chat_or_always_is_not_asked_again(
    script: Any, tmp_path: Path
) -> None:
    """A consent for the chat ends with it. One for always is kept for the tool at its server only,
    and a damaged file of consents allows nothing.
    """
    kept = tmp_path / "state" / "allowed.json"
    rounds = (
        calls(script, "look"),
        calls(script, "look"),
        calls(script, "act"),
        calls(script, "act"),
        script.say("."),
    )
    source = Source()
    _, _, asked, _ = talk(script, *rounds, source=source, answers=["c", "always"], kept=kept)
    assert len(asked) == 2
    assert len(source.ran) == 4
    assert json.loads(kept.read_text()) == ["there act"]
    _, _, asked, _ = talk(
        script, calls(script, "act", "look"), script.say("."), source=source, kept=kept
    )
    assert [question.split()[1] for question in asked] == ["look"]
    source.origin = "elsewhere"
    _, _, asked, _ = talk(script, calls(script, "act"), script.say("."), source=source, kept=kept)
    assert [question.split()[1] for question in asked] == ["act"]
    kept.write_text("[" * 100_000)
    _, _, asked, _ = talk(script, calls(script, "act"), script.say("."), source=source, kept=kept)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RequestError("no such\nplace"), '{"error": "no such place"}'),
        (UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates"), "surrogates"),
    ],
)
def test_any_error_of_a_tool_is_a_result(script: Any, error: Exception, said: str) -> None:
    source = Source(Mock(side_effect=error))
    backend, _, _, _ = talk(
        script, calls(script, "look"), script.say("."), source=source, answers=["o"]
    )
    assert said in backend.seen[1][-1]["content"]


def test_ctrl_c_in_a_tool_ends_the_round(script: Any) -> None:
    source = Source(Mock(side_effect=KeyboardInterrupt))
    backend, _, _, chat = talk(script, calls(script, "look", "act"), source=source, answers=["o"])
    assert len(backend.seen) == 1
    assert [message.content for message in chat.conversation.messages[2:]] == [STOPPED, STOPPED]


@pytest.mark.parametrize("arguments", ['{"path": "a', "[1]", "[" * 100_000])
def test_a_call_that_was_cut_off_is_not_asked_about(arguments: str) -> None:
    tools = ToolCalls(source := Source(), asked := Mock())
    assert tools.result(Call("id", "look", arguments)) == UNREADABLE
    assert asked.called is False
    assert source.ran == []


def test_the_question_fits_into_a_line_and_yes_is_once() -> None:
    tools = ToolCalls(Source(), asked := Mock(return_value="y"))
    for _ in range(2):
        assert tools.result(Call("id", "act", "")) == "seen\nall"
    assert asked.call_count == 2
    assert len(asked.call_args[0][0].replace("act", "files_directory_tree")) < 80
    assert asked.call_args[0][0].endswith(f"{CHOICES}: ")


def test_calls_of_unknown_tools_are_left_to_the_user_and_rounds_end(script: Any) -> None:
    backend, _, asked, chat = talk(script, calls(script, "other"), source=Source())
    assert len(backend.seen) == 1
    assert asked == []
    assert len(chat.conversation.messages) == 2
    endless = [calls(script, "look") for _ in range(MAX_ROUNDS + 5)]
    backend, view, _, _ = talk(script, *endless, source=Source(), answers=["c"])
    assert len(backend.seen) == MAX_ROUNDS
    assert "the model continues with the next message" in view.infos[-1]
