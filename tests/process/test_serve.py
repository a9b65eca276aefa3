"""Real clients against real server processes: answers, caching, and errors of clients."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
def hybrid(start: Callable[..., Server]) -> Server:
    return start("tiny-hybrid", "--exact", "--alias", "tiny")


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


@pytest.mark.smoke
def test_streaming_gives_the_same_text_and_ends_with_usage(hybrid: Server, client_of: ClientOf) -> None:
    client = client_of(hybrid)
    fields: dict[str, Any] = {"model": "any", "messages": [SYSTEM, user("Hello there")], "max_tokens": 30, "seed": 5}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}


def test_models_props_tokenize_and_templates(hybrid: Server, client_of: ClientOf) -> None:
    assert [model.id for model in client_of(hybrid).models.list()] == ["tiny"]
    props = httpx.get(f"{hybrid.url}/props").json()
    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["n_ctx"] == 8192
    text = "<|im_start|>user\nÄpfel 🍏<|im_end|>"
    tokens = httpx.post(f"{hybrid.url}/tokenize", json={"content": text, "parse_special": True}).json()["tokens"]
    assert httpx.post(f"{hybrid.url}/detokenize", json={"tokens": tokens}).json()["content"] == text
    prompt = httpx.post(f"{hybrid.url}/apply-template", json={"messages": [user("hi")]}).json()["prompt"]
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_native_completion(hybrid: Server) -> None:
    body = {"prompt": "Once upon a time", "n_predict": 12, "temperature": 0, "return_tokens": True}
    whole = httpx.post(f"{hybrid.url}/completion", json=body).json()
    assert whole["stop"] is True
    assert whole["tokens_predicted"] == len(whole["tokens"]) == 12
    assert whole["stop_type"] == "limit"
    with httpx.stream("POST", f"{hybrid.url}/completion", json={**body, "stream": True}) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert events[-1]["stop"] is True


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/chat/completions", b"{", 400, "invalid_request_error"),
        ("/v1/chat/completions", b"[]", 400, "invalid_request_error"),
        ("/v1/chat/completions", b"{}", 400, "invalid_request_error"),
        ("/v1/chat/completions", {"messages": "hi"}, 400, "invalid_request_error"),
        ("/v1/chat/completions", {"messages": [{"role": "no role", "content": "x"}]}, 400, "invalid_request_error"),
        ("/v1/chat/completions", {"messages": [user("x")], "temperature": "hot"}, 400, "invalid_request_error"),
        ("/v1/chat/completions", {"messages": [user("x" * 9000)]}, 400, "exceed_context_size_error"),
        ("/v1/chat/completions", {"messages": [user("x" * 9000)], "stream": True}, 400, "exceed_context_size_error"),
        ("/completion", {"prompt": [1, 2, 10**6]}, 400, "invalid_request_error"),
        ("/completion", {"prompt": 7}, 400, "invalid_request_error"),
        ("/nowhere", {}, 404, "not_found_error"),
    ],
)
def test_bad_requests_are_refused_and_serving_goes_on(
    hybrid: Server, path: str, body: Any, status: int, kind: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = httpx.post(f"{hybrid.url}{path}", content=content)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["code"], error["type"]) == (status, kind)
    assert error["message"]
    if kind == "exceed_context_size_error":
        assert error["n_prompt_tokens"] > error["n_ctx"] == 8192
    reply = httpx.post(f"{hybrid.url}/completion", json={"prompt": "still there?", "n_predict": 1})
    assert reply.status_code == 200


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


def test_many_clients_at_once_on_several_sequences(start: Callable[..., Server]) -> None:
    server = start("tiny-hybrid", "-np", "3")
    url = f"{server.url}/v1/chat/completions"

    def ask(i: int) -> int:
        messages = [SYSTEM, user(f"client {i} asks")]
        body = {"messages": messages, "max_tokens": 20, "temperature": 0, "stream": bool(i % 2)}
        return httpx.post(url, json=body, timeout=60).status_code

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(24))) == [200] * 24


def test_sigterm_during_a_reply_ends_cleanly(start: Callable[..., Server]) -> None:
    server = start("tiny-hybrid")
    body = {"messages": [user("tell me everything")], "stream": True, "ignore_eos": True, "max_tokens": 7000}
    received: list[bytes] = []

    def read() -> None:
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
            for chunk in response.iter_raw():
                received.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: received)
    assert server.stop() == 0
    reader.join(60)
    assert b"data: " in b"".join(received)
    assert "Traceback" not in server.log()
