"""Half a surrogate pair in a request, as JavaScript clients write it of a text that was cut within
an emoji.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.server.fake import Bench, play

HALF = "a \ud83d"
WHOLE = "a \ufffd"


def asked(text: str) -> dict[str, dict[str, Any]]:
    """Return a body with ``text`` for each path that makes a prompt of it."""
    messages = [{"role": "user", "content": text}]
    return {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": text},
        "/completion": {"prompt": text},
        "/v1/messages": {"messages": messages, "system": text},
        "/v1/responses": {"input": text},
        "/api/chat": {"messages": messages, "stream": False},
        "/api/generate": {"prompt": text, "stream": False},
    }


@pytest.mark.parametrize("path", [*asked("")])
def test_half_a_pair_is_read_as_a_replacement_character(path: str) -> None:
    bench = Bench(play("x"))
    for text in (HALF, WHOLE):
        response = bench.client.post(path, content=json.dumps(asked(text)[path]))
        assert response.status_code == 200, response.text
    half, whole = (request.prompt.tokens.tolist() for request in bench.worker.requests)
    assert half == whole


def test_half_a_pair_is_tokenised_and_templated() -> None:
    client = Bench(play("x")).client
    for path, member in (("/tokenize", "content"), ("/v1/messages/count_tokens", "messages")):
        half, whole = (
            client.post(
                path,
                content=json.dumps(
                    {member: text if member == "content" else [{"role": "user", "content": text}]}
                ),
            )
            for text in (HALF, WHOLE)
        )
        assert half.status_code == 200
        assert half.json() == whole.json()


def test_half_a_pair_within_the_arguments_of_a_call_is_read_too() -> None:
    """Arguments are JSON within a text: the escape is escaped."""
    function = {"name": "look", "arguments": json.dumps({"at": HALF})}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "red"},
    ]
    response = Bench(play("x")).post("/apply-template", {"messages": messages})
    assert response.status_code == 200, response.text
    assert "a \ufffd" in response.json()["prompt"]
