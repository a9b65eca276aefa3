"""Limits of one request: an error names the field, and a request within them takes linear time."""

from __future__ import annotations

import pytest

from pyctl.chat.messages import fit_messages
from pyctl.chat.template import TemplateCapabilities
from pyctl.engine.stream import TextStream
from pyctl.server.api.responses_request import ResponseRequest
from tests.case import Case
from tests.client import CHAT, HI
from tests.effort import work
from tests.unit.server.fake import Bench, play

COMPLETION = "/completion"


@pytest.mark.parametrize(
    "case",
    [
        Case(COMPLETION, {"prompt": ["a"] * 513}, 400, "prompt"),
        Case(COMPLETION, {"prompt": ["a"] * 100, "n": 6}, 400, "prompt"),
        Case(COMPLETION, {"prompt": "a", "n": 129}, 400, "'n'"),
        Case(COMPLETION, {"prompt": "a", "n_probs": 101}, 400, "n_probs"),
        Case("/v1/completions", {"prompt": "a", "logprobs": 101}, 400, "logprobs"),
        Case(CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 101}, 400, "top_logprobs"),
        Case(CHAT, {"messages": HI, "n_probs": 248_000}, 400, "n_probs"),
        Case(CHAT, {"messages": HI, "logit_bias": [[1, 1.0]] * 8_193}, 400, "logit_bias"),
        Case(CHAT, {"messages": HI, "logit_bias": {"a" * 10_000: 1.0}}, 400, "logit_bias"),
        Case(
            CHAT,
            {"messages": HI, "dry_sequence_breakers": ["a"] * 33},
            400,
            "dry_sequence_breakers",
        ),
        Case(
            CHAT,
            {"messages": HI, "dry_sequence_breakers": ["a" * 257]},
            400,
            "dry_sequence_breakers",
        ),
        Case(CHAT, {"messages": HI, "stop": [f"stop {i}" for i in range(129)]}, 400, "stop"),
        Case(CHAT, {"messages": HI, "stop": "x" * 4_097}, 400, "stop"),
        Case(
            "/v1/messages",
            {"messages": HI, "max_tokens": 1, "stop_sequences": ["x"] * 129},
            400,
            "stop",
        ),
        Case(CHAT, {"messages": HI, "samplers": ["top_k"] * 33}, 400, "samplers"),
        Case(CHAT, {"messages": HI, "samplers": "k" * 33}, 400, "samplers"),
        Case(
            COMPLETION,
            {"prompt": "a", "reasoning_budget_end_tags": ["x"] * 17},
            400,
            "reasoning_budget_end_tags",
        ),
        Case(
            CHAT,
            {"messages": HI, "reasoning_budget_message": "x" * 4_097},
            400,
            "reasoning_budget_message",
        ),
        Case(CHAT, {"messages": HI * 10_001}, 400, "messages"),
        Case(
            CHAT,
            {
                "messages": HI,
                "tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(513)],
            },
            400,
            "tools",
        ),
        Case(
            "/v1/responses", {"input": [{"role": "user", "content": "a"}] * 10_001}, 400, "messages"
        ),
        Case(
            COMPLETION,
            {"prompt": "a", "response_fields": ["content"] * 257},
            400,
            "response_fields",
        ),
        Case(COMPLETION, {"prompt": "a", "lora": [{"id": 0, "scale": 1.0}] * 257}, 400, "lora"),
        Case(COMPLETION, {"prompt": [1] * 1_500_002}, 400, "commas"),
        Case(COMPLETION, {"prompt": {str(i): 0 for i in range(150_001)}}, 400, "colons"),
        Case(COMPLETION, {"prompt": [[]] * 300_001}, 400, "brackets"),
    ],
    ids=str,
)
def test_beyond_a_limit_is_400_with_the_name_of_the_field(case: Case) -> None:
    bench = Bench(play("a"))
    case.check(bench.client)
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
    chat = ResponseRequest.from_json({"input": items}).chat
    assert chat["messages"] == [{"role": "assistant", "content": "x" * 20_000_000}]


@pytest.mark.timeout(30)
def test_thousands_of_messages_of_a_user_are_joined_in_linear_time() -> None:
    """Ten thousand messages of one role are joined to two at most; joining them pair by pair would
    copy 150 GB. Messages of a user and system messages between them keep their order.
    """
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
