"""Characters of a reply at which Unicode ends a line: clients split streams by them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.client import HI
from tests.unit.server.fake import Bench, play

REPLY = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1eh"
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "x"},
    "/completion": {"prompt": "x"},
    "/v1/messages": {"messages": HI},
    "/v1/responses": {"input": "x"},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "x"},
}


@pytest.mark.parametrize("path", [*ASKED])
def test_each_line_of_a_stream_is_whole(path: str) -> None:
    response = Bench(play(REPLY)).post(path, {**ASKED[path], "stream": True})
    lines = [line for line in httpx.Response(200, content=response.content).iter_lines() if line]
    data = [line.removeprefix("data: ") for line in lines if not line.startswith("event: ")]
    values = [json.loads(each) for each in data if each != "[DONE]"]
    assert any(map(has_reply, values))


def has_reply(value: Any) -> bool:
    """Return whether the reply is in ``value``, at any depth."""
    if isinstance(value, dict | list):
        return any(
            has_reply(item) for item in (value.values() if isinstance(value, dict) else value)
        )
    return isinstance(value, str) and REPLY in value
