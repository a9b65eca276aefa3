from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.errors import RequestError
from pyctl.server.api.responses_request import ResponseRequest, seal


def converted(given: Any, **fields: Any) -> dict[str, Any]:
    return ResponseRequest.from_json({"input": given, **fields}).chat


def messages_of(*items: Any, **fields: Any) -> Any:
    return converted(list(items), **fields)["messages"]


def part(text: str, kind: str = "output_text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def reasoning(**members: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], **members}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"call_{name}", "name": name, "arguments": "{}"}


HI = {"role": "user", "content": "hi"}


def test_a_string_is_what_the_user_says() -> None:
    assert converted("hi") == {"messages": [HI]}
    assert converted("hi", instructions="Be kind.")["messages"] == [
        {"role": "system", "content": "Be kind."},
        HI,
    ]
    assert converted("hi", instructions=None)["messages"] == [HI]


def test_messages_of_all_roles_in_their_places() -> None:
    items = [
        {"type": "message", "role": "developer", "content": "a", "status": "completed"},
        {"role": "user", "content": [part("b", "input_text"), part("c", "input_text")]},
        {"role": "assistant", "content": "d"},
        {"role": "system", "content": [part("e", "input_text")]},
    ]
    assert messages_of(*items) == [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": [text("b"), text("c")]},
        {"role": "assistant", "content": "d"},
        {"role": "system", "content": [text("e")]},
    ]


def test_the_items_of_a_turn_are_one_message() -> None:
    """Reasoning, text and calls in a row become one message of the assistant, as the template
    expects them, and each result a message of its tool.
    """
    turn = [
        reasoning(id="rs_1", content=[part("hm ", "reasoning_text"), part("so", "reasoning_text")]),
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "content": [part("I look."), part("!", "output_text")],
        },
        call("look"),
        call("wait"),
    ]
    outputs = [
        {"type": "function_call_output", "call_id": "call_look", "output": "sunny"},
        {
            "type": "function_call_output",
            "call_id": "call_wait",
            "output": [part("done", "input_text")],
        },
    ]
    calls = [
        {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("look", "wait")
    ]
    assert messages_of(HI, *turn, *outputs) == [
        HI,
        {
            "role": "assistant",
            "reasoning_content": "hm so",
            "content": "I look.!",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "call_look", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_wait", "content": [text("done")]},
    ]


def test_a_refusal_is_text() -> None:
    item = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "refusal", "refusal": "no"}],
    }
    assert messages_of(item)[0]["content"] == "no"


@given(st.text(min_size=1))
def test_sealed_reasoning_comes_back(thought: str) -> None:
    item = reasoning(encrypted_content=seal(thought))
    assert messages_of(item, call("x"))[0]["reasoning_content"] == thought


@pytest.mark.parametrize(
    "sealed",
    ["", None, "gAAAAABo", "pyctl-reasoning-", "pyctl-reasoning-AAAA", "pyctl-reasoning-ä"],
)
def test_reasoning_that_cannot_be_read_is_left_out(sealed: str | None) -> None:
    assert messages_of(HI, reasoning(encrypted_content=sealed), HI) == [HI, HI]
    summary = [{"type": "summary_text", "text": "short"}]
    item = {**reasoning(encrypted_content=sealed), "summary": summary}
    assert messages_of(HI, item, call("x"))[1]["reasoning_content"] == "short"


def test_options_have_their_chat_names() -> None:
    """Each option of the Responses API has its chat name. Options without a meaning here are left
    out and not refused.
    """
    schema = {"type": "object"}
    style = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    fields = converted(
        "hi",
        model="gpt",
        max_output_tokens=7,
        temperature=0.5,
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": style, "verbosity": "low"},
        parallel_tool_calls=False,
        metadata={"a": "b"},
        store=False,
        include=[],
        truncation="disabled",
        seed=3,
        stream=True,
    )
    assert fields == {
        "messages": [HI],
        "max_tokens": 7,
        "temperature": 0.5,
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": schema, "strict": True},
        },
        "parallel_tool_calls": False,
        "seed": 3,
        "stream": True,
    }
    assert converted("hi", text={"format": {"type": "json_object"}})["response_format"] == {
        "type": "json_object"
    }


def test_functions_are_nested_and_other_tools_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Functions get the form of the chat API. Tools that only OpenAI's servers run are left out
    with a warning.
    """
    schema = {"type": "object"}
    look = {
        "type": "function",
        "name": "look",
        "description": "Look",
        "parameters": schema,
        "strict": True,
    }
    fields = converted(
        "hi", tools=[{"type": "web_search"}, look, {"type": "function", "name": "wait"}]
    )
    assert fields["tools"] == [
        {
            "type": "function",
            "function": {"name": "look", "description": "Look", "parameters": schema},
        },
        {"type": "function", "function": {"name": "wait", "description": "", "parameters": {}}},
    ]
    assert "web_search" in caplog.text
    assert "tools" not in converted("hi", tools=[{"type": "web_search"}])


def test_functions_of_a_namespace_are_functions_with_its_name_before_theirs() -> None:
    """A namespace is flattened for the template, in definitions, calls of the history and the
    choice alike, and can be split again for the reply.
    """
    inner = {
        "type": "function",
        "name": "close",
        "description": "Closes.",
        "parameters": {"type": "object"},
    }
    space = {
        "type": "namespace",
        "name": "agents",
        "tools": [inner, {"type": "web_search", "name": "x"}],
    }
    asked = ResponseRequest.from_json({"input": "hi", "tools": [space]})
    function = {"name": "agents__close", "description": "Closes.", "parameters": {"type": "object"}}
    assert asked.chat["tools"] == [{"type": "function", "function": function}]
    assert asked.tools == {"agents__close": ("agents", inner)}
    item = {
        "type": "function_call",
        "namespace": "agents",
        "name": "close",
        "arguments": "{}",
        "call_id": "c",
    }
    assert messages_of(item)[0]["tool_calls"][0]["function"]["name"] == "agents__close"
    chosen = converted(
        "hi",
        tools=[space],
        tool_choice={"type": "function", "namespace": "agents", "name": "close"},
    )
    assert chosen["tool_choice"] == {"type": "function", "name": "agents__close"}


def test_tools_within_the_input_are_tools_and_the_last_of_a_name_counts() -> None:
    """Codex 0.144 and later sends all of its tools so; the namespace "functions" is its word for
    tools without one.
    """
    inner = [
        {"type": "custom", "name": "exec"},
        {"type": "function", "name": "wait", "description": "new"},
    ]
    more = {"type": "additional_tools", "role": "developer", "id": "a"}
    spaces = [
        {"type": "namespace", "name": name, "tools": inner} for name in ("functions", "agents")
    ]
    items = [{**more, "tools": spaces}, {"role": "user", "content": "hi"}, {**more, "tools": []}]
    fields = converted(items, tools=[{"type": "function", "name": "wait", "description": "old"}])
    assert fields["messages"] == [HI]
    functions = [tool["function"] for tool in fields["tools"]]
    assert [function["name"] for function in functions] == [
        "wait",
        "exec",
        "agents__exec",
        "agents__wait",
    ]
    assert functions[0]["description"] == "new"
    call = {
        "type": "custom_tool_call",
        "namespace": "functions",
        "name": "exec",
        "input": "x",
        "call_id": "c",
    }
    assert messages_of(call)[0]["tool_calls"][0]["function"]["name"] == "exec"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", "required"),
        ({"type": "none"}, "none"),
        ({"type": "function", "name": "look"}, {"type": "function", "name": "look"}),
        ({"type": "custom", "name": "look"}, {"type": "function", "name": "look"}),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "custom", "name": "a"}, {"type": "mcp"}],
            },
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]},
        ),
    ],
)
def test_tool_choice(choice: Any, expected: Any) -> None:
    assert converted("hi", tool_choice=choice)["tool_choice"] == expected


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "x"}, {"type": "custom", "name": "x"}]
)
def test_a_call_that_is_forced_of_a_tool_that_was_left_out_is_refused(choice: Any) -> None:
    tools = [{"type": "web_search"}]
    for fields in (
        {"input": "hi", "tools": tools},
        {"input": [{"type": "additional_tools", "tools": tools}, HI]},
    ):
        with pytest.raises(RequestError, match="requires a call"):
            ResponseRequest.from_json({**fields, "tool_choice": choice})


def test_items_of_custom_tools_are_calls_and_results() -> None:
    """Calls and results of custom tools become those of functions with one input. Items that the
    server cannot resolve are refused by name.
    """
    items = [
        {
            "type": "custom_tool_call",
            "call_id": "a",
            "name": "patch",
            "input": '"\n',
            "id": "ctc_1",
        },
        {"type": "custom_tool_call_output", "call_id": "a", "output": "ok"},
        {"role": "assistant", "content": None},
    ]
    call, result, last = messages_of(HI, *items)[1:]
    (made,) = call["tool_calls"]
    assert made["id"] == "a"
    assert made["function"]["name"] == "patch"
    assert json.loads(made["function"]["arguments"]) == {"input": '"\n'}
    assert result["tool_call_id"] == "a"
    assert result["content"] == "ok"
    assert last == {"role": "assistant", "content": ""}
    for kind in (
        "item_reference",
        "compaction",
        "mcp_call",
        "local_shell_call",
        "web_search_call",
        "x_output",
        ["y"],
    ):
        with pytest.raises(RequestError, match=r"items of type .*(item|comp|mcp|local|web|x_|y)"):
            messages_of({"type": kind, "id": "m"})


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        {"input": [{"role": "assistant", "content": [{"type": "output_text", "text": 7}]}]},
        {"input": 7},
        {"input": [], "tools": []},
        {"input": [{"type": "additional_tools", "tools": []}]},
        {"input": ["hi"]},
        {"input": [{}]},
        {"input": [{"role": "user"}]},
        {"input": [{"role": "user", "content": [7]}]},
        {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        {"input": [{"role": "user", "content": [{"type": "video"}]}]},
        {"input": [{"type": "function_call", "name": "x"}]},
        {"input": [{"type": "function_call_output", "call_id": "x"}]},
        {"input": [{"type": "function_call_output", "output": "x"}]},
        {"input": [{"type": "reasoning", "content": "x"}]},
        {"input": [{"type": "reasoning", "summary": [7]}]},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
        {"input": "x", "instructions": ["y"]},
        {"input": "x", "tools": {}},
        {"input": "x", "tools": [7]},
        {"input": "x", "reasoning": "low"},
        {"input": "x", "text": "json"},
        {"input": "x", "previous_response_id": 7},
    ],
)
def test_bad_requests_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        ResponseRequest.from_json(body)


def test_an_empty_input_is_named() -> None:
    with pytest.raises(RequestError, match="'input' is empty"):
        ResponseRequest.from_json({"input": []})
    assert ResponseRequest.from_json({"input": [], "instructions": "Hi"}).chat["messages"] == [
        {"role": "system", "content": "Hi"}
    ]
