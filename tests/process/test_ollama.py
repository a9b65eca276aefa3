"""The ollama package against a live server: what its users call, blocking and async."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import ollama
import pytest

from tests.client import Client
from tests.process.conftest import Server
from tests.process.test_sdk_openai import Colour
from tests.unit.chat.conftest import unpacked

SYSTEM = {"role": "system", "content": "You tell the weather, at some length. " * 12}
MESSAGES: list[Any] = [SYSTEM, {"role": "user", "content": "What is the weather?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 12}
HEADERS = {"authorization": "Bearer secret"}


def weather(tomorrow: bool) -> str:
    """The weather of a day.

    Args:
      tomorrow: Tomorrow in place of today
    """
    return "rain" if tomorrow else "sun"


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    template = str(unpacked("templates/Qwen3.5-4B.jinja"))
    flags = (
        "--chat-template-file",
        template,
        *shlex.split("-c 32768 --alias qwen --api-key secret"),
    )
    return start("tiny-hybrid", *flags, is_f32=True)


@pytest.fixture
def client(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(server.url, headers=HEADERS) as client:
        yield client


def test_chat_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat("qwen:latest", MESSAGES, think=False, options=GREEDY)
    *chunks, last = client.chat("qwen:latest", MESSAGES, think=False, options=GREEDY, stream=True)
    text = whole.message.content
    assert text
    assert text == "".join(chunk.message.content or "" for chunk in chunks)
    assert whole.message.thinking is None
    assert last.done is True
    assert last.done_reason == "length"
    assert last.eval_count == 12
    assert last.prompt_eval_count == whole.prompt_eval_count
    assert all((last.total_duration, last.prompt_eval_duration, last.eval_duration))


def test_generate_is_a_chat_of_one_message_or_goes_on_with_a_raw_text(
    client: ollama.Client,
) -> None:
    whole = client.chat("qwen:latest", MESSAGES, think=False, options=GREEDY)
    said = client.generate(
        "qwen", "What is the weather?", system=SYSTEM["content"], think=False, options=GREEDY
    )
    assert said.response == whole.message.content
    assert said.prompt_eval_count == whole.prompt_eval_count
    pieces = client.generate("qwen", "Once", raw=True, options=GREEDY, stream=True)
    assert "".join(piece.response or "" for piece in pieces)
    assert client.generate("qwen").done_reason == "load"


def test_a_structured_reply(client: ollama.Client) -> None:
    schema = Colour.model_json_schema()
    options = {"temperature": 0, "num_predict": 200}
    reply = client.chat("qwen", MESSAGES, think=False, format=schema, options=options)
    assert Colour.model_validate_json(reply.message.content or "")
    assert isinstance(
        json.loads(
            client.generate("qwen", "x", think=False, format=schema, options=options).response or ""
        ),
        dict,
    )


def test_a_tool_is_called_and_its_result_taken(client: ollama.Client) -> None:
    """A call is the same whole and streamed, and its result becomes a part of the next prompt."""
    options = {"temperature": 0, "num_predict": 150, "logit_bias": [["<tool_call>", 100]]}
    messages = list(MESSAGES)
    reply = client.chat("qwen", messages, tools=[weather], think=False, options=options)
    assert reply.message.tool_calls
    chunks = client.chat(
        "qwen", messages, tools=[weather], think=False, options=options, stream=True
    )
    streamed = [call for chunk in chunks for call in chunk.message.tool_calls or ()]
    assert [call.function for call in streamed] == [
        call.function for call in reply.message.tool_calls
    ]
    messages.append(reply.message)
    for call in reply.message.tool_calls:
        result = weather(**call.function.arguments)
        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    after = client.chat("qwen", messages, tools=[weather], think=False, options=GREEDY)
    assert (after.prompt_eval_count or 0) > (reply.prompt_eval_count or 0)


def test_errors_are_those_that_the_package_knows(client: ollama.Client, server: Server) -> None:
    """Each refusal reaches the package's users as a ResponseError with the status and the cause."""
    asked: list[tuple[int, str, Callable[[], object]]] = [
        (501, "pyctl serve", lambda: client.pull("qwen")),
        (501, "pyctl serve", lambda: client.delete("qwen")),
        (501, "pyctl serve", lambda: client.copy("qwen", "other")),
        (501, "template", lambda: client.generate("qwen", "a", template="{{ .Prompt }}")),
        (400, "think", lambda: client.chat("qwen", MESSAGES, think="hard")),
        (
            400,
            "context size",
            lambda: client.chat("qwen", [{"role": "user", "content": "x" * 90_000}]),
        ),
    ]
    with ollama.Client(server.url) as stranger:
        asked.append((401, "Invalid API Key", stranger.list))
        for status, words, ask in asked:
            with pytest.raises(ollama.ResponseError, match=words) as refused:
                ask()
            assert refused.value.status_code == status


def test_the_cache_is_shared_with_other_apis(server: Server) -> None:
    """A prompt that came by one API is restored for another one: both render the same tokens."""
    messages = [
        SYSTEM,
        {"role": "user", "content": "Which API asks first does not matter, does it?"},
    ]
    client = Client.to_server(server.url, headers=HEADERS)
    fields: dict[str, Any] = {"model": "qwen", "messages": messages}
    plain = {"enable_thinking": False}
    cold = client.chat(**fields, max_tokens=4, temperature=0, chat_template_kwargs=plain)
    options = {**GREEDY, "num_predict": 4}
    body = {**fields, "stream": False, "think": False, "options": options}
    warm = client.post("/api/chat", body)
    reply = warm.json()
    n_prompt = cold.body["usage"]["prompt_tokens"]
    assert reply["message"]["content"] == cold.text
    assert reply["prompt_eval_count"] == n_prompt
    source, cached, evaluated = re.findall(r"=(\w+)", warm.headers["x-pyctl-cache"])
    assert source != "none"
    assert int(cached) >= n_prompt - 1
    assert int(cached) + int(evaluated) == n_prompt
