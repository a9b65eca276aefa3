"""The turns of a program's session, and the fields that bind the model's replies."""

from __future__ import annotations

from typing import Any

import pytest

from bench.clients.fields import MESSAGES, RESPONSES
from bench.clients.programs import PROGRAMS, Turn

TOOLS = [{"name": "Bash"}]


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), "tools": TOOLS, **fields}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_session_has_calls_and_a_restart(name: str) -> None:
    turns = PROGRAMS[name].turns
    assert sum(turn.call is not None for turn in turns) > 2
    assert any(turn.restarts for turn in turns)
    assert not turns[0].restarts


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_prompt_of_a_session_holds_another(name: str) -> None:
    """The words of a turn choose its call."""
    prompts = [turn.prompt for turn in PROGRAMS[name].turns]
    assert not any(a in b for a in prompts for b in prompts if a != b)


@pytest.mark.parametrize(
    "turn", [turn for turn in PROGRAMS["claude"].turns if turn.call is not None]
)
def test_the_words_of_a_turn_become_its_call(turn: Turn) -> None:
    assert turn.call is not None
    name, arguments = turn.call
    system = {"role": "system", "content": "The environment"}
    fields = PROGRAMS["claude"].binding(MESSAGES, body(user(turn.prompt), system))
    assert fields["tool_choice"]["name"] == name
    (tool,) = fields["callable_tools"]
    schema = tool["function"]["parameters"]
    assert {key: value["enum"] for key, value in schema["properties"].items()} == {
        key: [value] for key, value in arguments.items()
    }


def test_the_last_words_of_a_message_choose_the_call() -> None:
    """`/context` leaves its output in the message of the next turn."""
    fields = PROGRAMS["claude"].binding(MESSAGES, body(user("/context: 4711\nPrint it again.")))
    assert fields["tool_choice"]["name"] == "Bash"


def test_a_result_is_followed_by_a_text() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "Print the code."}
    fields = PROGRAMS["claude"].binding(MESSAGES, body({"role": "user", "content": [result]}))
    assert fields == {"grammar": 'root ::= "Noted."', "tool_choice": {"type": "none"}}


def test_an_output_is_followed_by_a_text() -> None:
    output = {"type": "function_call_output", "call_id": "a", "output": "4711"}
    fields = PROGRAMS["codex"].binding(RESPONSES, {"input": [output], "tools": TOOLS})
    assert fields == {"grammar": 'root ::= "Noted."', "tool_choice": "none"}


def test_a_request_without_tools_keeps_its_choice() -> None:
    fields = PROGRAMS["claude"].binding(MESSAGES, {"messages": [user("Print the code.")]})
    assert "tool_choice" not in fields


def test_requests_of_other_endpoints_stay_as_they_are() -> None:
    counted = body(user("Print the code."))
    assert PROGRAMS["claude"].binding(f"{MESSAGES}/count_tokens", counted) == {}
