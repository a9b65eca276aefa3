"""Chats with a server at an address: replies, and the prompt tokens that it evaluated for them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx
import numpy as np

from bench.common import words
from bench.traces.chats import Message, TextScale
from pyctl.prompt import Tokens, as_tokens

__all__ = ["Answer", "ChatServer", "read_answer", "reply_text"]

TIMEOUT = 600.0
"""Seconds for an answer."""

SHORT: Sequence[Message] = [{"role": "user", "content": "a"}]
"""The shortest chat."""

SAMPLE_CHARS = 2_000
"""Characters of the text by which the length of a token is measured."""

SAMPLE_MESSAGES = 9
"""Messages of the chat by which the tokens around a message are measured; an odd number, so that
the roles alternate from a user to a user.
"""


@dataclass(frozen=True)
class Answer:
    """A reply, and the server's account of its prompt.

    Attributes:
        message: The reply as a client sends it back.
        n_prompt: Tokens of the prompt.
        n_evaluated: Tokens of it that were evaluated, also those evaluated in advance.
        n_reply: Tokens of the reply.
        seconds: From the request to the end of the reply, by the client's clock.
        source: Where the rest was restored from: live, ram, disk or none; empty if not reported.
        left_at: The token at which the prompt left a recent one, None if not reported.
        resumed_at: The token that was resumed at instead, None if not reported.
    """

    message: Message
    n_prompt: int
    n_evaluated: int
    n_reply: int
    seconds: float
    source: str = ""
    left_at: int | None = None
    resumed_at: int | None = None


def read_answer(body: Mapping[str, Any], headers: Mapping[str, str], seconds: float) -> Answer:
    """Return the answer in the ``body`` of a chat completion.

    The evaluated tokens are `timings.prompt_n`, as llama-server has it, with pyctl's `warmed_n`,
    the tokens evaluated before the request came; without timings, the prompt's tokens less
    OpenAI's `cached_tokens`. Raises ValueError for a body without either.
    """
    usage = body.get("usage") or {}
    timings = body.get("timings") or {}
    if "prompt_tokens" not in usage:
        raise ValueError("the server reports no usage.prompt_tokens")
    n_prompt = int(usage["prompt_tokens"])
    miss = timings.get("cache", {}).get("miss") or {}
    message = body["choices"][0]["message"]
    reply: Message = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("reasoning_content"):
        reply["reasoning_content"] = message["reasoning_content"]
    return Answer(
        message=reply,
        n_prompt=n_prompt,
        n_evaluated=_n_evaluated(n_prompt, usage, timings),
        n_reply=int(usage.get("completion_tokens", 0)),
        seconds=seconds,
        source=_source(headers),
        left_at=miss.get("position"),
        resumed_at=miss.get("nearest"),
    )


def _n_evaluated(n_prompt: int, usage: Mapping[str, Any], timings: Mapping[str, Any]) -> int:
    if "prompt_n" in timings:
        return int(timings["prompt_n"]) + int(timings.get("warmed_n", 0))
    n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if n_cached is None:
        raise ValueError(
            "the server reports neither timings.prompt_n nor "
            "usage.prompt_tokens_details.cached_tokens"
        )
    return n_prompt - int(n_cached)


def _source(headers: Mapping[str, str]) -> str:
    """Return the source in the header of pyctl; empty without it."""
    cache = headers.get("x-pyctl-cache", "")
    return cache.partition(";")[0].removeprefix("source=")


def reply_text(message: Message) -> str:
    """Return the text that the model generated for ``message``."""
    said = str(message["content"])
    thought = message.get("reasoning_content")
    if not thought:
        return said
    return f"{thought}\n</think>\n\n{said}" if said else str(thought)


class ChatServer:
    """A model of a server at an address."""

    def __init__(self, url: str, model: str = "", fields: Mapping[str, Any] | None = None) -> None:
        """Prepare chats with the server at ``url``, with or without /v1 at its end.

        Args:
            url: The address of the server.
            model: The name of the model, empty for a server that has one.
            fields: More fields of each chat request.
        """
        # Without connections that are kept, a restart of the server breaks none.
        self._client = httpx.Client(
            base_url=url.rstrip("/").removesuffix("/v1"),
            timeout=TIMEOUT,
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._model = {"model": model} if model else {}
        self._fields = dict(fields or {})

    def chat(self, messages: Sequence[Message], max_tokens: int) -> Answer:
        """Send a chat, and return the answer. Raises httpx.HTTPError for a server that does not
        answer, and ValueError for a refusal and for an answer without counts of tokens.
        """
        body = {
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            **self._fields,
        }
        began = time.perf_counter()
        response = self._post("/v1/chat/completions", body)
        seconds = time.perf_counter() - began
        if not response.is_success:
            raise ValueError(f"the server answers {response.status_code}: {response.text[:300]}")
        return read_answer(response.json(), response.headers, seconds)

    def measure_text(self, scale: float) -> TextScale:
        """Return the text that stands for recorded tokens at ``scale``: characters of a token and
        tokens around a message, measured by three short chats.
        """
        long = [{"role": "user", "content": words("sample", SAMPLE_CHARS)}]
        several = [
            {"role": "assistant" if number % 2 else "user", "content": "a"}
            for number in range(SAMPLE_MESSAGES)
        ]
        n_short, n_long, n_several = (
            self.chat(messages, 1).n_prompt for messages in (SHORT, long, several)
        )
        chars_per_token = (SAMPLE_CHARS - 1) / max(n_long - n_short, 1)
        message_tokens = (n_several - n_short) / (SAMPLE_MESSAGES - 1) - 1
        return TextScale(scale, chars_per_token, max(message_tokens, 0.0))

    def prompt_units(self, messages: Sequence[Message]) -> Tokens:
        """Return the prompt of a chat in units that show the part shared with another one, shape
        (n,).

        Units are tokens if the server renders and tokenizes as llama-server does, else bytes.
        """
        if self._can_tokenize:
            response = self._post("/apply-template", {**self._fields, "messages": list(messages)})
            return self._tokenize(response.raise_for_status().json()["prompt"])
        text = "".join(f"{each['role']}\n{reply_text(each)}\n" for each in messages)
        return _bytes_of(f"{text}assistant\n")

    def reply_units(self, message: Message) -> Tokens:
        """Return a reply in the units of `prompt_units`, shape (n,)."""
        text = reply_text(message)
        return self._tokenize(text) if self._can_tokenize else _bytes_of(text)

    @cached_property
    def _can_tokenize(self) -> bool:
        """True if the server renders and tokenizes prompts as llama-server does."""
        rendered = self._post("/apply-template", {"messages": list(SHORT)})
        tokenized = self._post("/tokenize", {"content": "a"})
        return "prompt" in _json_object(rendered) and "tokens" in _json_object(tokenized)

    def _tokenize(self, text: str) -> Tokens:
        response = self._post("/tokenize", {"content": text, "parse_special": True})
        return as_tokens(response.raise_for_status().json()["tokens"])

    def _post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return self._client.post(path, json={**self._model, **body})


def _bytes_of(text: str) -> Tokens:
    return as_tokens(np.frombuffer(text.encode(), np.uint8).astype(np.int32))


def _json_object(response: httpx.Response) -> Mapping[str, Any]:
    """Return the object of a successful response; an empty one for anything else."""
    if not response.is_success:
        return {}
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
