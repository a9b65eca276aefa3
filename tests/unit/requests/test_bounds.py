"""Limits of one request: an error names the field, and a request within them takes linear time."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.chat.messages import fit_messages
from pyctl.chat.template import TemplateCapabilities
from pyctl.engine.stream import TextStream
from pyctl.server.api.responses_request import ResponseRequest
from tests.effort import work
from tests.unit.server.fake import HI, Bench, play

CHAT = "/v1/chat/completions"
COMPLETION = "/completion"

BEYOND: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETION, {"prompt": ["a"] * 513}, "prompt"),
    (COMPLETION, {"prompt": ["a"] * 100, "n": 6}, "prompt"),
    (COMPLETION, {"prompt": "a", "n": 129}, "'n'"),
    (COMPLETION, {"prompt": "a", "n_probs": 101}, "n_probs"),
    ("/v1/completions", {"prompt": "a", "logprobs": 101}, "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
    (CHAT, {"n_probs": 248_000}, "n_probs"),
    (CHAT, {"logit_bias": [[1, 1.0]] * 8_193}, "logit_bias"),
    (CHAT, {"logit_bias": {"a" * 10_000: 1.0}}, "logit_bias"),
    (CHAT, {"dry_sequence_breakers": ["a"] * 33}, "dry_sequence_breakers"),
    (CHAT, {"dry_sequence_breakers": ["a" * 257]}, "dry_sequence_breakers"),
    (CHAT, {"stop": [f"stop {i}" for i in range(129)]}, "stop"),
    (CHAT, {"stop": "x" * 4_097}, "stop"),
    ("/v1/messages", {"messages": HI, "max_tokens": 1, "stop_sequences": ["x"] * 129}, "stop"),
    (CHAT, {"samplers": ["top_k"] * 33}, "samplers"),
    (CHAT, {"samplers": "k" * 33}, "samplers"),
    (
        COMPLETION,
        {"prompt": "a", "reasoning_budget_end_tags": ["x"] * 17},
        "reasoning_budget_end_tags",
    ),
    (CHAT, {"reasoning_budget_message": "x" * 4_097}, "reasoning_budget_message"),
    (CHAT, {"messages": HI * 10_001}, "messages"),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(513)]},
        "tools",
    ),
    ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 10_001}, "messages"),
    (COMPLETION, {"prompt": "a", "response_fields": ["content"] * 257}, "response_fields"),
    (COMPLETION, {"prompt": "a", "lora": [{"id": 0, "scale": 1.0}] * 257}, "lora"),
    (COMPLETION, {"prompt": [1] * 1_500_002}, "commas"),
    (COMPLETION, {"prompt": {str(i): 0 for i in range(150_001)}}, "colons"),
    (COMPLETION, {"prompt": [[]] * 300_001}, "brackets"),
]


@pytest.mark.parametrize(("path", "fields", "name"), BEYOND, ids=lambda value: str(value)[:50])
def test_beyond_a_limit_is_400_with_the_name_of_the_field(
    path: str, fields: dict[str, Any], name: str
) -> None:
    bench = Bench(play("a"))
    response = bench.post(path, {"messages": HI, **fields} if path == CHAT else fields)
    assert response.status_code == 400
    assert name in response.json()["error"]["message"]
    assert not bench.worker.requests


def test_all_of_these_at_their_limits_are_served() -> None:
    fields = {
        "n_probs": 100,
        "logit_bias": [[1, 1.0]] * 8_192,
        "dry_sequence_breakers": ["a" * 256] * 32,
        "stop": [f"{i:031}" + "x" for i in range(128)],
        "samplers": ["top_k"] * 32,
        "messages": HI * 300,
    }
    assert Bench(play("a", probs=(-1.0,))).post(CHAT, {"messages": HI, **fields}).status_code == 200
    assert (
        Bench(play("a")).post("/v1/completions", {"prompt": ["a"] * 64, "n": 8}).status_code == 200
    )


NUMBERS = (
    "1e400",
    "-1e400",
    "1" + "0" * 5000,
    "1e-400",
    "NaN",
    "[" * 100_000,
    '"\\ud800"',
    '"\\u0000"',
    "-0",
    "1e308",
)


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: value[:12])
def test_no_number_or_text_is_too_odd(value: str) -> None:
    bench = Bench(play("a"))
    for name in (
        "temperature",
        "n",
        "n_probs",
        "max_tokens",
        "seed",
        "stop",
        "logit_bias",
        "grammar",
        "model",
        "x",
    ):
        body = f'{{"messages":[{{"role":"user","content":"a"}}],"{name}":{value}}}'.encode()
        response = bench.client.post(CHAT, content=body)
        assert response.status_code in (200, 400), (name, response.text)


@pytest.mark.timeout(30)  # it takes a tenth of a second, with each item copied anew a minute
def test_a_turn_of_thousands_of_items_is_joined_in_linear_time() -> None:
    items = [{"role": "assistant", "content": "x" * 1000} for _ in range(20_000)]
    chat = ResponseRequest.of({"input": items}).chat
    assert chat["messages"] == [{"role": "assistant", "content": "x" * 20_000_000}]


@pytest.mark.timeout(30)
def test_thousands_of_messages_of_a_user_are_joined_in_linear_time() -> None:
    capabilities = TemplateCapabilities(
        system_first=True,
        system_inside=False,
        repeated_user=False,
        text=True,
        parts=False,
        tools=True,
        tool_calls=True,
        object_arguments=True,
    )
    for role in ("user", "system"):
        messages = [{"role": role, "content": "x" * 3000} for _ in range(10_000)]
        assert len(fit_messages(messages, capabilities)) <= 2
    texts = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "b"},
        {"role": "user", "content": ["c"]},
    ]
    assert [message["content"] for message in fit_messages(texts, capabilities)] == ["a\n\nb\n\nc"]


@pytest.mark.parametrize("letters", ["ab", "a"])
def test_a_letter_costs_the_same_however_many_stop_strings_there_are(letters: str) -> None:
    stops = tuple(letters * (16 + i % 16) + f"!{i}" for i in range(128))

    def work_with(stop: tuple[str, ...]) -> int:
        stream = TextStream(stop)
        return work(lambda: [stream.feed(letters.encode() * 5) for _ in range(1_000)])

    assert work_with(stops) < 1.5 * work_with(stops[:16])
