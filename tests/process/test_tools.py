"""Tools through the openai client and real servers. Calls are forced, since random weights make
none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.functions import function, turned
from tests.process.conftest import Server, disk_cache
from tests.unit.chat.conftest import unpacked

CITIES = ["Paris", "Rome", "Lima"]
TOOL = function(
    "forecast",
    required=["days", "city"],
    days={"type": "integer"},
    city={"type": "string", "enum": CITIES},
)
OTHER = function("stop")
ASKED: Any = [
    {"role": "system", "content": "You tell the weather. " * 20},
    {"role": "user", "content": "Rain?"},
]
PLAIN: Any = {"chat_template_kwargs": {"enable_thinking": False}}


def flags(form: str) -> list[str]:
    """Return the flags of a template that writes calls in this form; the models' own writes
    JSON.
    """
    return (
        ["--chat-template-file", str(Path(unpacked("templates/Qwen3.5-4B.jinja")))]
        if form == "xml"
        else []
    )


@pytest.fixture(scope="module", params=["xml", "json"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def client(form: str, start: Callable[..., Server]) -> Iterator[openai.OpenAI]:
    yield from connected(start("tiny-hybrid", *flags(form), is_f32=True))


@pytest.fixture(scope="module")
def forgetful(form: str, start: Callable[..., Server]) -> Iterator[openai.OpenAI]:
    yield from connected(start("tiny-hybrid", *flags(form), "--prompt-replay", "off", is_f32=True))


def connected(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def called(client: openai.OpenAI, **fields: Any) -> Any:
    """Return a reply that has to call, once."""
    options = {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "extra_body": PLAIN,
    }
    options["max_tokens"] = 400
    return client.chat.completions.create(model="any", messages=ASKED, **{**options, **fields})


def test_reasoning_comes_before_a_forced_call(client: openai.OpenAI, form: str) -> None:
    if form == "json":
        pytest.skip("this template knows no reasoning")
    biased = {"logit_bias": {"</think>": 20.0}}
    (choice,) = called(client, extra_body=biased, seed=3).choices
    assert choice.message.model_extra["reasoning_content"]
    assert choice.message.tool_calls[0].function.name == "forecast"
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("thinks", [False, True])
def test_the_prompt_after_a_tool_goes_on_where_the_call_ended(
    client: openai.OpenAI, forgetful: openai.OpenAI, form: str, thinks: bool
) -> None:
    """A call that comes back with reordered keys and another id is replaced by the tokens that the
    model generated, so nothing before the result is evaluated again; with replay off it is.
    """
    if thinks and form == "json":
        pytest.skip("this template knows no reasoning")
    body = {"logit_bias": {"</think>": 20.0}} if thinks else PLAIN
    for asked, unbroken in ((client, True), (forgetful, False)):
        first = called(asked, extra_body=body, seed=11)
        message = first.choices[0].message
        call = message.tool_calls[0]
        arguments = json.loads(call.function.arguments)
        other_way = json.dumps(dict(reversed(arguments.items())), indent=1)
        function = {"name": call.function.name, "arguments": other_way}
        returned = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "other", "type": "function", "function": function}],
            "reasoning_content": (message.model_extra or {}).get("reasoning_content"),
        }
        result = {"role": "tool", "tool_call_id": "other", "content": "It rains. " * 20}
        question = {
            "role": "user",
            "content": "Really?",
        }  # the template leaves out the reasoning before it
        later = ([*ASKED, returned, result], [*ASKED, returned, result, question])
        for messages in later if unbroken else later[:1]:
            second = asked.chat.completions.create(
                model="any",
                messages=messages,
                tools=[TOOL],
                tool_choice="none",
                max_tokens=1,
                extra_body=PLAIN,
            )
            kept = (
                first.usage.total_tokens - 3
            )  # the last token was not evaluated, and one stays to be
            assert (second.usage.prompt_tokens_details.cached_tokens >= kept) is unbroken


@pytest.mark.parametrize("exact", [False, True])
def test_prompt_resumes_after_restart_with_reordered_tool_keys(
    form: str, start: Callable[..., Server], tmp_path: Path, exact: bool
) -> None:
    """After a restart a prompt whose tools have reordered keys is restored from disk; --exact
    renders the tools as sent, and evaluates them again.
    """
    cached = [*disk_cache(tmp_path), "--kv-cache-min-tokens", "1"]
    cached += ["--exact"] * exact
    server = start("tiny-hybrid", *flags(form), *cached, is_f32=True)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        message = called(client, seed=11).choices[0].message
        function = {
            "name": "forecast",
            "arguments": json.dumps(json.loads(message.tool_calls[0].function.arguments)),
        }
        returned = {
            "role": "assistant",
            "tool_calls": [{"id": "other", "type": "function", "function": function}],
        }
        messages = [
            *ASKED,
            returned,
            {"role": "tool", "tool_call_id": "other", "content": "It rains. " * 20},
        ]
        options: Any = {
            "model": "any",
            "tools": [TOOL],
            "tool_choice": "none",
            "max_tokens": 1,
            "temperature": 0,
            "extra_body": PLAIN,
        }
        before = client.chat.completions.create(messages=messages, **options)
    assert server.stop() == 0
    server = start("tiny-hybrid", *flags(form), *cached, is_f32=True)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        after = client.chat.completions.create(
            messages=messages, **{**options, "tools": [turned(TOOL)]}
        )
    assert after.usage.prompt_tokens == before.usage.prompt_tokens
    n_again = after.usage.prompt_tokens - after.usage.prompt_tokens_details.cached_tokens
    assert n_again > 400 if exact else n_again < 40, "--exact renders what was sent"
    assert exact or after.choices[0].message.content == before.choices[0].message.content


CALLING: Any = {
    "logit_bias": [["<tool_call>", 100], ["\n", -50]],
    "temperature": 0.5,
    "ignore_eos": False,
}


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_nobody_forced_follows_the_schema(
    client: openai.OpenAI, thinking: bool, stream: bool
) -> None:
    """A call that the model begins by itself is bound to the schema from its first token, whole and
    streamed, with and without reasoning.
    """
    extra = {**CALLING, "chat_template_kwargs": {"enable_thinking": thinking}}
    options: Any = {
        "tools": [TOOL, OTHER],
        "tool_choice": "auto",
        "parallel_tool_calls": openai.omit,
        "seed": 1,
    }
    options |= {"extra_body": extra, "max_tokens": 150}
    if stream:
        chunks = [
            chunk.choices[0] for chunk in called(client, stream=True, **options) if chunk.choices
        ]
        parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
        names = [part.function.name for part in parts if part.id]
        arguments = "".join(part.function.arguments or "" for part in parts if part.index == 0)
    else:
        (choice,) = called(client, **options).choices
        names = [call.function.name for call in choice.message.tool_calls or []]
        arguments = choice.message.tool_calls[0].function.arguments if names else ""
    assert names, "the model begins a call with its first token"
    assert set(names) <= {"forecast", "stop"}
    if names[0] == "forecast":
        days = json.loads(arguments)
        assert set(days) == {"days", "city"}
        assert isinstance(days["days"], int)
        assert days["city"] in CITIES


def test_a_tool_with_a_schema_that_no_grammar_is_made_of_is_served(client: openai.OpenAI) -> None:
    odd: Any = {
        "type": "function",
        "function": {"name": "odd", "parameters": {"type": "any", "x": {"$ref": "y"}}},
    }
    for choice in ("auto", "required"):
        (reply,) = called(client, tools=[odd, TOOL], tool_choice=choice, max_tokens=8).choices
        assert reply.finish_reason in ("length", "tool_calls", "stop")
