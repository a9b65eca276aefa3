"""The two servers under test, each a process with an address, and what a client sees of one reply."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.server_process import PYCTL_SERVE, ServerProcess

__all__ = ["Completion", "Messages", "Reply", "Server", "llama_server", "pyctl"]

Messages = list[dict[str, str]]

TIMEOUT = 600.0
"""Seconds until a model is loaded, and until a request is answered."""

BUDGET_MIB = "1048576"
"""For the files of the disk tier: more than any run writes."""


@dataclass(frozen=True)
class Completion:
    """One streamed completion of a text; ``first_ms`` and ``arrivals``, (seconds, tokens), by the client's clock."""

    first_ms: float
    arrivals: list[tuple[float, int]]
    n_predicted: int
    timings: dict[str, Any]

    @property
    def n_drafted(self) -> int:
        return int(self.timings.get("draft_n", 0))

    @property
    def n_accepted(self) -> int:
        return int(self.timings.get("draft_n_accepted", 0))


@dataclass(frozen=True)
class Reply:
    """One streamed answer. Times are the client's, in milliseconds from the sending of the request."""

    text: str
    first_ms: float
    total_ms: float
    n_predicted: int
    decode_ms: float
    timings: dict[str, Any]

    @property
    def cached(self) -> int:
        return int(self.timings.get("cache_n", 0))

    @property
    def evaluated(self) -> int:
        return int(self.timings["prompt_n"])


class Server(ServerProcess):
    """A server program that can be started, asked, and killed."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        super().__init__(command, log, timeout=TIMEOUT, environment={"LLAMA_LOG_COLORS": "off"})
        self.name = name

    def get(self, path: str) -> Any:
        with self._response("GET", path, None) as response:
            return json.loads(response.read())

    def drafts(self) -> int:
        """How many drafts were verified so far, of all replies that have ended; needs --metrics."""
        name = "llamacpp:spec_decode_num_drafts_total "
        with self._response("GET", "/metrics", None) as response:
            lines = response.read().decode().splitlines()
        return next((int(float(line.removeprefix(name))) for line in lines if line.startswith(name)), 0)

    def post(self, path: str, body: Any) -> Any:
        """OSError if the server refuses."""
        with self._response("POST", path, body) as response:
            return json.loads(response.read())

    def complete(self, prompt: str, n_predict: int) -> Completion:
        """Have a text continued by exactly so many tokens; OSError if the server refuses."""
        body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "seed": 1, "ignore_eos": True}
        began = time.perf_counter()
        arrivals: list[tuple[float, int]] = []
        with self._response("POST", "/completion", {**body, "stream": True, "return_tokens": True}) as response:
            for line in response:
                now = time.perf_counter()
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise OSError(f"the stream ended with {event['error']}")
                    if event.get("tokens"):
                        arrivals.append((now, len(event["tokens"])))
        if not arrivals or "timings" not in event:
            raise OSError("the stream ended without a token or without timings")
        n = sum(count for _, count in arrivals)
        return Completion((arrivals[0][0] - began) * 1e3, arrivals, n, event["timings"])

    def ask(self, messages: Messages, n_predict: int, **fields: Any) -> Reply:
        """Send a conversation and read the stream; OSError if the server refuses."""
        body = {"messages": messages, "max_tokens": n_predict, "temperature": 0, "stream": True, **fields}
        body["stream_options"] = {"include_usage": True}
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
                raise OSError(f"{self.name} answers {response.status}: {response.read()[:300]!r}")
            yield response
        finally:
            connection.close()


def _read(response: http.client.HTTPResponse, began: float) -> Reply:
    first = last = 0.0
    text, n_predicted = "", 0
    timings: dict[str, Any] = {}
    source = response.headers.get("x-pyctl-cache", "").partition(";")[0].removeprefix("source=")
    for line in response:
        now = time.perf_counter()
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise OSError(f"the stream ended with {event['error']}")
        timings = event.get("timings") or timings
        n_predicted = (event.get("usage") or {}).get("completion_tokens", n_predicted)
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            said = (delta.get("content") or "") + (delta.get("reasoning_content") or "")
            text += delta.get("content") or ""
            if said or choice.get("finish_reason"):
                first, last = first or now, now
    end = time.perf_counter()
    if not first or "prompt_n" not in timings:
        raise OSError("the stream ended without a token or without timings")
    timings = {**timings, **({"source": source} if source else {})}
    return Reply(text, (first - began) * 1e3, (end - began) * 1e3, n_predicted, max(last - first, 0.0) * 1e3, timings)


def pyctl(flags: Sequence[str], cache_dir: Path | None, log: Path, program: Sequence[str] = PYCTL_SERVE) -> Server:
    """`pyctl serve`, with the ends of all prompts on disk if there is a directory."""
    disk = ["--kv-cache-dir", str(cache_dir), "--disk-prefix-cache", "full", "--kv-cache-budget", BUDGET_MIB]
    return Server("pyctl", [*program, *flags, *(disk if cache_dir else ())], log)


def llama_server(binary: str, flags: Sequence[str], log: Path) -> Server:
    """llama-server with its defaults: checkpoints and its cache in RAM are on."""
    return Server("llama-server", [binary, *flags], log)
