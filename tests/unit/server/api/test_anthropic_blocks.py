"""Blocks of Anthropic's messages, read as texts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.api.anthropic_messages import FOUND, HI, SOURCE, messages_of, text, user


def test_a_plain_text_document_is_read() -> None:
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "a report"},
    }
    assert messages_of(user(document, text("Sum it up"))) == [
        user(text("a report"), text("Sum it up"))
    ]


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
    """A call that ran at Anthropic's servers becomes a call and its result, with the text around it
    in order: the template has no other form for it.
    """
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


def test_sealed_reasoning_and_marks_of_another_model_are_no_text() -> None:
    turn = [
        {"type": "redacted_thinking", "data": "?"},
        {"type": "fallback", "from": {}, "to": {}},
        text("a"),
    ]
    assert messages_of({"role": "assistant", "content": turn}) == [
        {"role": "assistant", "content": "a"}
    ]
