"""Replies from a running server: pyctl's, llama-server's or any other that speaks OpenAI's chat
completions.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import httpx

from pyctl.chat.reply import CallDelta, ReplyDelta
from pyctl.errors import (
    AuthenticationError,
    EngineError,
    NotFoundError,
    PyctlError,
    RequestError,
    UnavailableError,
)
from pyctl.http_client import http_client
from pyctl.settings.convert import INT32_MAX
from pyctl.settings.limit import limit
from pyctl.terminal.conversation import PromptProgress, ReplyEvent, ReplyStats
from pyctl.terminal.mcp_calls import OfferedTool, result_text

__all__ = ["RemoteBackend"]

CONNECT_SECONDS = 10.0
UNIX = "unix://"
"""The scheme of the address of a server at a socket of this machine, before its path."""

_MAX_MODELS = limit(
    1000, "models of a server in a chat at a terminal", "the rest is left out", "memory"
)

_ANSWER_BYTES = limit(
    16 << 20,
    "answer of a server in a chat at a terminal, replies aside",
    "an error",
    "memory",
    "bytes",
)

ERRORS: Mapping[int, type[PyctlError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    503: UnavailableError,
}


class RemoteBackend:
    """A chat with the server at ``url``, with or without /v1 at its end.

    ``fields`` are added to every request: sampling that the user asked for, named as llama-server
    does. Connection problems raise UnavailableError, refusals the error of their status.
    """

    def __init__(
        self, url: str, api_key: str = "", fields: Mapping[str, Any] | None = None
    ) -> None:
        """Open the client of the server at ``url``. Nothing is sent yet."""
        self._name = self.origin = url
        self._offered: Sequence[OfferedTool] | None = None
        self._url = url.rstrip("/").removesuffix("/v1")
        transport = None
        if url.startswith(UNIX):
            transport = httpx.HTTPTransport(uds=url.removeprefix(UNIX))
            self._url = "http://localhost"
        self._fields = dict(fields or {})
        self._model: str | None = None
        self._listed: Mapping[
            str, tuple[bool, bool]
        ] = {}  # whether it reads images, and reports progress
        # A prefill may take minutes without a byte: only connecting has a time limit.
        self._client = http_client(
            self._url,
            headers={
                "Accept-Encoding": "identity",
                **({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            },
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            transport=transport,
        )

    def name(self) -> str:
        """Return the model in use, at first the first one that the server lists, or its address
        when it lists none.
        """
        if self._model is None:
            self._model = next(iter(self.models()), "")
        return self._model or self._name

    def models(self) -> Sequence[str]:
        """Return the models that the server lists; empty when it has no list."""
        response = self._request("GET", "/v1/models")
        if response.status_code == 404:
            return []
        _check(response)
        self._listed = _listed(response)
        return list(self._listed)

    def use(self, model: str) -> None:
        """Name ``model`` in requests from now on."""
        self._model = model

    def supports_images(self) -> bool:
        """Return whether the server reports an image encoder, or reports nothing about it."""
        return self._facts()[0]

    def _facts(self) -> tuple[bool, bool]:
        name = self.name()
        return self._listed.get(name, (True, False))

    def stream(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any] | None = None
    ) -> Generator[ReplyEvent, None, None]:
        """Yield the server's reply to ``messages``, timed here. Raises UnavailableError if the
        server closes early.
        """
        body = {
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._facts()[1]:  # others refuse unknown fields
            body |= {"return_progress": True, "return_cache": True}
        body |= {**self._fields, **(fields or {})}
        if self._model:
            body["model"] = self._model
        started = time.perf_counter()
        with (
            self._one_line(),
            self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response,
        ):
            if not response.is_success:
                response.read()
                _check(response)
            reply = _Reply()
            for event in _events(response.iter_bytes()):
                delta = reply.take(event, time.perf_counter() - started)
                if delta is not None:
                    yield delta
        if not reply.finished:
            raise UnavailableError(f"{self._name} closed the connection within a reply")
        yield reply.stats()

    def offered(self) -> Sequence[OfferedTool]:
        """Return the tools that the server runs; none if it does not offer tools."""
        if self._offered is None:
            response = self._request("GET", "/tools")
            if response.status_code == 503:
                return ()  # it is loading its model
            self._offered = _offered(response) if response.is_success else ()
        return self._offered

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a tool of the server. Raises EngineError if the server sends
        none.
        """
        response = self._request("POST", "/tools", {"tool": name, "params": arguments})
        _check(response)
        try:
            return result_text(dict(response.json()))
        except (ValueError, TypeError) as error:
            raise EngineError(f"{self._name} sent no result of {name}") from error

    def _request(self, method: str, path: str, body: Any = None) -> httpx.Response:
        """Return the answer as a whole, whose size is bounded. Packed answers, which were not
        requested, are refused.
        """
        with (
            self._one_line(),
            self._client.stream(method, f"{self._url}{path}", json=body) as response,
        ):
            content = bytearray()
            for part in response.iter_raw():
                content += part
                if len(content) > _ANSWER_BYTES or "content-encoding" in response.headers:
                    raise EngineError(
                        f"{self._name}{path} answered with more than {_ANSWER_BYTES >> 20} MiB, "
                        "or packed"
                    )
            return httpx.Response(
                response.status_code, content=bytes(content), request=response.request
            )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except (
            httpx.ConnectError,
            httpx.ConnectTimeout,
            httpx.InvalidURL,
            httpx.UnsupportedProtocol,
        ) as error:
            raise UnavailableError(f"cannot reach {self._name}: {error}") from error
        except httpx.HTTPError as error:
            raise UnavailableError(f"the connection to {self._name} broke: {error}") from error


class _Reply:
    """The chunks of one reply so far; times are seconds since the request."""

    def __init__(self) -> None:
        self.finished = False
        self._finish_reason = ""
        self._first: float | None = None
        self._usage: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] = {}

    def take(self, event: str, seconds: float) -> ReplyDelta | PromptProgress | None:
        """Return the delta or the progress in ``event``, which came after ``seconds``; None for
        neither.

        Raises EngineError for other events, and the error that the server reports.
        """
        if event == "[DONE]":
            self.finished = True
            return None
        try:
            chunk = json.loads(event)
            if "error" in chunk:
                raise _failure(chunk, 500)
            self._usage = dict(chunk.get("usage") or self._usage)
            self._timings = dict(chunk.get("timings") or self._timings)
            choice = (chunk.get("choices") or [{}])[0]
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            message = choice.get("delta") or {}
            calls = tuple(_call(call) for call in message.get("tool_calls") or ())
            delta = ReplyDelta(
                str(message.get("reasoning_content") or ""),
                str(message.get("content") or ""),
                calls,
            )
            progress = _progress(chunk["prompt_progress"]) if chunk.get("prompt_progress") else None
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
            raise EngineError(f"the server sent no chat completion: {event[:80]!r}") from error
        self.finished = self.finished or bool(self._finish_reason)
        if not any(delta):
            return progress
        self._first = seconds if self._first is None else self._first
        return delta

    def stats(self) -> ReplyStats:
        """Return the figures of a server that has llama-server's timings; of any other, only the
        number of received tokens.
        """
        timings = {"predicted_n": self._usage.get("completion_tokens"), **self._timings}
        counts: dict[str, Any] = {
            name: n
            for name, key in _TIMINGS.items()
            if isinstance(n := timings.get(key), int | float)
        }
        cache = timings.get("cache")  # pyctl's
        source = str(cache.get("source") or "") if isinstance(cache, Mapping) else ""
        first_ms = None if self._first is None else 1000.0 * self._first
        cut = self._finish_reason == "length"
        return ReplyStats(first_token_ms=first_ms, source=source, truncated=cut, **counts)


_TIMINGS = {
    "n_cached": "cache_n",
    "n_evaluated": "prompt_n",
    "n_predicted": "predicted_n",
    "tokens_per_second": "predicted_per_second",
    "n_drafted": "draft_n",
    "n_accepted": "draft_n_accepted",
}


def _progress(told: Mapping[str, Any]) -> PromptProgress:
    """Return llama-server's ``prompt_progress``; only pyctl adds ``left_ms`` and the place of a
    request that waits.
    """
    n_prompt, n_read, n_cached, ms, left_ms = (
        min(max(int(told.get(name) or 0), 0), INT32_MAX)
        for name in ("total", "processed", "cache", "time_ms", "left_ms")
    )
    if not left_ms and n_read > n_cached:
        left_ms = ms * (n_prompt - n_read) // (n_read - n_cached)
    position = min(max(int(told.get("waiting") or 0), 0), INT32_MAX)
    return PromptProgress(n_prompt, n_read, left_ms / 1000.0, position)


def _call(call: Mapping[str, Any]) -> CallDelta:
    function = call.get("function") or {}
    name = str(function.get("name") or "")
    arguments = str(function.get("arguments") or "")
    return CallDelta(int(call.get("index") or 0), str(call.get("id") or ""), name, arguments)


def _events(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of server-sent events (WHATWG HTML). Lines end at LF only: JSON may hold
    Unicode's other line ends.
    """
    pending = b""
    data = []
    for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            field, _, value = line.rstrip(b"\r").decode("utf-8", "replace").partition(":")
            if field == "data":
                data.append(value.removeprefix(" "))
            elif not field and data:
                yield "\n".join(data)
                data = []
    if data:
        yield "\n".join(data)


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        body = response.json()
    except ValueError:
        body = None
    raise _failure(
        body, response.status_code, f"{response.url}: " if response.status_code == 404 else ""
    )


def _failure(body: object, status: int, where: str = "") -> PyctlError:
    error = body.get("error") if isinstance(body, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else error
    if isinstance(error, Mapping) and isinstance(error.get("code"), int):
        status = error["code"]
    kind = ERRORS.get(status, RequestError if 400 <= status < 500 else EngineError)
    return kind(where + str(message or f"the server answered with HTTP status {status}"))


def _offered(response: httpx.Response) -> Sequence[OfferedTool]:
    try:
        return [
            OfferedTool(tool["tool"], tool["permissions"]["write"] is False, tool["definition"])
            for tool in response.json()[:_MAX_MODELS]
        ]
    except (ValueError, TypeError, LookupError):
        return ()


def _listed(response: httpx.Response) -> dict[str, tuple[bool, bool]]:
    """Return the models by name. A router lists the inputs of each; llama-server does so in a
    second list, of one model.
    """
    try:
        body = response.json()
        first: dict[str, Any] = next(iter(body.get("models") or ()), {})
        models = {}
        for model in body["data"][:_MAX_MODELS]:
            kinds = model.get("architecture", {}).get("input_modalities")
            sees = (
                "image" in kinds
                if kinds
                else "multimodal" in first.get("capabilities", ["multimodal"])
            )
            models[str(model["id"])] = sees, model.get("owned_by") == "llamacpp"
        return models
    except (ValueError, TypeError, LookupError, AttributeError):
        return {}
