"""Replies of a server that `pyctl bench` measures: what is read from a stream, and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyctl.measure.client import AskedServer, TimedReply
from tests.web_server import Handler, web_server


class Streaming(Handler):
    """Answers each request with the same status and body."""

    status = 200
    body = b""
    headers_sent: dict[str, str] = {}  # noqa: RUF012
    asked: list[Any] = []  # noqa: RUF012

    def do_POST(self) -> None:
        size = int(self.headers["content-length"])
        self.asked.append(json.loads(self.rfile.read(size)))
        self.send(self.status, self.body, **self.headers_sent)

    def do_GET(self) -> None:
        self.send(self.status, self.body)


def stream_of(*events: Any) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n".encode() for event in events]
    return b"".join([b": a comment\n\n", *lines, b"data: [DONE]\n\n"])


def delta(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, **more}]}


END = {
    "choices": [],
    "usage": {"completion_tokens": 3},
    "timings": {"prompt_n": 5, "cache_n": 16},
}


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Callable[..., AskedServer]]:
    """answering(body, status=200, **headers) -> a server that answers so."""
    with web_server(Streaming) as url:

        def made(body: bytes, status: int = 200, **headers: str) -> AskedServer:
            Streaming.body = body
            Streaming.status = status
            Streaming.headers_sent = headers
            Streaming.asked = []
            asked = AskedServer("llama-server", ["true"], tmp_path / "log")
            asked.port = int(url.rpartition(":")[2])
            return asked

        yield made


def test_a_stream_is_a_reply_with_its_counts(answering: Callable[..., AskedServer]) -> None:
    body = stream_of(delta(""), delta("Hel"), delta("lo"), delta("", finish_reason="stop"), END)
    asked = answering(body, x_pyctl_cache="source=ram; cached=16; evaluated=5")
    reply = asked.request([{"role": "user", "content": "Hi"}], 9, seed=1)
    assert reply.text == "Hello"
    assert reply.n_predicted == 3
    assert reply.cached == 16
    assert reply.evaluated == 5
    assert reply.source == "ram"
    assert reply.first_ms > 0
    (sent,) = Streaming.asked
    assert sent["max_tokens"] == 9
    assert sent["temperature"] == 0
    assert sent["seed"] == 1
    assert sent["stream_options"] == {"include_usage": True}


def test_a_server_that_names_no_source_has_none(answering: Callable[..., AskedServer]) -> None:
    reply = answering(stream_of(delta("a"), END)).request([], 1)
    assert reply.source == ""


def test_reasoning_is_a_first_token_and_no_text(answering: Callable[..., AskedServer]) -> None:
    thinking = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    assert answering(stream_of(thinking, END)).request([], 1).text == ""


def test_probabilities_are_those_of_each_token(answering: Callable[..., AskedServer]) -> None:
    candidates = [
        {"id": 97, "token": "a", "logprob": -0.5},
        {"id": 98, "token": "b", "logprob": -1.0},
    ]
    logprobs = {"content": [{"top_logprobs": candidates}]}
    reply = answering(stream_of(delta("a", logprobs=logprobs), END)).request([], 1)
    assert reply.probs == ({"97 a": -0.5, "98 b": -1.0},)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (stream_of(END), "without a token or without timings"),
        (stream_of(delta("a")), "without a token or without timings"),
        (stream_of(delta("a"), {"error": {"message": "full"}}), "the stream ended with .*full"),
        (b"", "without a token or without timings"),
    ],
)
def test_a_stream_that_ends_early_is_an_error(
    answering: Callable[..., AskedServer], body: bytes, error: str
) -> None:
    with pytest.raises(OSError, match=error):
        answering(body).request([], 1)


def test_a_refusal_is_an_error_with_its_text(answering: Callable[..., AskedServer]) -> None:
    with pytest.raises(OSError, match="llama-server answers 503: b'loading'"):
        answering(b"loading", 503).get("/props")
    assert answering(b'{"a": 1}').get("/props") == {"a": 1}
    assert answering(b"[2]").post("/tokenize", {"content": "a"}) == [2]


@pytest.mark.parametrize(
    ("n_predicted", "decode_ms", "rate"),
    [(11, 500.0, 20.0), (1, 500.0, None), (0, 0.0, None), (5, 0.0, None)],
)
def test_a_rate_is_of_the_tokens_after_the_first(
    n_predicted: int, decode_ms: float, rate: float | None
) -> None:
    assert TimedReply("", 1.0, n_predicted, decode_ms, {}).rate == rate
