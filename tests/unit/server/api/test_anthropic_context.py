"""Edits of a conversation: applied as demanded, reported, and refused where a summary is due."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from pyctl.errors import NotSupportedError, RequestError
from pyctl.server.api.anthropic_context import edit_context
from tests.unit.server.api.anthropic_messages import HI, text
from tests.unit.server.api.test_anthropic import built
from tests.unit.server.fake import Bench, play

THINKING = "clear_thinking_20251015"
TOOL_USES = "clear_tool_uses_20250919"
COMPACT = "compact_20260112"


def n_chars(values: Mapping[str, Any]) -> int:
    """Return the letters of all messages, in place of tokens."""
    return len(msgspec.json.encode(values["messages"]))


def edited(messages: list[Any], *edits: Any) -> Any:
    body = {"messages": messages, "context_management": {"edits": list(edits)}}
    return edit_context(body, n_chars)


def thought(number: int) -> dict[str, Any]:
    thinking = {"type": "thinking", "thinking": f"hm {number}", "signature": ""}
    return {"role": "assistant", "content": [thinking, text(f"reply {number}")]}


def used(number: int, name: str = "look") -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"at": number}}
    result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": "sunny " * 50}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


def has_thoughts(messages: list[Any]) -> list[bool]:
    return [any(block["type"] == "thinking" for block in each["content"]) for each in messages]


def results(messages: list[Any]) -> list[bool]:
    """Return for each result whether it is still there."""
    return [each["content"][0]["content"].startswith("sunny") for each in messages[1::2]]


def inputs(messages: list[Any]) -> list[bool]:
    """Return for each use whether its input is still there."""
    return [bool(each["content"][0]["input"]) for each in messages[::2]]


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (None, [False, False, True]),
        ("all", [True, True, True]),
        ({"type": "all"}, [True, True, True]),
        ({"type": "thinking_turns", "value": 2}, [False, True, True]),
        ({"type": "thinking_turns", "value": 0}, [False, False, False]),
        ({"type": "thinking_turns", "value": 9}, [True, True, True]),
    ],
)
def test_the_newest_turns_keep_their_reasoning(keep: Any, kept: list[bool]) -> None:
    turns = [thought(number) for number in range(3)]
    context = edited(turns, {"type": THINKING, "keep": keep})
    assert has_thoughts(context.values["messages"]) == kept
    assert has_thoughts(turns) == [True, True, True]
    n_cleared = kept.count(False)
    cleared = [edit["cleared_thinking_turns"] for edit in context.applied]
    assert cleared == [n_cleared][: bool(n_cleared)]


def test_the_report_has_the_tokens_that_went() -> None:
    turns = [thought(number) for number in range(3)]
    context = edited(turns, {"type": THINKING})
    assert context.n_original == n_chars({"messages": turns})
    assert context.n_tokens == n_chars(context.values)
    assert context.answer() == {
        "applied_edits": [
            {
                "type": THINKING,
                "cleared_input_tokens": context.n_original - context.n_tokens,
                "cleared_thinking_turns": 2,
            }
        ]
    }


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [True] * 5),  # not due: the default is 100,000 tokens
        ({"trigger": {"type": "input_tokens", "value": 1000}}, [False, False, True, True, True]),
        ({"trigger": {"type": "tool_uses", "value": 5}}, [True] * 5),
        ({"trigger": {"type": "tool_uses", "value": 4}}, [False, False, True, True, True]),
        (
            {
                "trigger": {"type": "tool_uses", "value": 1},
                "keep": {"type": "tool_uses", "value": 1},
            },
            [False, False, False, False, True],
        ),
        (
            {"trigger": {"type": "tool_uses", "value": 1}, "exclude_tools": ["wait"]},
            [False, True, True, True, True],
        ),
        (
            {
                "trigger": {"type": "tool_uses", "value": 1},
                "clear_at_least": {"type": "input_tokens", "value": 10_000},
            },
            [True] * 5,
        ),
    ],
)
def test_the_oldest_results_are_cleared_when_it_is_due(options: Any, kept: list[bool]) -> None:
    names = ("look", "wait", "look", "look", "look")
    messages = [each for number, name in enumerate(names) for each in used(number, name)]
    context = edited(messages, {"type": TOOL_USES, **options})
    assert results(context.values["messages"]) == kept
    assert inputs(context.values["messages"]) == [True] * 5
    n_cleared = kept.count(False)
    cleared = [edit["cleared_tool_uses"] for edit in context.applied]
    assert cleared == [n_cleared][: bool(n_cleared)]


@pytest.mark.parametrize(
    ("requested", "kept"),
    [
        (False, [True, True, True]),
        (True, [False, False, True]),
        (["wait"], [True, False, True]),
    ],
)
def test_inputs_are_cleared_on_request(requested: Any, kept: list[bool]) -> None:
    messages = [*used(0), *used(1, "wait"), *used(2)]
    edit = {
        "type": TOOL_USES,
        "trigger": {"type": "tool_uses", "value": 0},
        "keep": {"type": "tool_uses", "value": 1},
        "clear_tool_inputs": requested,
    }
    assert inputs(edited(messages, edit).values["messages"]) == kept


def test_edits_follow_each_other() -> None:
    messages = [thought(0), thought(1), *used(0), *used(1)]
    trigger = {"type": "tool_uses", "value": 0}
    keep = {"type": "tool_uses", "value": 1}
    context = edited(
        messages, {"type": THINKING}, {"type": TOOL_USES, "trigger": trigger, "keep": keep}
    )
    assert [edit["type"] for edit in context.applied] == [THINKING, TOOL_USES]
    n_cleared = sum(edit["cleared_input_tokens"] for edit in context.applied)
    assert n_cleared == context.n_original - context.n_tokens


def test_a_summary_is_refused_once_it_is_due() -> None:
    due = {"type": COMPACT, "trigger": {"type": "input_tokens", "value": 10}}
    with pytest.raises(NotSupportedError, match="summarise"):
        edited([HI], due)
    context = edited([HI], {"type": COMPACT})
    assert context.applied == ()
    assert context.values["messages"] == [HI]


def test_an_unknown_edit_is_refused() -> None:
    with pytest.raises(NotSupportedError, match="not supported"):
        edited([HI], {"type": "clear_everything"})


@pytest.mark.parametrize(
    "requested",
    [
        "all",
        {"edits": {}},
        {"edits": ["all"]},
        {"edits": [{"type": THINKING}] * 9},
        {"edits": [{"type": THINKING, "keep": "none"}]},
        {"edits": [{"type": THINKING, "keep": {"type": "turns", "value": 1}}]},
        {"edits": [{"type": THINKING, "keep": {"type": "thinking_turns", "value": -1}}]},
        {"edits": [{"type": TOOL_USES, "trigger": {"type": "time", "value": 1}}]},
        {
            "edits": [
                {
                    "type": TOOL_USES,
                    "trigger": {"type": "tool_uses", "value": -1},
                }
            ]
        },
    ],
)
def test_edits_that_make_no_sense_are_refused(requested: Any) -> None:
    with pytest.raises(RequestError):
        edit_context({"messages": [HI], "context_management": requested}, n_chars)


def test_without_edits_there_is_no_report() -> None:
    assert edit_context({"messages": [HI]}, n_chars) is None
    assert edited([HI]).answer() == {"applied_edits": []}


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_reports_its_edits(stream: bool) -> None:
    bench = Bench(play("x"))
    fields = {
        "messages": [HI, thought(0), HI, thought(1), HI],
        "context_management": {"edits": [{"type": THINKING}]},
    }
    if stream:
        events = bench.message_stream(**fields)
        message = built(events)
        assert events[-2]["context_management"] == message["context_management"]
    else:
        message = bench.message(**fields)
    (applied,) = message["context_management"]["applied_edits"]
    assert applied["cleared_thinking_turns"] == 1
    assert "context_management" not in bench.message()


def test_counted_tokens_are_those_after_the_edits() -> None:
    bench = Bench(play("x"))
    messages = [each for number in range(5) for each in used(number)]
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    body = {"messages": messages, "tools": tools}
    edit = {"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": 0}}
    path = "/v1/messages/count_tokens"
    whole = bench.post(path, body).json()
    counted = bench.post(path, {**body, "context_management": {"edits": [edit]}}).json()
    assert counted["context_management"] == {"original_input_tokens": whole["input_tokens"]}
    assert counted["input_tokens"] < whole["input_tokens"]
