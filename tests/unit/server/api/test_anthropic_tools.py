"""Tools that a conversation adds and removes: the head stays, and replies may call the others."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.errors import NotSupportedError, RequestError
from pyctl.server.api.anthropic_tools import OfferedTools, read_tool
from tests.unit.server.api.anthropic_messages import HI, converted, user

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK = {"name": "look", "description": "Look", "input_schema": SCHEMA}
WAIT = {"name": "wait"}
DEFINITION = {"type": "tool_definition", "definition": WAIT}


def reference(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "name": name}


def change(kind: str, tool: Any) -> dict[str, Any]:
    return {"type": kind, "tool": tool}


def system(*blocks: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": list(blocks), **fields}


def deferred(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "defer_loading": True, **fields}


def found(*tool_names: str) -> list[dict[str, Any]]:
    """Return the search for tools of a client, and its result."""
    call = {"type": "tool_use", "id": "a", "name": "search", "input": {}}
    references = [{"type": "tool_reference", "tool_name": name} for name in tool_names]
    result = {"type": "tool_result", "tool_use_id": "a", "content": references}
    return [{"role": "assistant", "content": [call]}, user(result)]


def names(tools: Any) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def test_an_added_tool_is_described_in_its_place() -> None:
    """The template shows the same tools as before, so that the cache has its head."""
    inside = system(change("tool_addition", DEFINITION))
    chat = converted([HI, inside, HI], tools=[LOOK])
    before, added, after = chat["messages"]
    assert before == after == HI
    assert added["role"] == "system"
    assert '{"name":"wait","description":"","parameters":{}}' in added["content"]
    assert names(chat["tools"]) == ["look"]
    assert names(chat["callable_tools"]) == ["look", "wait"]


def test_a_removed_tool_may_not_be_called() -> None:
    inside = system(change("tool_removal", reference("look")))
    chat = converted([HI, inside], tools=[LOOK, WAIT])
    assert names(chat["tools"]) == ["look", "wait"]
    assert names(chat["callable_tools"]) == ["wait"]
    assert chat["messages"][1]["content"] == "The tool look is no longer available."


def test_a_removed_tool_can_come_back() -> None:
    messages = [
        system(change("tool_removal", reference("look"))),
        system(change("tool_addition", reference("look"))),
    ]
    chat = converted([HI, *messages], tools=[LOOK])
    assert names(chat["callable_tools"]) == ["look"]
    assert chat["messages"][2]["content"] == "The tool look is available from now on."


def test_an_added_tool_can_be_removed_by_its_name() -> None:
    messages = [
        system(change("tool_addition", DEFINITION)),
        system(change("tool_removal", reference("wait"))),
    ]
    assert converted([HI, *messages], tools=[LOOK])["callable_tools"] == [read_tool(LOOK, "tool")]


def test_without_tools_in_the_request_an_added_one_goes_to_the_head() -> None:
    chat = converted([HI, system(change("tool_addition", DEFINITION))])
    assert names(chat["tools"]) == ["wait"]
    assert names(chat["callable_tools"]) == ["wait"]


def test_without_a_change_all_tools_may_be_called() -> None:
    assert "callable_tools" not in converted([HI], tools=[LOOK])


def test_a_deferred_tool_is_not_in_the_head() -> None:
    chat = converted([HI], tools=[LOOK, deferred("wait"), deferred("listen")])
    assert names(chat["tools"]) == ["look"]
    assert "callable_tools" not in chat


def test_a_reference_defines_the_deferred_tool_in_its_place() -> None:
    """The head stays the same, whether a search found tools or not."""
    listen = deferred("listen", description="Listen", input_schema=SCHEMA)
    chat = converted([HI, *found("listen", "look")], tools=[LOOK, listen, deferred("wait")])
    assert names(chat["tools"]) == ["look"]
    assert names(chat["callable_tools"]) == ["look", "listen"]
    function = (
        '{"name":"listen","description":"Listen",'
        '"parameters":{"type":"object","properties":{"at":{"type":"string"}}}}'
    )
    text = f"look<functions>\n<function>{function}</function>\n</functions>"
    assert chat["messages"][-1]["content"] == text


def test_a_tool_that_was_found_twice_is_defined_once() -> None:
    """Otherwise many references would make a small request a large prompt."""
    messages = [HI, *found("wait", "wait"), *found("wait")]
    chat = converted(messages, tools=[LOOK, deferred("wait")])
    contents = [message["content"] for message in chat["messages"]]
    assert sum(str(content).count("<function>") for content in contents) == 1
    assert contents[-1] == "wait"


def test_a_deferred_tool_that_is_added_is_defined() -> None:
    inside = system(change("tool_addition", reference("wait")))
    chat = converted([HI, inside], tools=[LOOK, deferred("wait")])
    assert names(chat["callable_tools"]) == ["look", "wait"]
    assert '{"name":"wait","description":"","parameters":{}}' in chat["messages"][1]["content"]


def test_deferred_tools_alone_go_to_the_head() -> None:
    """The template shows the form of calls with its tools, so it needs some."""
    chat = converted([HI], tools=[deferred("wait")])
    assert names(chat["tools"]) == ["wait"]


def test_a_wrong_deferral_is_refused() -> None:
    with pytest.raises(RequestError, match="defer_loading"):
        converted([HI], tools=[{**LOOK, "defer_loading": "later"}])


def test_a_summary_brings_the_tools_that_changed_before_it() -> None:
    changes = [change("tool_addition", DEFINITION), change("tool_removal", reference("look"))]
    summary = {"type": "compaction", "content": "So far.", "tool_changes": changes}
    chat = converted([user(summary), HI], tools=[LOOK])
    assert [message["role"] for message in chat["messages"]] == ["user", "system", "user"]
    assert names(chat["callable_tools"]) == ["wait"]


def test_many_definitions_take_linear_time() -> None:
    offered = OfferedTools()
    for number in range(20_000):
        definition = {"type": "tool_definition", "definition": {"name": f"tool{number}"}}
        offered.change("tool_addition", definition, "here")
    assert len(offered.head) == len(offered.callable) == 20_000


@pytest.mark.parametrize(
    ("kind", "tool"),
    [
        ("tool_addition", reference("other")),
        ("tool_removal", reference("other")),
        ("tool_addition", None),
        ("tool_addition", "look"),
        ("tool_addition", {"type": "tool_definition"}),
        ("tool_addition", {"type": "tool_definition", "definition": {"name": ""}}),
        ("tool_addition", {"type": "tool_reference", "name": 7}),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(kind: str, tool: Any) -> None:
    with pytest.raises(RequestError):
        converted([HI, system(change(kind, tool))], tools=[LOOK])


@pytest.mark.parametrize(
    ("kind", "tool"),
    [
        ("tool_addition", {"type": "mcp_tool_reference", "server_name": "a", "name": "b"}),
        ("tool_removal", {"type": "mcp_toolset_reference", "server_name": "a"}),
        ("tool_removal", DEFINITION),
        ("tool_addition", {"type": "tool_definition", "definition": {"type": "bash_20250124"}}),
    ],
)
def test_tools_of_others_are_not_supported(kind: str, tool: Any) -> None:
    with pytest.raises(NotSupportedError):
        converted([HI, system(change(kind, tool))], tools=[LOOK])
