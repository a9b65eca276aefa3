"""The openai package against a live server: predicted outputs and the options of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.process.conftest import Server
from tests.process.reduced_server import without_fields

TEXT = "Ada waters the garden behind the house on Mondays and Fridays. " * 8
MESSAGES: list[Any] = [
    {"role": "system", "content": "You answer at length. " * 60},
    {"role": "user", "content": TEXT},
]
CHAT: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0}


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start("tiny-hybrid", "-c", "16384", "--alias", "tiny", is_f32=True)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def text_of(reply: Any) -> str:
    return reply.choices[0].message.content or ""


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_prediction_changes_no_token_with_exact(
    start: Callable[..., Server], temperature: float
) -> None:
    """Drafts of one width are on, so that predictions are drafted with --exact, too."""
    flags = ("--exact", "--spec-type", "ngram-mod", "--spec-draft-n-max", "3", "-np", "1")
    server = start("tiny-dense", "-c", "4096", *flags, is_f32=True)
    fields = {**CHAT, "max_tokens": 80, "temperature": temperature, "seed": 4}
    with client_of(server) as client:
        plain = client.chat.completions.create(**fields)
        assert plain.usage is not None
        predictions = (text_of(plain), text_of(plain)[:40] + "other words", TEXT)
        accepted = []
        for text in predictions:
            reply = client.chat.completions.create(
                **fields, prediction={"type": "content", "content": text}
            )
            assert text_of(reply) == text_of(plain)
            assert reply.usage is not None
            assert reply.usage.completion_tokens == plain.usage.completion_tokens
            details = reply.usage.completion_tokens_details
            assert details is not None
            assert details.rejected_prediction_tokens is not None
            accepted.append(details.accepted_prediction_tokens)
    assert accepted[0] > 10, "the reply itself was predicted"
    assert accepted[1] > 0, "and so was its beginning"


def test_a_stream_counts_the_prediction(start: Callable[..., Server]) -> None:
    """The last chunk of a stream has the accepted and rejected tokens of the prediction; a reply
    without one has no such counts.
    """
    server = start("tiny-dense", "-c", "4096", "--spec-type", "none", "-np", "1")
    with client_of(server) as client:
        fields = {**CHAT, "max_tokens": 60}
        plain = client.chat.completions.create(**fields)
        assert plain.usage is not None
        assert plain.usage.completion_tokens_details is not None
        assert plain.usage.completion_tokens_details.accepted_prediction_tokens is None
        parts: list[Any] = [{"type": "text", "text": text_of(plain)}]
        chunks = list(
            client.chat.completions.create(
                **fields,
                prediction={"type": "content", "content": parts},
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.accepted_prediction_tokens is not None


def test_a_wrong_prediction_is_an_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"prediction\.content"):
        client.chat.completions.create(**CHAT, prediction={"type": "content", "content": 7})  # type: ignore[typeddict-item]


def test_a_prewarm_fills_the_cache_and_generates_nothing(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "instructions": "Be brief. " * 200, "input": TEXT}
    warmed = client.responses.create(**fields, prompt_cache_options={"prewarm": True})
    assert warmed.status == "completed"
    assert warmed.output == []
    assert warmed.usage is not None
    assert warmed.usage.output_tokens == 0
    assert warmed.usage.input_tokens_details.cache_write_tokens > 0
    reply = client.responses.create(**fields, max_output_tokens=4)
    assert reply.usage is not None
    n_cached = reply.usage.input_tokens_details.cached_tokens
    assert n_cached >= warmed.usage.input_tokens - 1, "but for the token that is always evaluated"


def test_a_prewarm_as_a_stream_and_of_a_chat(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"prewarm": True}
    events = list(
        client.responses.create(model="tiny", input=TEXT, prompt_cache_options=options, stream=True)
    )
    assert [event.type for event in events if "in_progress" not in event.type] == [
        "response.created",
        "response.completed",
    ]
    chat = client.chat.completions.create(
        **CHAT, max_tokens=9, extra_body={"prompt_cache_options": options}
    )
    assert text_of(chat) == ""
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 0


def test_a_response_says_why_it_missed(client: openai.OpenAI) -> None:
    """Diagnostics name the result of the comparison with an earlier response: a hit, a miss with
    its reason and tokens, or no such response.
    """
    fields: dict[str, Any] = {"model": "tiny", "max_output_tokens": 4}
    system = "You know the town and its people. " * 100
    first = client.responses.create(input=TEXT, instructions=system, **fields)

    def diagnosis(instructions: str, compared_id: str) -> Any:
        options: dict[str, Any] = {"comparison_response_id": compared_id}
        later = client.responses.create(
            input=TEXT, instructions=instructions, prompt_cache_options=options, **fields
        )
        assert later.prompt_cache_options is not None
        assert later.prompt_cache_options.comparison_response_id == compared_id
        return later.prompt_cache_diagnostics

    assert diagnosis(system, first.id).type == "cache_hit"
    missed = diagnosis("Now another one. " + system, first.id)
    assert missed.type == "cache_miss"
    assert missed.reason == "input_changed"
    assert 0 < missed.cache_missed_tokens <= missed.comparison_reusable_tokens
    assert diagnosis(system, "resp_none").type == "comparison_response_not_found"


def test_breakpoints_and_keys_are_taken(client: openai.OpenAI) -> None:
    """A request with breakpoints, a key and options is served, and the reply repeats the key."""
    mark: dict[str, Any] = {"mode": "explicit", "ttl": "12h"}
    part: dict[str, Any] = {"type": "text", "text": TEXT, "prompt_cache_breakpoint": mark}
    system: dict[str, Any] = {"role": "system", "content": [part]}
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": [system, MESSAGES[1]],
        "max_tokens": 4,
        "prompt_cache_key": "mine",
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    }
    first = client.chat.completions.create(**fields)
    assert first.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cache_write_tokens
    again = client.chat.completions.create(**fields)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens
    part["prompt_cache_breakpoint"] = {"mode": "implicit"}
    with pytest.raises(openai.BadRequestError, match="prompt_cache_breakpoint"):
        client.chat.completions.create(**fields)


def test_the_sdk_does_without_the_features(server: Server) -> None:
    """A server that ignores the fields answers a prewarm with a reply, and adds no member."""
    fields: dict[str, Any] = {"model": "tiny", "input": TEXT, "max_output_tokens": 4}
    with (
        without_fields(server.url, "prompt_cache_options", "prediction") as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        warmed = client.responses.create(**fields, prompt_cache_options={"prewarm": True})
        options: dict[str, Any] = {"comparison_response_id": warmed.id}
        compared = client.responses.create(**fields, prompt_cache_options=options)
        chat = client.chat.completions.create(
            **CHAT, max_tokens=4, prediction={"type": "content", "content": TEXT}
        )
    assert warmed.usage is not None
    assert warmed.usage.output_tokens > 0
    assert compared.prompt_cache_diagnostics is None
    assert compared.usage is not None
    assert chat.usage is not None
    details = chat.usage.completion_tokens_details
    assert details is None or details.accepted_prediction_tokens is None
