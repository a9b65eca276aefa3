"""The openai package against a live server: what its users call, chat completions and responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.functions import function
from tests.process.conftest import Server

SYSTEM = "You answer at length. " * 12
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather?"}]
TOOL = function("weather", required=["tomorrow"], tomorrow={"type": "boolean"})
TOOL["function"] |= {
    "strict": True,
    "parameters": {**TOOL["function"]["parameters"], "additionalProperties": False},
}


class Colour(BaseModel):
    """The content of a structured reply."""

    name: Literal["red", "green"]
    bright: bool


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    flags = ("-c", "65536", "--alias", "tiny", "--api-key", "secret", "--temp", "0")
    return start("tiny-hybrid", *flags, is_f32=True)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


@pytest.mark.smoke
def test_a_chat_streamed_with_its_helper(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20}
    fields["extra_body"] = {
        "grammar": 'root ::= "It " [a-z]{5} "."'
    }  # the helper wants a reply that ends by itself
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens


def test_a_structured_reply_is_parsed(client: openai.OpenAI) -> None:
    reply = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, max_tokens=200, response_format=Colour
    )
    parsed = reply.choices[0].message.parsed
    assert isinstance(parsed, Colour)
    assert json.loads(reply.choices[0].message.content or "") == parsed.model_dump()


def test_a_tool_is_called_beside_a_schema(client: openai.OpenAI) -> None:
    """A request with tools and a schema can get either: a forced or chosen call has the tool's own
    arguments, and a plain reply follows the schema.
    """
    schema = {
        "name": "Colour",
        "schema": {**Colour.model_json_schema(), "additionalProperties": False},
    }
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": [TOOL],
        "max_tokens": 400,
    }
    fields |= {
        "response_format": {"type": "json_schema", "json_schema": schema},
        "parallel_tool_calls": False,
    }
    for more in (
        {"tool_choice": "required"},
        {"extra_body": {"logit_bias": [["<tool_call>", 100]]}},
    ):
        message = client.chat.completions.create(**fields, **more).choices[0].message
        assert message.tool_calls
        assert message.tool_calls[0].type == "function"
        assert set(json.loads(message.tool_calls[0].function.arguments)) == {"tomorrow"}
    said = (
        client.chat.completions.create(**fields, extra_body={"logit_bias": [["{", 100]]})
        .choices[0]
        .message
    )
    assert not said.tool_calls
    assert Colour.model_validate_json(said.content or "")
    response = client.responses.create(
        model="tiny",
        input="What is the weather?",
        tools=[{"type": "function", **TOOL["function"]}],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", **schema}},
        max_output_tokens=400,
    )
    assert [item.type for item in response.output if item.type != "reasoning"] == ["function_call"]


def test_errors_are_those_that_the_package_knows(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * 70_000}]
        )
    assert refused.value.type == "exceed_context_size_error"
    with pytest.raises(openai.NotFoundError):
        client.post("/nowhere", cast_to=object)
    with pytest.raises(openai.APIStatusError) as unsupported:
        client.embeddings.create(model="tiny", input="text")
    assert unsupported.value.status_code == 501
    assert unsupported.value.type == "not_supported_error"
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.chat.completions.create(model="tiny", messages=MESSAGES)


def asked_response(given: Any = "Tell me more", **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "input": given,
        "instructions": SYSTEM,
        "max_output_tokens": 12,
        **fields,
    }


def test_a_response_is_streamed(client: openai.OpenAI) -> None:
    whole = client.responses.create(**asked_response())
    with client.responses.stream(**asked_response()) as stream:
        events = list(stream)
        final = stream.get_final_response()
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == final.output_text
    assert events[-1].type == "response.completed"
    assert final.usage.input_tokens_details.cached_tokens > 0


def test_errors_of_responses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="tiny", input=[{"role": "no role", "content": "x"}])  # type: ignore[list-item,misc]
    with (
        pytest.raises(openai.BadRequestError),
        client.responses.stream(**asked_response("x" * 70_000)) as stream,
    ):
        list(stream)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").responses.create(**asked_response())


def test_a_custom_tool_of_responses(client: openai.OpenAI) -> None:
    """A custom tool is offered in an item of the input, as Codex sends its tools."""
    grammar = (
        'start: "put " NAME LF line LF?\nline: "+" /[a-c\\"]{3,9}/\nNAME: /[xy]/\n%import common.LF'
    )
    form = {"type": "grammar", "syntax": "lark", "definition": grammar}
    tool = {"type": "custom", "name": "patch", "description": "Edits.", "format": form}
    space = {"type": "namespace", "name": "functions", "description": "", "tools": [tool]}
    given = [{"type": "additional_tools", "role": "developer", "tools": [space]}, MESSAGES[0]]
    options: Any = {
        "model": "any",
        "parallel_tool_calls": False,
        "store": False,
        "temperature": 0.8,
    }
    options |= {"max_output_tokens": 400, "extra_body": {"seed": 3}}
    responses: Any = client.responses
    only = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "custom", "name": "patch"}],
    }
    other = {"type": "function", "name": "weather", "parameters": TOOL["function"]["parameters"]}
    whole = responses.create(input=given, tools=[other], tool_choice=only, **options)
    (call,) = whole.output
    assert call.type == "custom_tool_call"
    assert call.name == "patch"
    assert call.namespace is None
    events = list(
        responses.create(input=given, tools=[other], tool_choice=only, stream=True, **options)
    )
    parts = [
        event.delta for event in events if event.type == "response.custom_tool_call_input.delta"
    ]
    (done,) = [event.item for event in events if event.type == "response.output_item.done"]
    assert "".join(parts) == done.input == events[-1].response.output[0].input == call.input
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    turns = [*given, call.to_dict(), result]
    after = responses.create(
        input=turns, tools=[other], tool_choice="none", **{**options, "max_output_tokens": 4}
    )
    assert after.usage.input_tokens_details.cached_tokens > 100
