"""A server process with an address, and its replies, server-sent events (WHATWG HTML), timed by the
client.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyctl.measure.server_process import ServerProcess

__all__ = ["AskedServer", "Messages", "Probs", "TimedReply"]

Messages = list[dict[str, str]]

Probs = dict[str, float]
"""Log-probabilities of the likeliest tokens at one place, by id and text."""

TIMEOUT = 600.0
"""Seconds until a model is loaded, and until a request is answered."""


@dataclass(frozen=True)
class TimedReply:
    """A streamed reply; times in milliseconds, from the sending of the request.

    ``decode_ms`` is from the first token to the last. ``probs`` has an entry per token if the
    request asked for it.
    """

    text: str
    first_ms: float
    n_predicted: int
    decode_ms: float
    timings: dict[str, Any]
    probs: tuple[Probs, ...] = ()

    @property
    def cached(self) -> int:
        """Prompt tokens that the server restored."""
        return int(self.timings.get("cache_n", 0))

    @property
    def evaluated(self) -> int:
        """Prompt tokens that the server evaluated."""
        return int(self.timings["prompt_n"])

    @property
    def source(self) -> str:
        """The place that the prompt was restored from; empty for a server that does not report
        it.
        """
        return str(self.timings.get("source", ""))

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first; None for a reply of one."""
        if self.n_predicted < 2 or not self.decode_ms:
            return None
        return (self.n_predicted - 1) / self.decode_ms * 1e3


class AskedServer(ServerProcess):
    """A server program that can be started, queried and ended; tables and errors show ``name``."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        super().__init__(command, log, timeout=TIMEOUT, environment={"LLAMA_LOG_COLORS": "off"})
        self.name = name

    def get(self, path: str, body: Any = None) -> Any:
        """Return the JSON at ``path``, or the answer to ``body``. Raises OSError if the server
        refuses.
        """
        method = "GET" if body is None else "POST"
        with self._response(method, path, body) as response:
            return json.loads(response.read())

    post = get

    def request(self, messages: Messages, n_predict: int, **fields: Any) -> TimedReply:
        """Send a conversation and read the stream. Raises OSError if the server refuses."""
        body = {
            "messages": messages,
            "max_tokens": n_predict,
            "temperature": 0,
            "stream": True,
            **fields,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        with self._response("POST", "/v1/chat/completions", body) as response:
            return _read(response, began)

    @contextmanager
    def _response(self, method: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        data = None if body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        try:
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                text = response.read()[:300]
                raise OSError(f"{self.name} answers {response.status}: {text!r}")
            yield response
        finally:
            connection.close()


def _read(response: http.client.HTTPResponse, began: float) -> TimedReply:
    """Return the reply of a stream that was requested at ``began``. Raises OSError if it ends early
    or reports an error.
    """
    first = last = 0.0
    text = ""
    n_predicted = 0
    timings: dict[str, Any] = {}
    probs: list[Probs] = []
    for line in response:
        now = time.perf_counter()
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise OSError(f"the stream ended with {event['error']}")
        timings = event.get("timings") or timings
        usage = event.get("usage") or {}
        n_predicted = usage.get("completion_tokens", n_predicted)
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            content = delta.get("content") or ""
            has_text = content or delta.get("reasoning_content")
            text += content
            probs += _probs(choice)
            if has_text or choice.get("finish_reason"):
                first = first or now
                last = now
    if not first or "prompt_n" not in timings:
        raise OSError("the stream ended without a token or without timings")
    cache = response.headers.get("x-pyctl-cache", "")
    source = cache.partition(";")[0].removeprefix("source=")
    if source:
        timings = {**timings, "source": source}
    return TimedReply(
        text=text,
        first_ms=(first - began) * 1e3,
        n_predicted=n_predicted,
        decode_ms=max(last - first, 0.0) * 1e3,
        timings=timings,
        probs=tuple(probs),
    )


def _probs(choice: dict[str, Any]) -> list[Probs]:
    logprobs = choice.get("logprobs") or {}
    all_probs = []
    for place in logprobs.get("content") or ():
        probs = {}
        for candidate in place["top_logprobs"]:
            key = f"{candidate.get('id')} {candidate['token']}"
            probs[key] = candidate["logprob"]
        all_probs.append(probs)
    return all_probs
