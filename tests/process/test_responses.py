from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.process.conftest import Server

SYSTEM = "You answer at length. " * 12


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start("tiny-hybrid", "-c", "65536", "--alias", "tiny", "--api-key", "secret", is_f32=True)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def asked(given: Any = "Tell me more", **fields: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "input": given,
        "instructions": SYSTEM,
        "max_output_tokens": 12,
        "temperature": 0,
        **fields,
    }


def test_stream(client: openai.OpenAI) -> None:
    whole = client.responses.create(**asked())
    with client.responses.stream(**asked()) as stream:
        events = list(stream)
        final = stream.get_final_response()
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == final.output_text
    assert events[-1].type == "response.completed"
    assert final.usage.input_tokens_details.cached_tokens > 0


def test_a_conversation_that_is_sent_whole_is_cached(client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "user", "content": "Good morning to you"}]
    first = client.responses.create(**asked(history))
    history += [*first.output, {"role": "user", "content": "And then?"}]
    second = client.responses.create(**asked(history))
    history += [*second.output, {"role": "user", "content": "Well?"}]
    third = client.responses.create(**asked(history))
    uncached = client.responses.create(**asked(history, extra_body={"cache_prompt": False}))
    assert third.output_text == uncached.output_text
    assert third.usage is not None
    assert uncached.usage is not None
    assert third.usage.input_tokens == uncached.usage.input_tokens
    assert third.usage.input_tokens_details.cached_tokens > second.usage.input_tokens  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="send all earlier items"):
        client.responses.create(**asked(), previous_response_id=first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_errors(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="tiny", input=[{"role": "no role", "content": "x"}])  # type: ignore[list-item,misc]
    with pytest.raises(openai.BadRequestError), client.responses.stream(**asked("x" * 70_000)) as stream:
        list(stream)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").responses.create(**asked())
