"""A forced call through the Messages and the Responses API, whole and streamed, and its result sent back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
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
def messages(server: Server) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client.messages


@pytest.fixture(scope="module")
def responses(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client.responses


def check(arguments: Any) -> None:
    assert set(arguments) == {"days", "city"}
    assert isinstance(arguments["days"], int)
    assert arguments["city"] in ("Paris", "Rome", "Lima")


def test_messages(messages: Any) -> None:
    tool = {"name": "forecast", "description": "The weather.", "input_schema": SCHEMA}
    options = {"model": "any", "max_tokens": 400, "tools": [tool]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    whole = messages.create(messages=[ASKED], tool_choice=choice, **options)
    (block,) = whole.content
    assert (whole.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "forecast")
    check(block.input)
    with messages.stream(messages=[ASKED], tool_choice=choice, **options) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert len(parts) > 1
    assert (final.stop_reason, final.content[0].input) == ("tool_use", json.loads("".join(parts)))
    assert final.content[0].input == block.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "dry"}
    turns = [ASKED, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert messages.create(messages=turns, tool_choice={"type": "none"}, **options).usage.cache_read_input_tokens > 0


def test_responses(responses: Any) -> None:
    tool = {"type": "function", "name": "forecast", "description": "The weather.", "parameters": SCHEMA}
    options = {"model": "any", "tools": [tool], "parallel_tool_calls": False}
    whole = responses.create(input=[ASKED], tool_choice="required", **options)
    (call,) = whole.output
    assert (call.type, call.name) == ("function_call", "forecast")
    check(json.loads(call.arguments))
    with responses.stream(input=[ASKED], tool_choice="required", **options) as stream:
        parts = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    assert len(parts) > 1
    assert "".join(parts) == final.output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    after = responses.create(input=[ASKED, call.to_dict(), result], tool_choice="none", **options)
    assert after.usage.input_tokens_details.cached_tokens > 0


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
