from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.process.conftest import Server, until_replying
from tests.waiting import until

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


def test_create(client: openai.OpenAI) -> None:
    response = client.responses.create(**asked())
    assert response.id.startswith("resp_")
    assert (response.status, response.model) == ("incomplete", "tiny")
    assert response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens == 12
    assert response.usage.total_tokens == response.usage.input_tokens + 12


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


def test_input_tokens(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="tiny", input="Tell me more", instructions=SYSTEM)
    response = client.responses.create(**asked())
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens


def test_errors(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="tiny", input=[{"role": "no role", "content": "x"}])  # type: ignore[list-item,misc]
    with pytest.raises(openai.BadRequestError), client.responses.stream(**asked("x" * 70_000)) as stream:
        list(stream)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").responses.create(**asked())


def test_a_client_that_leaves_stops_the_work(server: Server) -> None:
    async def leave() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
            fields = asked("go on for ever", max_output_tokens=60_000, extra_body={"ignore_eos": True})
            task = asyncio.ensure_future(client.responses.create(**fields))
            await asyncio.to_thread(until_replying, server, "secret")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stream = await client.responses.create(**fields, stream=True)
            async for event in stream:
                if event.type == "response.output_text.delta":
                    break
            await stream.close()
            return (await client.responses.create(**asked())).output_text

    text = asyncio.run(leave())
    until(lambda: server.log().count("responses    cancelled: the client disconnected") == 2)
    fields = {**asked(), "cache_prompt": False}
    headers = {"x-api-key": "secret"}
    again = httpx.post(f"{server.url}/v1/responses", json=fields, headers=headers).json()
    assert again["output"][0]["content"][0]["text"] == text
