"""Answers of servers: counts of tokens wherever they are reported, and the text for a token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bench.traces.chat_server import ChatServer, read_answer, reply_text
from bench.traces.chats import TextScale
from tests.web_server import Handler, web_server

USAGE = {"prompt_tokens": 100, "completion_tokens": 7}

MESSAGE_TAGS = 9


def body_of(message: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return a chat completion."""
    message = message or {"role": "assistant", "content": "Yes."}
    return {"choices": [{"message": message}], "usage": USAGE, **fields}


@pytest.mark.parametrize(
    ("fields", "n_evaluated"),
    [
        ({"timings": {"prompt_n": 30, "cache_n": 70}}, 30),
        ({"timings": {"prompt_n": 30, "cache_n": 70, "warmed_n": 12}}, 42),
        ({"usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 64}}}, 36),
        ({"usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 0}}}, 100),
    ],
)
def test_evaluated_tokens_are_read_where_the_server_reports_them(
    fields: dict[str, Any], n_evaluated: int
) -> None:
    answer = read_answer(body_of(**fields), {}, 0.5)
    assert answer.n_evaluated == n_evaluated
    assert answer.n_prompt == 100
    assert answer.n_reply == 7
    assert answer.seconds == 0.5
    assert answer.message == {"role": "assistant", "content": "Yes."}
    assert answer.source == ""


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"usage": None}, "reports no usage.prompt_tokens"),
        ({}, "neither timings.prompt_n nor usage"),
        ({"usage": {**USAGE, "prompt_tokens_details": None}}, "neither timings.prompt_n nor usage"),
    ],
)
def test_an_answer_without_counts_is_an_error(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_answer(body_of(**fields), {}, 0.5)


def test_the_source_and_the_miss_are_pyctls() -> None:
    miss = {"position": 60, "nearest": 32, "was": "a", "is": "b"}
    timings = {"prompt_n": 68, "cache": {"source": "ram", "miss": miss}}
    headers = {"x-pyctl-cache": "source=ram; cached=32; evaluated=68"}
    answer = read_answer(body_of(timings=timings), headers, 0.5)
    assert answer.source == "ram"
    assert answer.left_at == 60
    assert answer.resumed_at == 32


def test_reasoning_is_sent_back_and_part_of_the_text() -> None:
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    answer = read_answer(body_of(message, timings={"prompt_n": 1}), {}, 0.5)
    assert answer.message == message
    assert reply_text(message) == "Hm.\n</think>\n\nYes."


def count(messages: list[dict[str, str]]) -> int:
    return sum(MESSAGE_TAGS + len(each["content"]) for each in messages)


class OpenAIHandler(Handler):
    """A server with a token for each character, and MESSAGE_TAGS around a message."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self.answer(body)
        self.send(status, json.dumps(answer).encode())

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and body."""
        if self.path != "/v1/chat/completions":
            return 404, {"error": {"message": "no such endpoint"}}
        if body.get("model") == "none":
            return 400, {"error": {"message": "no such model"}}
        usage = {
            "prompt_tokens": count(body["messages"]),
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        return 200, body_of(usage=usage)


class LlamaHandler(OpenAIHandler):
    """Renders and tokenizes as well."""

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and body."""
        if self.path == "/apply-template":
            return 200, {"prompt": "|".join(each["content"] for each in body["messages"])}
        if self.path == "/tokenize":
            return 200, {"tokens": [ord(char) for char in body["content"]]}
        return super().answer(body)


@pytest.fixture
def url() -> Iterator[str]:
    """Return the address of a server that only has OpenAI's endpoint."""
    with web_server(OpenAIHandler) as address:
        yield address


def test_characters_and_tags_of_a_token_are_measured(url: str) -> None:
    text = ChatServer(url).measure_text(1 / 32)
    assert text == TextScale(1 / 32, chars_per_token=1.0, message_tokens=MESSAGE_TAGS)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_with_the_version(url: str, end: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert ChatServer(url + end).chat(messages, 1).n_prompt == 5 + MESSAGE_TAGS


def test_a_refusal_is_an_error_with_the_servers_words(url: str) -> None:
    with pytest.raises(ValueError, match=r"400: .*no such model"):
        ChatServer(url, "none").chat([{"role": "user", "content": "Hello"}], 1)


HELLO = [{"role": "user", "content": "Hé"}]


def test_a_server_that_does_not_tokenize_shares_bytes(url: str) -> None:
    server = ChatServer(url)
    assert bytes(server.prompt_units(HELLO).tolist()) == "user\nHé\nassistant\n".encode()
    assert bytes(server.reply_units({"content": "Ja"}).tolist()) == b"Ja"


def test_a_server_that_tokenizes_shares_tokens() -> None:
    with web_server(LlamaHandler) as url:
        server = ChatServer(url)
        assert server.prompt_units([*HELLO, *HELLO]).tolist() == [72, 233, 124, 72, 233]
        assert server.reply_units({"content": "Ja"}).tolist() == [74, 97]
