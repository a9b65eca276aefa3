from __future__ import annotations

from typing import Any

import pytest

from pyctl.errors import RequestError
from pyctl.server.api.anthropic_request import chat_fields


def converted(messages: Any, **fields: Any) -> dict[str, Any]:
    return chat_fields({"messages": messages, **fields})


def messages_of(*messages: Any, **fields: Any) -> Any:
    return converted(list(messages), **fields)["messages"]


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


HI = {"role": "user", "content": "hi"}


def test_system_text_comes_first_and_its_blocks_are_joined() -> None:
    assert messages_of(HI, system="be kind") == [{"role": "system", "content": "be kind"}, HI]
    blocks = [text("a", cache_control={"type": "ephemeral"}), text("b")]
    assert messages_of(HI, system=blocks)[0] == {"role": "system", "content": "ab"}


def test_a_system_message_stays_in_its_place() -> None:
    inside = {"role": "system", "content": "from now on, shout"}
    assert messages_of(HI, inside, HI) == [HI, inside, HI]


def test_an_assistant_turn_keeps_its_thoughts_its_text_and_its_calls() -> None:
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


def test_a_plain_text_document_is_read() -> None:
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "a report"},
    }
    assert messages_of(user(document, text("Sum it up"))) == [
        user(text("a report"), text("Sum it up"))
    ]


SOURCE = {"type": "content", "content": [text("first"), text(" second")]}
FOUND = {
    "type": "search_result",
    "title": "Doors",
    "source": "https://a.b",
    "content": [text("red")],
}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"type": "document", "source": SOURCE}, ["first", " second"]),
        (
            {"type": "document", "title": "Report", "context": "of May", "source": SOURCE},
            ["Report\nof May\nfirst second"],
        ),
        ({"type": "document", "source": {"type": "content", "content": "all"}}, ["all"]),
        (FOUND, ["Doors\nhttps://a.b\nred"]),
        ({"type": "compaction", "content": "So far: doors."}, ["So far: doors."]),
        ({"type": "compaction", "content": None}, []),
        ({"type": "tool_reference", "tool_name": "look"}, ["look"]),
    ],
)
def test_a_block_is_read_as_the_text_that_it_holds(block: Any, expected: list[str]) -> None:
    after = text("And?")
    assert messages_of(user(block, after)) == [user(*map(text, expected), after)]
    result = user({"type": "tool_result", "tool_use_id": "t", "content": [block, after]})
    assert messages_of(result) == [
        {"role": "tool", "tool_call_id": "t", "content": "".join([*expected, "And?"])}
    ]
    said = {"role": "assistant", "content": [block, after]}
    assert messages_of(said) == [{"role": "assistant", "content": "".join([*expected, "And?"])}]
    assert messages_of(HI, system=[block, after])[0]["content"] == "".join([*expected, "And?"])


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        (
            "web_search",
            [{"type": "web_search_result", "title": "A", "url": "b", "encrypted_content": "?"}],
            "A\nb",
        ),
        (
            "web_search",
            {"type": "web_search_tool_result_error", "error_code": "unavailable"},
            "unavailable",
        ),
        (
            "web_fetch",
            {
                "type": "web_fetch_result",
                "url": "b",
                "content": {"type": "document", "title": "T", "source": SOURCE},
            },
            "b\nT\nfirst second",
        ),
        (
            "code_execution",
            {"type": "code_execution_result", "stdout": "1", "stderr": "", "content": []},
            "1",
        ),
        (
            "bash_code_execution",
            {"type": "bash_code_execution_result", "stdout": "1", "stderr": "2"},
            "1\n2",
        ),
        (
            "text_editor_code_execution",
            {"type": "text_editor_code_execution_str_replace_result", "lines": ["-a", "+b"]},
            "-a\n+b",
        ),
        (
            "tool_search",
            {
                "type": "tool_search_tool_search_result",
                "tool_references": [{"type": "tool_reference", "tool_name": "look"}],
            },
            "look",
        ),
        ("mcp", [text("1"), text("2")], "12"),
        ("mcp", "12", "12"),
    ],
)
def test_a_call_of_a_tool_at_anthropics_servers_is_a_call_with_its_result(
    kind: str, content: Any, expected: str
) -> None:
    called = "mcp_tool_use" if kind == "mcp" else "server_tool_use"
    turn = [
        text("I look."),
        {"type": called, "id": "s1", "name": "search", "input": {"query": "doors"}},
        {"type": f"{kind}_tool_result", "tool_use_id": "s1", "content": content},
        text("It is red."),
    ]
    assert messages_of(HI, {"role": "assistant", "content": turn}) == [
        HI,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": "s1",
                    "type": "function",
                    "function": {"name": "search", "arguments": '{"query":"doors"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "s1", "content": expected},
        {"role": "assistant", "content": "It is red."},
    ]


def test_system_text_within_a_message_stays_in_its_place() -> None:
    inside = {"type": "mid_conv_system", "content": [text("Shout.")]}
    assert messages_of(user(text("a"), inside, text("b"))) == [
        user(text("a")),
        {"role": "system", "content": "Shout."},
        user(text("b")),
    ]


def test_sealed_reasoning_and_marks_of_another_model_are_no_text() -> None:
    turn = [
        {"type": "redacted_thinking", "data": "?"},
        {"type": "fallback", "from": {}, "to": {}},
        text("a"),
    ]
    assert messages_of({"role": "assistant", "content": turn}) == [
        {"role": "assistant", "content": "a"}
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
