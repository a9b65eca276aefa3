from __future__ import annotations

from typing import Any

import pytest

from pyctl.errors import RequestError
from pyctl.server.api.anthropic_request import chat_fields
from tests.unit.server.api.anthropic_messages import (
    FOUND,
    HI,
    converted,
    messages_of,
    text,
    user,
)


def test_system_text_comes_first_and_its_blocks_are_joined() -> None:
    assert messages_of(HI, system="be kind") == [{"role": "system", "content": "be kind"}, HI]
    blocks = [text("a", cache_control={"type": "ephemeral"}), text("b")]
    assert messages_of(HI, system=blocks)[0] == {"role": "system", "content": "ab"}


def test_a_system_message_stays_in_its_place() -> None:
    inside = {"role": "system", "content": "from now on, shout"}
    assert messages_of(HI, inside, HI) == [HI, inside, HI]


def test_an_assistant_turn_keeps_its_thoughts_its_text_and_its_calls() -> None:
    """The blocks of a turn become one message: texts and thoughts are joined in order, calls
    follow, and encrypted thoughts are left out.
    """
    turn = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm ", "signature": ""},
            {"type": "redacted_thinking", "data": "xyz"},
            {"type": "thinking", "thinking": "so", "signature": ""},
            text("I look"),
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": ["ä", 1]}},
            text(" and wait."),
            {"type": "tool_use", "id": "t2", "name": "wait", "input": {}},
        ],
    }
    assert messages_of(HI, turn)[1] == {
        "role": "assistant",
        "content": "I look and wait.",
        "reasoning_content": "hm so",
        "tool_calls": [
            {
                "id": "t1",
                "type": "function",
                "function": {"name": "look", "arguments": '{"at":["ä",1]}'},
            },
            {"id": "t2", "type": "function", "function": {"name": "wait", "arguments": "{}"}},
        ],
    }


def test_tool_results_are_messages_of_their_own_in_their_order() -> None:
    """Each result of a user's turn becomes a message of its tool, also an empty one, and the text
    of the user follows them.
    """
    results = user(
        {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
        {
            "type": "tool_result",
            "tool_use_id": "t2",
            "content": [text("25"), text(" degrees")],
            "is_error": False,
        },
        {"type": "tool_result", "tool_use_id": "t3"},
        text("And now?"),
    )
    assert messages_of(results) == [
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": "25 degrees"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": [text("And now?")]},
    ]


def test_an_assistant_message_without_anything_is_left_out() -> None:
    assert messages_of(HI, {"role": "assistant"}, {"role": "assistant", "content": []}, HI) == [
        HI,
        HI,
    ]


def test_system_text_within_a_message_stays_in_its_place() -> None:
    inside = {"type": "mid_conv_system", "content": [text("Shout.")]}
    assert messages_of(user(text("a"), inside, text("b"))) == [
        user(text("a")),
        {"role": "system", "content": "Shout."},
        user(text("b")),
    ]


def test_tools_and_their_choice() -> None:
    schema = {"type": "object", "properties": {"at": {"type": "string"}}}
    tools = [
        {"name": "look", "description": "Look", "input_schema": schema, "cache_control": {}},
        {"name": "bash"},
    ]
    assert converted([HI], tools=tools)["tools"] == [
        {
            "type": "function",
            "function": {"name": "look", "description": "Look", "parameters": schema},
        },
        {"type": "function", "function": {"name": "bash", "description": "", "parameters": {}}},
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ],
)
def test_tool_choice(choice: Any, expected: Any) -> None:
    fields = converted([HI], tool_choice=choice)
    assert fields["tool_choice"] == expected
    assert "parallel_tool_calls" not in fields
    assert (
        converted([HI], tool_choice={**choice, "disable_parallel_tool_use": True})[
            "parallel_tool_calls"
        ]
        is False
    )


def test_options_have_their_openai_names() -> None:
    """Each option of Anthropic's API has its OpenAI name, those of pyctl pass unchanged, and
    metadata and the name of the model are left out.
    """
    fields = converted(
        [HI],
        model="claude",
        max_tokens=7,
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stream=True,
        metadata={"user_id": "me"},
        thinking={"type": "enabled", "budget_tokens": 99},
        output_config={
            "effort": "high",
            "format": {"type": "json_schema", "schema": {"type": "object"}},
        },
        cache_prompt=False,
    )
    assert fields == {
        "messages": [HI],
        "max_tokens": 7,
        "stop": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "stream": True,
        "thinking_budget_tokens": 99,
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "schema": {"type": "object"}},
        "cache_prompt": False,
    }


def test_what_is_left_out_has_llama_servers_defaults() -> None:
    assert converted([HI]) == {"messages": [HI], "max_tokens": 4096}
    assert converted([HI], thinking={"type": "enabled"})["thinking_budget_tokens"] == 10000


def test_a_schema_as_betas_wrote_it() -> None:
    form, other = (
        {"type": "json_schema", "schema": {"type": kind}} for kind in ("object", "array")
    )
    assert converted([HI], output_format=form)["response_format"] == form
    assert (
        converted([HI], output_format=form, output_config={"format": other})["response_format"]
        == other
    )
    assert "response_format" not in converted(
        [HI], output_format=None, output_config={"effort": "low"}
    )


def test_disabled_thinking_is_not_begun() -> None:
    disabled = {"type": "disabled"}
    assert converted([HI], thinking=disabled)["chat_template_kwargs"] == {"enable_thinking": False}
    kwargs = {"enable_thinking": True, "x": 1}
    assert (
        converted([HI], thinking=disabled, chat_template_kwargs=kwargs)["chat_template_kwargs"]
        == kwargs
    )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [user("hi")]},
        {"messages": [user({"type": "text", "text": 7})]},
        {"messages": [user({"type": "image", "source": {}})]},
        {
            "messages": [
                user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]})
            ]
        },
        {"messages": [user({"type": "document", "source": {"type": "base64", "data": ""}})]},
        {"messages": [user({"type": "tool_use", "id": 7, "name": "x"})]},
        {"messages": [user({"type": "container_upload", "file_id": "f"})]},
        {"messages": [user({"type": "tool_addition", "tool": {}})]},
        {"messages": [user({"type": "not_yet_known", "text": "hi"})]},
        {"messages": [user({"type": ["text"], "text": "hi"})]},
        {"messages": [user({"text": "hi"})]},
        {"messages": [user({"type": "compaction", "encrypted_content": "?", "content": 7})]},
        {
            "messages": [
                user({"type": "search_result", "content": [{"type": "image", "source": {}}]})
            ]
        },
        {"messages": [user({"type": "document", "source": {"type": "file", "file_id": "f"}})]},
        {
            "messages": [
                user({"type": "document", "source": {"type": "content", "content": [FOUND]}})
            ]
        },
        {"messages": [user({"type": "tool_result", "tool_use_id": "t", "content": {"a": 1}})]},
        {
            "messages": [
                user(
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [{"type": "browser_state"}],
                    }
                )
            ]
        },
        {"messages": [user({"type": "web_search_tool_result", "content": [{"type": "unknown"}]})]},
        {"messages": [user({"type": "code_execution_tool_result", "content": 7})]},
        {
            "messages": [
                user(
                    {
                        "type": "code_execution_tool_result",
                        "content": {"type": "encrypted_code_execution_result"},
                    }
                )
            ]
        },
        {
            "messages": [HI],
            "system": [{"type": "image", "source": {"type": "base64", "data": "AAAA"}}],
        },
        {"messages": [HI], "system": [{"type": "not_yet_known"}]},
        {"messages": [HI], "system": 7},
        {"messages": [HI], "system": ["x"]},
        {"messages": [HI], "tools": {}},
        {"messages": [HI], "tools": [7]},
        {"messages": [HI], "tool_choice": "auto"},
        {"messages": [HI], "tool_choice": {"type": ["auto"]}},
        {"messages": [HI], "thinking": "on"},
        {"messages": [HI], "thinking": {"type": "enabled", "budget_tokens": "many"}},
        {"messages": [HI], "output_config": {"format": []}},
    ],
)
def test_bad_requests_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        chat_fields(body)
