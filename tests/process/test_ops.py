"""Operations of a real server: sleep and wake, embeddings, and warm-ups."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import httpx
import openai
import pytest

from tests.case import Case
from tests.client import ChatReply
from tests.process.conftest import Server
from tests.waiting import until

Start = Callable[..., Server]

SYSTEM = {"role": "system", "content": "You keep the manual. " * 40}


def ask_questions(server: Server, *questions: str) -> ChatReply:
    """Return the reply to the last of several questions, which end the same conversation."""
    messages = [SYSTEM, *({"role": "user", "content": question} for question in questions)]
    return server.chat(messages, max_tokens=8, ignore_eos=True)


def is_sleeping(server: Server) -> bool:
    return bool(server.client.get_json("/props")["is_sleeping"])


def test_it_sleeps_keeps_its_cache_and_wakes(start: Start) -> None:
    """An idle server unloads its model, answers all that needs no weights, and wakes for a request
    with its snapshots: the reply is that of a fresh server.
    """
    server = start("tiny-hybrid", "--exact", "--alias", "tiny", "--sleep-idle-seconds", "3")
    ask_questions(server, "What is in chapter one?")
    until(lambda: is_sleeping(server))
    for path in ("/health", "/models", "/props", "/slots", "/cache"):
        assert server.client.get(path).status_code == 200
    # Counting tokens and rendering need the vocabulary alone.
    assert server.client.tokenize("hi")
    assert is_sleeping(server)
    warm = ask_questions(server, "What is in chapter one?", "And in two?")
    assert warm.source == "ram"
    assert warm.timings["cache_n"] > 700
    endless = {"prompt": "x", "n_predict": 7000, "ignore_eos": True}
    with server.client.open_stream("/completion", endless) as stream:
        next(iter(stream))
        assert not is_sleeping(server)
    fresh = start("tiny-hybrid", "--exact")
    assert (
        ask_questions(fresh, "What is in chapter one?", "And in two?").body["choices"]
        == warm.body["choices"]
    )
    assert "model unloaded" in server.log()
    assert server.stop() == 0
    assert "Traceback" not in server.log()


def test_embeddings_beside_a_conversation(start: Start) -> None:
    """Embeddings are equal for equal texts, normalised, and the same in both encodings; they leave
    the cached conversation and its next reply as they were.
    """
    server = start("tiny-hybrid", "--embeddings", "--pooling", "mean", is_f32=True)
    first = ask_questions(server, "What is in chapter one?")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        texts = ["the cat sat", "the cat sat", "nothing of the kind"]
        made = client.embeddings.create(model="any", input=texts)
        plain = client.embeddings.create(model="any", input=texts, encoding_format="float")
    one, same, other = (item.embedding for item in made.data)
    assert one == same != other
    assert math.hypot(*one) == pytest.approx(1, rel=1e-5)
    assert plain.data[2].embedding == pytest.approx(other, rel=1e-6)
    assert made.usage.prompt_tokens > 10
    Case("/v1/embeddings", {"input": "word " * 200}, 400, "current batch size: 128").check(
        server.client
    )
    again = ask_questions(server, "What is in chapter one?")
    assert again.body["choices"][0]["message"] == first.body["choices"][0]["message"]
    assert again.timings["cache_n"] > 0


def test_embeddings_of_each_token(start: Start) -> None:
    server = start("tiny-dense", "--embeddings", "--pooling", "none")
    tokens = server.client.tokenize("a cat")
    (item,) = server.client.post_json("/embeddings", {"input": "a cat"})
    assert len(item["embedding"]) == len(tokens)
    assert len(set(map(len, item["embedding"]))) == 1
    assert server.client.post("/v1/embeddings", {"input": "a cat"}).status_code == 400


def test_prompts_are_made_ready_while_nobody_asks(start: Start) -> None:
    server = start("tiny-hybrid")
    assert server.client.post_json("/cache/warm", {"messages": [SYSTEM]})
    assert server.client.get_json("/cache")["totals"]["prewarms"]
    first = ask_questions(server, "What is in chapter one?")
    assert first.timings["warmed_n"] == first.timings["cache_n"] > 700
    # Shutdown does not wait for a background request.
    prompt = {"messages": [{"role": "user", "content": "word " * 1500}]}
    impatient = httpx.Timeout(60, read=0.2)
    with contextlib.suppress(httpx.ReadTimeout):
        server.client.post("/cache/warm", prompt, timeout=impatient)
    assert server.stop() == 0
    assert "Traceback" not in server.log()
