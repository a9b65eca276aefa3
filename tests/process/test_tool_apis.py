"""A forced call through the Messages and the Responses API, whole and streamed, and its result sent back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.process.conftest import Server

SCHEMA: Any = {
    "type": "object",
    "properties": {"days": {"type": "integer"}, "city": {"type": "string", "enum": ["Paris", "Rome", "Lima"]}},
    "required": ["days", "city"],
}
ASKED: Any = {"role": "user", "content": "Rain?"}


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start("tiny-hybrid", "--reasoning", "off", "--seed", "3", "--temp", "0.8", "-n", "400", is_f32=True)


@pytest.fixture(scope="module")
def responses(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client.responses


def test_a_custom_tool_of_responses(responses: Any) -> None:
    """With the grammar that its input follows, in an item of the input, as Codex sends its tools."""
    grammar = 'start: "put " NAME LF line LF?\nline: "+" /[a-c\\"]{3,9}/\nNAME: /[xy]/\n%import common.LF'
    form = {"type": "grammar", "syntax": "lark", "definition": grammar}
    tool = {"type": "custom", "name": "patch", "description": "Edits.", "format": form}
    space = {"type": "namespace", "name": "functions", "description": "", "tools": [tool]}
    given = [{"type": "additional_tools", "role": "developer", "tools": [space]}, ASKED]
    options = {"model": "any", "parallel_tool_calls": False, "store": False}
    only = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]}
    other = {"type": "function", "name": "forecast", "parameters": SCHEMA}
    whole = responses.create(input=given, tools=[other], tool_choice=only, **options)
    (call,) = whole.output
    assert (call.type, call.name, call.namespace) == ("custom_tool_call", "patch", None)
    assert re.fullmatch(r'put [xy]\n\+[a-c"]{3,9}\n?', call.input)
    events = list(responses.create(input=given, tools=[other], tool_choice=only, stream=True, **options))
    parts = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert len(parts) > 1
    assert "".join(parts) == done.input == events[-1].response.output[0].input == call.input
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    turns = [*given, call.to_dict(), result]
    after = responses.create(input=turns, tools=[other], tool_choice="none", max_output_tokens=4, **options)
    assert after.usage.input_tokens_details.cached_tokens > whole.usage.input_tokens
    broken = {**tool, "format": {**form, "definition": 'start: "a" start?'}}
    with pytest.raises(openai.BadRequestError, match="refers to itself"):
        responses.create(input=[ASKED], tools=[broken], **options)
