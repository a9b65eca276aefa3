"""A client of a server: of an application in this process, or of a server at an address."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
from starlette.types import ASGIApp

__all__ = [
    "CHAT",
    "HI",
    "ChatReply",
    "Client",
    "LiveStream",
    "ServerClient",
    "events",
    "named_events",
    "random_message",
    "source_of",
]

CHAT = "/v1/chat/completions"

HI = [{"role": "user", "content": "Hi"}]
"""A conversation of one short message."""

Messages = list[dict[str, Any]]


def random_message(seed: object, n: int) -> dict[str, str]:
    """Return a message of the user with ``n`` characters, which depend on ``seed`` alone."""
    text = "".join(random.Random(str(seed)).choices("abcdefghij klmno", k=n))
    return {"role": "user", "content": text}


class Client:
    """Sends requests one by one; responses are httpx's, with status, headers and body.

    `to_app` reaches an application without a network, `to_server` a server at a URL.
    """

    def __init__(self, send: Callable[..., httpx.Response]) -> None:
        """Take ``send(method, path, ...)``, which has the parameters of `httpx.request`."""
        self._send = send

    @classmethod
    def to_app(cls, app: ASGIApp, address: str = "127.0.0.1") -> Client:
        """Return a client of an application, which sees requests come from ``address``."""
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(address, 5000))

        async def send(method: str, path: str, **kwargs: Any) -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, **kwargs)

        return cls(lambda *args, **kwargs: asyncio.run(send(*args, **kwargs)))

    @staticmethod
    def to_server(
        url: str, timeout: float = 120.0, headers: Mapping[str, str] | None = None
    ) -> ServerClient:
        """Return a client of the server at ``url``, which may take ``timeout`` seconds; ``headers``
        go along with each request.
        """
        return ServerClient(url, timeout, headers or {})

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """Send a request with a body of ``json`` or ``content``, and ``headers``."""
        return self._send(method, path, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        """Send a GET."""
        return self._send("GET", path, **kwargs)

    def get_json(self, path: str, **kwargs: Any) -> Any:
        """Return the JSON that answers a GET. Fails for another status than 200."""
        return _json_of(self.get(path, **kwargs))

    def delete(self, path: str, **kwargs: Any) -> httpx.Response:
        """Send a DELETE."""
        return self._send("DELETE", path, **kwargs)

    def options(self, path: str, **kwargs: Any) -> httpx.Response:
        """Send an OPTIONS."""
        return self._send("OPTIONS", path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        """Send a POST with ``body`` as JSON; None for no body, or one of ``content``."""
        fields = {} if body is None else {"json": body}
        return self._send("POST", path, **fields, **kwargs)

    def post_json(self, path: str, body: Any, **kwargs: Any) -> Any:
        """Return the JSON that answers a POST. Fails for another status than 200."""
        return _json_of(self.post(path, body, **kwargs))

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self.post_json("/tokenize", {"content": text})["tokens"])

    def stream(self, path: str, body: dict[str, Any], **kwargs: Any) -> bytes:
        """Return the events of a stream, as they are sent. Fails for another status than 200."""
        response = self.post(path, {**body, "stream": True}, **kwargs)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream"
        return response.content

    def chat(self, messages: Messages, **fields: Any) -> ChatReply:
        """Return the whole reply to a conversation. Fails for another status than 200."""
        response = self.post(CHAT, {"messages": messages, **fields})
        assert response.status_code == 200, response.text
        return ChatReply(response)


class ServerClient(Client):
    """A client of a server in another process, whose streams are read while they come."""

    def __init__(self, url: str, timeout: float, headers: Mapping[str, str]) -> None:
        """Reach the server at ``url``, which may take ``timeout`` seconds; send ``headers`` along
        with each request.
        """
        self._url = url
        self._defaults = {"timeout": timeout, "headers": headers}
        super().__init__(self._request)

    def _request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.request(method, self._url + path, **{**self._defaults, **kwargs})

    @contextmanager
    def open_stream(self, path: str, body: Mapping[str, Any]) -> Iterator[LiveStream]:
        """Yield the stream that answers a POST, once its headers are there. Fails for another
        status than 200.
        """
        given = {"json": {**body, "stream": True}, **self._defaults}
        with httpx.stream("POST", self._url + path, **given) as response:
            assert response.status_code == 200, response.read()
            yield LiveStream(response)


class LiveStream:
    """A stream that is being sent; iterating it reads its events, [DONE] aside.

    Its client leaves when the stream is closed, not when the iteration ends.
    """

    def __init__(self, response: httpx.Response) -> None:
        self.headers = response.headers
        self._lines = response.iter_lines()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._lines:
            if line.startswith("data: {"):
                yield msgspec.json.decode(line.removeprefix("data: "))


def _json_of(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


@dataclass(frozen=True)
class ChatReply:
    """A whole reply of /v1/chat/completions."""

    response: httpx.Response

    @property
    def body(self) -> Any:
        """The JSON of the reply."""
        return self.response.json()

    @property
    def text(self) -> str:
        """The text of the message, without its reasoning."""
        return str(self.body["choices"][0]["message"]["content"])

    @property
    def logprobs(self) -> Any:
        """The tokens with their log-probabilities; two replies differ in them by a single bit."""
        return self.body["choices"][0]["logprobs"]

    @property
    def timings(self) -> dict[str, Any]:
        """The times of the reply in milliseconds, and its counts of tokens."""
        return dict(self.body["timings"])

    @property
    def source(self) -> str:
        """The tier from which the prompt was restored."""
        return source_of(self.response)


def source_of(response: httpx.Response) -> str:
    """Return the tier from which the prompt of a reply was restored."""
    header = str(response.headers["x-pyctl-cache"])
    return header.partition(";")[0].removeprefix("source=")


def events(body: bytes) -> list[Any]:
    """Return server-sent events, decoded; [DONE] stays a string. Comments are left out."""
    frames = [frame for frame in body.split(b"\n\n") if frame and frame != b":"]
    assert all(frame.startswith(b"data: ") for frame in frames)
    data = [frame.removeprefix(b"data: ") for frame in frames]
    return ["[DONE]" if item == b"[DONE]" else msgspec.json.decode(item) for item in data]


def named_events(body: bytes) -> list[dict[str, Any]]:
    """Return server-sent events whose names are their types; comments are left out."""
    found = []
    for frame in body.split(b"\n\n"):
        if frame and frame != b":":
            name, _, data = frame.partition(b"\n")
            event = msgspec.json.decode(data.removeprefix(b"data: "))
            assert name == b"event: " + event["type"].encode()
            found.append(event)
    return found
