"""POST /cache/match renders a body to the same prompt as its API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.fake import Bench

TEXT = "the north gate " * 8

CHATS: dict[str, dict[str, Any]] = {
    "text": {"messages": [{"role": "user", "content": TEXT}]},
    "system": {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": TEXT}]},
    "tools": {
        "messages": [{"role": "user", "content": TEXT}],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
    },
    "calls": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": TEXT}]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "open"},
        ],
        "thinking": {"type": "enabled"},
    },
}


def tokens(bench: Bench, body: dict[str, Any]) -> int:
    response = bench.client.post("/cache/match", json=body)
    assert response.status_code == 200, response.text
    return int(response.json()["tokens"])


def counted(bench: Bench, path: str, body: dict[str, Any]) -> int:
    response = bench.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return int(response.json()["input_tokens"])


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("form", CHATS)
def test_a_chat_completion_stays_one(form: str, bench: Bench) -> None:
    assert tokens(bench, CHATS[form]) == counted(bench, "/v1/chat/completions/input_tokens", CHATS[form])


def test_completions(bench: Bench) -> None:
    assert tokens(bench, {"prompt": [1, 2, 3]}) == 3
    assert tokens(bench, {"prompt": "abc"}) == len(bench.service.tokenizer.tokenize("abc", add_special=True))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": 7},
        {"messages": [7, {"role": ["system"], "content": [{"type": {}}, 7]}]},
        {"tools": "input_schema", "messages": [{"role": {}, "content": "x"}]},
        {"prompt": [-1]},
    ],
)
def test_what_is_no_request_is_refused(body: dict[str, Any], bench: Bench) -> None:
    assert bench.client.post("/cache/match", json=body).status_code in (400, 501)
