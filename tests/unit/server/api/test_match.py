"""POST /cache/match renders the body of each API to the same prompt as that API."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.server.fake import Bench

TEXT = "the north gate " * 8

CALL = {"type": "tool_use", "id": "1", "name": "look", "input": {"at": "gate"}}

RESULT = {"type": "tool_result", "tool_use_id": "1", "content": "open"}

IMAGE = {"type": "image", "source": {"type": "base64", "data": ""}}

MESSAGES: dict[str, dict[str, Any]] = {
    "system": {"system": "be kind", "messages": [{"role": "user", "content": TEXT}]},
    "blocks": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": TEXT}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}, CALL]},
            {"role": "user", "content": [RESULT, {"type": "text", "text": "and now?"}]},
        ]
    },
    "tools": {
        "messages": [{"role": "user", "content": TEXT}],
        "tools": [{"name": "look", "description": "looks", "input_schema": {"type": "object"}}],
    },
    "document": {
        "messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": TEXT}}]}]
    },
    "stop": {"messages": [{"role": "user", "content": TEXT}], "stop_sequences": ["x"]},
}

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


@pytest.mark.parametrize("form", MESSAGES)
def test_a_message_is_known_by_what_only_its_api_has(form: str, bench: Bench) -> None:
    assert tokens(bench, MESSAGES[form]) == counted(bench, "/v1/messages/count_tokens", MESSAGES[form])


@pytest.mark.parametrize("form", CHATS)
def test_a_chat_completion_stays_one(form: str, bench: Bench) -> None:
    assert tokens(bench, CHATS[form]) == counted(bench, "/v1/chat/completions/input_tokens", CHATS[form])


def test_a_body_that_both_apis_take_has_one_prompt(bench: Bench) -> None:
    assert counted(bench, "/v1/messages/count_tokens", CHATS["text"]) == tokens(bench, CHATS["text"])


def test_responses_completions_and_tokens(bench: Bench) -> None:
    asked = {"input": TEXT, "instructions": "be kind"}
    assert tokens(bench, asked) == counted(bench, "/v1/responses/input_tokens", asked)
    assert tokens(bench, {"tokens": [1, 2, 3]}) == 3
    assert tokens(bench, {"prompt": "abc"}) == len(bench.service.tokenizer.tokenize("abc", add_special=True))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": 7},
        {"messages": [7, {"role": ["system"], "content": [{"type": {}}, 7]}]},
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        {"tools": "input_schema", "messages": [{"role": {}, "content": "x"}]},
        {"system": {"a": 1}, "messages": []},
        {"tokens": [-1]},
    ],
)
def test_what_is_no_request_is_refused(body: dict[str, Any], bench: Bench) -> None:
    assert bench.client.post("/cache/match", json=body).status_code in (400, 501)
