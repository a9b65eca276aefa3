"""Requests of Ollama's API as chats and completions."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.errors import RequestError
from pyctl.requests.body import ChatBody, CompletionBody, InfillBody
from pyctl.server.api.ollama_request import chat_body, generate_body
from tests.client import HI

CALL = {"function": {"name": "f", "arguments": {"a": 1}}}


def read(**values: Any) -> ChatBody:
    body = chat_body({"model": "any:latest", "messages": HI, **values})
    assert isinstance(body, ChatBody)
    return body


def test_options() -> None:
    """Ollama's options set sampling and stops; its special lengths mean no limit, and options of
    the runner are ignored.
    """
    sampling = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 9,
        "repeat_penalty": 1.5,
    }
    options = {**sampling, "num_predict": 7, "num_ctx": 512, "num_gpu": 1, "stop": ["x"]}
    body = read(options=options, keep_alive="5m", cache_prompt=False)
    assert body.stops.max_tokens == 7
    assert body.stops.stop == ("x",)
    assert body.cache_prompt is False
    assert body.options.stream is True
    assert body.sampling == sampling
    for n in (0, -1, -2):
        assert read(options={"num_predict": n}).stops.max_tokens == -1
    assert read(options={"num_predict": 2**53}).stops.max_tokens == 2**31 - 1
    assert read().stops.max_tokens is None
    assert read(stream=False).options.stream is False


def test_think_and_format() -> None:
    assert read().conversation.chat_template_kwargs == {}
    for think in (True, False):
        assert read(think=think).conversation.chat_template_kwargs == {"enable_thinking": think}
    assert [
        read(think=level).conversation.reasoning_effort for level in ("low", "high", "max")
    ] == [
        "low",
        "high",
        "high",
    ]
    assert read(format="").structured.schema() is None
    assert read(format="json").structured.schema() == {"type": "object"}
    assert read(format={"type": "string"}).structured.schema() == {"type": "string"}


def test_calls_and_their_results_get_the_same_ids() -> None:
    body = read(
        messages=[
            {"role": "assistant", "tool_calls": [CALL, {"function": {"name": "g"}}]},
            {"role": "tool", "tool_name": "g", "content": "2"},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "0"},
        ]
    )
    calls, *results = body.conversation.messages
    ids = [call["id"] for call in calls["tool_calls"]]
    assert ids == ["call00000", "call00001"]
    assert [call["function"]["arguments"] for call in calls["tool_calls"]] == ['{"a":1}', "{}"]
    assert [result["tool_call_id"] for result in results] == [ids[1], ids[0], None]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"prompt": "a"}, ChatBody),
        ({"prompt": "a", "raw": True}, CompletionBody),
        ({"prompt": "a", "suffix": "b"}, InfillBody),
    ],
)
def test_forms_of_a_prompt_to_generate_from(values: dict[str, Any], kind: type) -> None:
    assert type(generate_body(values)) is kind


def test_a_request_without_a_prompt_only_loads_the_model() -> None:
    assert generate_body({"model": "any"}) is None
    assert chat_body({"model": "any"}) is None


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("text", r"messages\[0\] must be an object"),
        ({"role": "assistant", "tool_calls": ["f"]}, r"tool_calls\[0\] must be an object with a"),
        ({"role": "user", "content": [], "images": ["x"]}, "the content next to"),
    ],
)
def test_messages_that_are_none(message: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read(messages=[message])
