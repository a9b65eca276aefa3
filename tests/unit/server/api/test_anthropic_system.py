"""System messages within a conversation: their texts, how long they stay, and the effort."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.errors import RequestError
from tests.unit.server.api.anthropic_messages import HI, converted, messages_of, text

REPLY = {"role": "assistant", "content": "Yes."}


def system(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": content, **fields}


@pytest.mark.parametrize("content", ["Shout.", [text("Shout.")], [text("Shout"), text("")]])
def test_texts_stay_in_their_place(content: Any) -> None:
    said = messages_of(HI, system(content), HI)[1]
    assert said["role"] == "system"
    assert said["content"].startswith("Shout")
    assert "\n" not in said["content"]


@pytest.mark.parametrize("content", ["Shout.", [text("Shout.")]])
def test_a_text_may_end_with_the_turn(content: Any) -> None:
    reminder = system(content, clear_at="next_user_message")
    assert messages_of(HI, reminder) == [HI, system("Shout.")]
    assert messages_of(HI, reminder, REPLY) == [HI, system("Shout."), REPLY]
    assert messages_of(HI, reminder, REPLY, HI) == [HI, REPLY, HI]


def test_a_text_that_never_ends_stays() -> None:
    assert messages_of(HI, system("Shout.", clear_at="never"), HI) == [HI, system("Shout."), HI]


def test_changes_of_tools_outlast_the_text() -> None:
    added = {"type": "tool_definition", "definition": {"name": "wait"}}
    blocks = [text("Shout."), {"type": "tool_addition", "tool": added}]
    chat = converted([HI, system(blocks, clear_at="next_user_message"), HI])
    assert chat["messages"][1] == system("The tool wait is available from now on.")
    assert len(chat["callable_tools"]) == 1


@pytest.mark.parametrize(
    ("statements", "base", "expected"),
    [
        ([], "low", "low"),
        ([{"effort": "max"}], "low", "max"),
        ([{"effort": "max"}, {"effort": "low"}], "", "low"),
        ([{"effort": "high"}, {}], "low", "high"),
        ([{"effort": None}], "low", "low"),
    ],
)
def test_the_last_statement_of_an_effort_counts(
    statements: list[Any], base: str, expected: str
) -> None:
    """A statement without text is no message, so it costs the cache nothing."""
    messages = [system([], output_config=statement) for statement in statements]
    if {} in statements:  # an empty one needs a text beside it
        messages[statements.index({})]["content"] = "Go on."
    chat = converted([HI, *messages, HI], output_config={"effort": base or None})
    assert chat["reasoning_effort"] == expected
    assert len(chat["messages"]) == 2 + ({} in statements)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "system"},
        {"role": "system", "content": None, "output_config": {}},
        system("a", clear_at="tomorrow"),
        system("a", clear_at=["never"]),
        system("a", output_config="high"),
        system("a", output_config={"effort": 7}),
        system([{"type": "image", "source": {"type": "base64", "data": "AAAA"}}]),
        system([{"type": "not_yet_known"}]),
        system([7]),
    ],
)
def test_what_cannot_be_served_is_refused(message: Any) -> None:
    with pytest.raises(RequestError):
        converted([HI, message])
