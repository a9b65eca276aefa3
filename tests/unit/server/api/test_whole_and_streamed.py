"""A reply says the same in all APIs, whole and streamed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.client import HI, events, named_events
from tests.unit.chat import toy
from tests.unit.server.fake import Bench, play

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
OLLAMA = "/api/chat"


def lines_of(body: bytes) -> list[Any]:
    return [msgspec.json.decode(line) for line in body.splitlines()]


def parts(bench: Bench, path: str, stream: bool, **fields: Any) -> tuple[str, str]:
    """Return the reasoning and the content of a reply."""
    body = {
        "input" if path == RESPONSES else "messages": HI,
        "max_tokens": 99,
        "stream": stream,
        **fields,
    }
    response = bench.post(path, body)
    assert response.status_code == 200, response.text
    if path == CHAT:
        key = "delta" if stream else "message"
        chunks = events(response.content)[:-1] if stream else [response.json()]
        said = [choice[key] for chunk in chunks for choice in chunk["choices"]]
        return tuple(
            "".join(each.get(name) or "" for each in said)
            for name in ("reasoning_content", "content")
        )
    if path == OLLAMA:
        said = [chunk["message"] for chunk in lines_of(response.content)]
        return tuple(
            "".join(each.get(name, "") for each in said) for name in ("thinking", "content")
        )
    if path == MESSAGES:
        blocks = (
            [event.get("delta", {}) for event in named_events(response.content)] if stream else []
        )
        blocks = blocks or response.json()["content"]
        return tuple(
            "".join(each.get(name, "") for each in blocks) for name in ("thinking", "text")
        )
    output = (named_events(response.content)[-1]["response"] if stream else response.json())[
        "output"
    ]
    found = {item["type"]: "".join(part["text"] for part in item["content"]) for item in output}
    return found.get("reasoning", ""), found.get("message", "")


TURNS = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' "
    "-}}{%- endfor -%}"
)
OPENED = "{%- if add_generation_prompt -%}{{- '<think>\\n' -}}{%- endif -%}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES, OLLAMA])
@pytest.mark.parametrize(
    "template", [toy.PLAIN + OPENED.replace("<think>", "Helper: <think>"), TURNS + OPENED]
)
def test_reasoning_that_the_header_opens_is_reasoning(
    template: str, path: str, stream: bool
) -> None:
    bench = Bench(play("Hm, so", ".\n</th", "ink>\n\nYe", "s."), template=template)
    thinks = {"thinking": {"type": "enabled", "budget_tokens": 1024}} if path == MESSAGES else {}
    assert parts(bench, path, stream, **thinks) == ("Hm, so.\n", "Yes.")
    special = bench.tokenizer.special_tokens()
    assert not {special["<think>"], special["</think>"]} & set(bench.service.chat.dialect.starts)
    bench.chat(reasoning_budget_tokens=2)
    assert bench.worker.requests[-1].reasoning.read == (special["<think>"], ord("\n"))


def said(bench: Bench, path: str, stream: bool, **options: Any) -> tuple[str, int]:
    """Return the text, and how many tokens have log-probabilities."""
    options |= {"max_tokens": 30, "temperature": 0}
    asked = {"messages": HI} if path == CHAT else {"prompt": "Hi"}
    body = bench.post(
        path, {**asked, **options, "logprobs": True, "n_probs": 1, "stream": stream}
    ).content
    chunks = events(body) if stream else [msgspec.json.decode(body)]
    text = ""
    n_probs = 0
    for choice in (
        choice for chunk in chunks if chunk != "[DONE]" for choice in chunk.get("choices", [chunk])
    ):
        message = choice.get("message") or choice.get("delta") or choice
        text += message.get("content") or message.get("text") or ""
        found = choice.get("logprobs") or choice.get("completion_probabilities") or []
        n_probs += len(found["content"] if isinstance(found, dict) else found)
    return text, n_probs


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", CHAT])
def test_log_probabilities_are_those_of_the_text(path: str) -> None:
    """Each token of this model is one letter; those of a stop string have none."""
    bench = Bench()
    whole, n_probs = said(bench, path, False)
    assert n_probs == len(whole) == 30
    for n in (1, 2, 5):
        stop = whole[7 : 7 + n]
        at = whole.index(stop)
        assert [said(bench, path, stream, stop=[stop]) for stream in (False, True)] == [
            (whole[:at], at)
        ] * 2
    bench = Bench(play("a", "", probs=[-1.0]))  # the second token has a part of a character
    assert [said(bench, path, stream) for stream in (False, True)] == [("a", 2)] * 2


CALLS = {
    CHAT: ('"tool_calls":[{', '"finish_reason":"tool_calls"'),
    MESSAGES: ('"type":"tool_use"', '"stop_reason":"tool_use"'),
    RESPONSES: ('"type":"function_call"', '"status":"completed"'),
    OLLAMA: ('"tool_calls":[{', '"done_reason":"stop"'),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CALLS)
def test_json_of_a_call_is_a_call(path: str, stream: bool) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "look_up", "parameters": schema}
    tool = {"type": "function", **(function if path == RESPONSES else {"function": function})}
    tools = [{"name": "look_up", "input_schema": schema} if path == MESSAGES else tool]
    bench = Bench(
        play("```js", 'on\n{"name": "look', '_up", "arguments": {"city"', ': "Paris"}}', "\n```")
    )
    asked = {
        "input" if path == RESPONSES else "messages": HI,
        "max_tokens": 99,
        "tools": tools,
        "stream": stream,
    }
    body = bench.post(path, asked).text
    assert "```" not in body
    assert all(part in body for part in ("look_up", "Paris", *CALLS[path]))
