"""Real clients against real server processes: answers, caching, and errors of clients."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.process.conftest import Server, until_replying
from tests.waiting import until

ClientOf = Callable[[Server], openai.OpenAI]

SYSTEM = {"role": "system", "content": "You keep the manual. " * 40}


@pytest.fixture(scope="module", params=["tiny-hybrid", "tiny-moe", "tiny-dense"])
def server(request: pytest.FixtureRequest, start: Callable[..., Server]) -> Server:
    return start(request.param, "--exact")


@pytest.fixture(scope="module")
def patient(start: Callable[..., Server]) -> Server:
    """With room for a reply that lasts as long as a test may wait."""
    return start("tiny-hybrid", "-c", "65536")


@pytest.fixture
def client_of() -> Iterator[Callable[[Server], openai.OpenAI]]:
    """client_of(server) -> an openai client that is closed after the test."""
    with ExitStack() as stack:
        yield lambda server: stack.enter_context(
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_conversation_is_cached_and_equal_to_an_uncached_one(server: Server, client_of: ClientOf) -> None:
    client = client_of(server)
    messages: list[Any] = [SYSTEM]
    for turn in range(5):
        messages.append(user(f"Question {turn}: what is in chapter {turn * 3}? " * 3))
        fields: dict[str, Any] = {"model": "any", "messages": messages, "max_tokens": 24, "temperature": 0}
        cold = client.chat.completions.create(**fields, extra_body={"cache_prompt": False})
        warm = client.chat.completions.create(**fields)
        assert warm.choices[0].message.content == cold.choices[0].message.content
        assert cold.usage.prompt_tokens_details.cached_tokens == 0
        cached = warm.usage.prompt_tokens_details.cached_tokens
        timings = warm.model_extra["timings"]
        assert timings["cache_n"] == cached
        assert timings["cache_n"] + timings["prompt_n"] == warm.usage.prompt_tokens == cold.usage.prompt_tokens
        assert timings["predicted_n"] == warm.usage.completion_tokens
        if turn:
            assert warm.usage.prompt_tokens - cached < 240, "only the last reply and the new message are evaluated"
        messages.append({"role": "assistant", "content": warm.choices[0].message.content})


def raw_request(server: Server, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a chat request and nothing else."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


LEFT = "chat         cancelled: the client disconnected"


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_stops_the_work(patient: Server, stream: bool) -> None:
    body = {"messages": [SYSTEM, user("go on for ever")], "stream": stream, "ignore_eos": True, "max_tokens": 60_000}
    before = patient.log().count(LEFT)
    connection = raw_request(patient, body)
    until_replying(patient)
    connection.close()
    reply = httpx.post(f"{patient.url}/completion", json={"prompt": "next", "n_predict": 1}, timeout=60)
    assert reply.status_code == 200
    until(lambda: patient.log().count(LEFT) == before + 1)


def test_a_disconnect_during_prefill_keeps_what_was_evaluated(start: Callable[..., Server]) -> None:
    server = start("tiny-hybrid", "-ub", "32", "--exact")
    body = {"messages": [SYSTEM, user("long " * 1400)], "max_tokens": 4, "temperature": 0}
    connection = raw_request(server, body)
    until(lambda: httpx.get(f"{server.url}/cache").json()["prefixes"])
    connection.close()
    other = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [user("hi")], "max_tokens": 1})
    assert other.status_code == 200
    retry = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    cold = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "cache_prompt": False}, timeout=60).json()
    assert retry["choices"] == cold["choices"]
    assert retry["timings"]["cache_n"] > 0
