"""Numbers of more than 53 bits in schemas, through every API of a running server."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.process.conftest import Server

ID = 1234567890123456789
SCHEMA = {
    "type": "object",
    "properties": {"id": {"enum": [ID]}},
    "required": ["id"],
    "additionalProperties": False,
}
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "open", "parameters": SCHEMA}}
BOUND = {"type": "json_schema", "json_schema": {"name": "id", "schema": SCHEMA}}
ANTHROPIC = {
    "tools": [{"name": "open", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "open"},
}

REQUESTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any]]] = {
    "completion": (
        "/completion",
        {"prompt": "hi", "json_schema": SCHEMA},
        lambda reply: reply["content"],
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": HI, "response_format": BOUND},
        lambda reply: reply["choices"][0]["message"]["content"],
    ),
    "tool": (
        "/v1/chat/completions",
        {"messages": HI, "tools": [TOOL], "tool_choice": "required"},
        lambda reply: reply["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"],
    ),
    "responses": (
        "/v1/responses",
        {
            "input": "hi",
            "text": {"format": {"type": "json_schema", "name": "id", "schema": SCHEMA}},
        },
        lambda reply: reply["output"][-1]["content"][0]["text"],
    ),
    "messages": (
        "/v1/messages",
        {"messages": HI, "max_tokens": 200, **ANTHROPIC},
        lambda reply: json.dumps(reply["content"][-1]["input"]),
    ),
    "ollama": (
        "/api/chat",
        {"messages": HI, "format": SCHEMA, "stream": False},
        lambda reply: reply["message"]["content"],
    ),
}


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start("", "--no-kv-cache", "-n", "200")


@pytest.mark.parametrize("name", REQUESTS)
def test_a_number_keeps_its_digits(server: Server, name: str) -> None:
    path, body, text_of = REQUESTS[name]
    reply = server.client.post_json(path, {"model": "any", **body})
    assert json.loads(text_of(reply)) == {"id": ID}
