from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import zstandard
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pyctl.chat.reply import CallDelta, ReplyDelta
from pyctl.errors import (
    AuthenticationError,
    ConfigError,
    EngineError,
    NotFoundError,
    PyctlError,
    RequestError,
    UnavailableError,
)
from pyctl.terminal.conversation import Call, PromptProgress, ReplyStats
from pyctl.terminal.mcp_calls import OfferedTool, ToolCalls
from pyctl.terminal.remote import RemoteBackend

TIMINGS: dict[str, Any] = {
    "cache_n": 90,
    "prompt_n": 10,
    "predicted_n": 5,
    "predicted_per_second": 12.5,
    "draft_n": 6,
}
TIMINGS |= {"draft_n_accepted": 4, "cache": {"source": "disk"}}
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 80},
}
MESSAGES = [{"role": "user", "content": "Hi"}]


def chunk(finish: str | None = None, **delta: Any) -> str:
    return "data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}) + "\n\n"


def last(**fields: Any) -> str:
    return "data: " + json.dumps({"choices": [], **fields}) + "\n\n"


DONE = "data: [DONE]\n\n"
REPLY = [
    chunk(role="assistant", content=None),
    chunk(reasoning_content="hm"),
    chunk(content="Yes"),
    chunk(content="."),
]
SCRIPTS: dict[str, list[str]] = {
    "llama": [*REPLY, chunk("stop"), last(usage=USAGE, timings=TIMINGS), DONE],
    "openai": [": comment\r\n\r\n", *REPLY, chunk("length"), last(usage=USAGE), DONE],
    "bare": [*REPLY, DONE],
    "separators": [
        'data: {"choices": [{"delta":\n',
        'data: {"content": "a\u2028b\x85c"}}]}\n\n',
        chunk("stop"),
        DONE,
    ],
    "calls": [
        chunk(
            tool_calls=[
                {
                    "index": 0,
                    "id": "a",
                    "type": "function",
                    "function": {"name": "f", "arguments": ""},
                }
            ]
        ),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"x": 1}'}}]),
        chunk(tool_calls=[{"index": 1, "id": "b", "function": {"name": "g", "arguments": None}}]),
        chunk("tool_calls"),
        DONE,
    ],
    "odd calls": [chunk(tool_calls=[3])],
    "broken": [*REPLY],
    "odd error": ['data: {"error": "plain"}\n\n'],
    "error": [*REPLY, 'data: {"error": {"code": 503, "message": "shutting down"}}\n\n'],
    "progress": [
        last(
            prompt_progress={"total": 9000, "cache": 0, "processed": 0, "time_ms": 0, "waiting": 2}
        ),
        last(prompt_progress={"total": 9000, "cache": 1000, "processed": 3000, "time_ms": 4000}),
        last(
            prompt_progress={
                "total": 9000,
                "cache": 1000,
                "processed": 5000,
                "time_ms": 8000,
                "left_ms": 7000,
            }
        ),
        *REPLY,
        DONE,
    ],
    "huge progress": [last(prompt_progress={"total": 1e400, "processed": 0})],
    "nonsense": ["data: {]\n\n"],
    "odd": ["data: [1]\n\n"],
}


class ScriptedServer:
    """A server in a thread that answers by the script that the question names."""

    def __init__(self) -> None:
        """Start the server on a free port; `url` is its address."""
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.left = threading.Event()
        self.models: Any = {"data": [{"id": "tiny"}]}
        self.result = Response("{}")
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/tools", self._tools, methods=["POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), port=0, log_level="critical", ws="none", lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    async def _models(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        return JSONResponse(self.models, status_code=404 if self.models is None else 200)

    async def _tools(self, request: Request) -> Response:
        return self.result

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        question = body["messages"][-1]["content"]
        if question.isdigit():
            error = {
                "error": {"code": int(question), "message": f"because of\n{question}", "type": "x"}
            }
            return JSONResponse(error, status_code=int(question))
        if question == "elsewhere":
            return Response(status_code=307, headers={"location": "/"})
        if question == "html":
            return Response("<html>", status_code=502)
        return StreamingResponse(self._stream(question), media_type="text/event-stream")

    async def _stream(self, question: str) -> AsyncIterator[bytes]:
        import anyio

        try:
            if question == "endless":
                while True:
                    yield chunk(content="word ").encode()
                    await anyio.sleep(0.005)
            for text in SCRIPTS[question]:
                data = text.encode()
                yield data[:7]  # events and characters arrive in pieces
                yield data[7:]
        finally:
            self.left.set()


@pytest.fixture(scope="module")
def running() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.stop()


@pytest.fixture
def server(running: ScriptedServer) -> ScriptedServer:
    running.bodies = []
    running.keys = []
    running.models = {"data": [{"id": "tiny"}]}
    running.left.clear()
    return running


@pytest.fixture
def backend(server: ScriptedServer) -> Iterator[RemoteBackend]:
    backend = RemoteBackend(server.url)
    yield backend
    backend.close()


def ask(backend: RemoteBackend, question: str) -> tuple[str, str, ReplyStats]:
    *deltas, stats = backend.stream([{"role": "user", "content": question}])
    assert isinstance(stats, ReplyStats)
    said = [delta for delta in deltas if isinstance(delta, ReplyDelta)]
    return (
        "".join(delta.reasoning for delta in said),
        "".join(delta.content for delta in said),
        stats,
    )


def test_tool_calls(backend: RemoteBackend) -> None:
    deltas = list(backend.stream([{"role": "user", "content": "calls"}]))
    assert [call for delta in deltas if isinstance(delta, ReplyDelta) for call in delta.calls] == [
        CallDelta(0, "a", "f"),
        CallDelta(0, arguments='{"x": 1}'),
        CallDelta(1, "b", "g"),
    ]
    with pytest.raises(EngineError, match="no chat completion"):
        list(backend.stream([{"role": "user", "content": "odd calls"}]))


def test_a_reply_of_llama_server(backend: RemoteBackend) -> None:
    began = time.perf_counter()
    reasoning, content, stats = ask(backend, "llama")
    took_ms = 1000.0 * (time.perf_counter() - began)
    assert reasoning == "hm"
    assert content == "Yes."
    assert stats.n_cached == 90
    assert stats.n_evaluated == 10
    assert stats.n_predicted == 5
    assert stats.tokens_per_second == 12.5
    assert stats.n_drafted == 6
    assert stats.n_accepted == 4
    assert stats.source == "disk"
    assert stats.first_token_ms is not None
    assert 0.0 < stats.first_token_ms < took_ms
    assert not stats.truncated


def test_a_server_without_timings(backend: RemoteBackend) -> None:
    _, content, stats = ask(backend, "openai")
    assert content == "Yes."
    assert stats.n_cached is None
    assert stats.n_evaluated is None
    assert stats.n_predicted == 5
    assert stats.truncated


def test_lines_end_where_sse_says_and_not_where_unicode_says(backend: RemoteBackend) -> None:
    assert ask(backend, "separators")[1] == "a\u2028b\x85c"


def test_the_request(server: ScriptedServer) -> None:
    backend = RemoteBackend(server.url + "/v1/", "secret", {"temperature": 0.5, "max_tokens": 7})
    ask(backend, "llama")
    backend.close()
    assert server.keys == ["Bearer secret"]
    body = server.bodies[0]
    assert body["messages"] == [{"role": "user", "content": "llama"}]
    assert body["stream"] is True
    assert body["temperature"] == 0.5
    assert body["max_tokens"] == 7
    assert body["model"] == "tiny"
    assert body["stream_options"] == {"include_usage": True}


def test_name(server: ScriptedServer, backend: RemoteBackend) -> None:
    assert backend.name() == "tiny"
    answers: list[Any] = [None, {}, [], {"data": []}]
    for models in answers:
        server.models = models
        other = RemoteBackend(server.url)
        assert other.name() == server.url
        ask(other, "bare")
        assert "model" not in server.bodies[-1]
        other.close()


@pytest.mark.parametrize(
    ("question", "kind", "text"),
    [
        ("400", RequestError, "because of\n400"),
        ("401", AuthenticationError, "because of\n401"),
        ("404", NotFoundError, "/v1/chat/completions: because of\n404"),
        ("500", EngineError, "because of\n500"),
        ("503", UnavailableError, "because of\n503"),
        ("html", EngineError, "the server answered with HTTP status 502"),
        ("elsewhere", EngineError, "the server answered with HTTP status 307"),
        ("broken", UnavailableError, "closed the connection within a reply"),
        ("error", UnavailableError, "shutting down"),
        ("odd error", EngineError, "plain"),
        ("huge progress", EngineError, "the server sent no chat completion"),
        ("nonsense", EngineError, "the server sent no chat completion"),
        ("odd", EngineError, "the server sent no chat completion"),
    ],
)
def test_refusals_and_failures(
    backend: RemoteBackend, question: str, kind: type[PyctlError], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        ask(backend, question)
    assert type(caught.value) is kind


def test_closing_stops_the_server(server: ScriptedServer, backend: RemoteBackend) -> None:
    stream = backend.stream([{"role": "user", "content": "endless"}])
    assert next(stream) == ReplyDelta(content="word ")
    stream.close()
    assert server.left.wait(60)


@pytest.mark.parametrize(
    "result",
    [
        Response(b"[" * (17 << 20)),
        Response(b"[" * 100_000),
        Response(zstandard.compress(b'"' + b"x" * (1 << 20)), headers={"content-encoding": "zstd"}),
        Response(gzip.compress(b'"' + b"x" * (1 << 20)), headers={"content-encoding": "gzip"}),
    ],
    ids=["long", "deep", "zstd", "gzip"],
)
def test_a_result_of_a_tool_that_is_too_much_is_an_error(
    server: ScriptedServer, backend: RemoteBackend, result: Response
) -> None:
    server.result = result
    tools: Any = SimpleNamespace(
        origin="here", offered=lambda: [OfferedTool("a", True, {})], call=backend.call
    )
    assert (
        ToolCalls(tools, lambda question: "o")
        .result(Call("id", "a", "{}"))
        .startswith('{"error": ')
    )


def test_the_text_of_a_result_is_bounded_and_can_be_sent(
    server: ScriptedServer, backend: RemoteBackend
) -> None:
    server.result = Response(json.dumps({"plain_text_response": "\ud83d" * 300_000}))
    text = backend.call("a", {})
    assert len(text) == 262_163
    assert text[:2] == "??"
    assert text[-18:] == "[output truncated]"


def test_a_server_of_several_models(server: ScriptedServer, backend: RemoteBackend) -> None:
    server.models = {"data": [{"id": "tiny"}, {"id": "large"}]}
    assert backend.name() == "tiny"
    assert backend.models() == ["tiny", "large"]
    backend.use("large")
    list(backend.stream([{"role": "user", "content": "bare"}], {"top_k": 3}))
    assert server.bodies[-1]["model"] == "large"
    assert server.bodies[-1]["top_k"] == 3
    assert backend.name() == "large"


@pytest.mark.parametrize("owner", ["llamacpp", "another"])
def test_progress_is_asked_for_where_it_is_known(
    server: ScriptedServer, backend: RemoteBackend, owner: str
) -> None:
    server.models = {"data": [{"id": "tiny", "owned_by": owner}]}
    waits, first, second, *_ = backend.stream([{"role": "user", "content": "progress"}])
    assert waits == PromptProgress(9000, 0, queue_position=2)
    assert first == PromptProgress(9000, 3000, 12.0)
    assert second == PromptProgress(9000, 5000, 7.0)
    assert ("return_progress" in server.bodies[0]) is (owner == "llamacpp")


CAPABLE = {"models": [{"capabilities": ["completion"]}]}


@pytest.mark.parametrize(
    ("fields", "more", "sees"),
    [
        ({}, {}, True),
        ({}, CAPABLE, False),
        ({"architecture": {"input_modalities": ["text", "image"]}}, CAPABLE, True),
        ({"architecture": {"input_modalities": ["text"]}}, {}, False),
        ({"architecture": 3}, {}, True),
    ],
)
def test_what_a_list_says_about_images(
    server: ScriptedServer,
    backend: RemoteBackend,
    fields: dict[str, Any],
    more: dict[str, Any],
    sees: bool,
) -> None:
    server.models = {"data": [{"id": "tiny", **fields}], **more}
    assert backend.supports_images() is sees


@contextmanager
def answering(listener: socket.socket, answer: bytes) -> Iterator[None]:
    """Answer one request for the models with ``answer``, then end its connection."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(65536).startswith(b"GET /v1/models ")
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    thread.join()


def test_a_server_at_a_socket_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "p.sock"
    body = b'{"data": [{"id": "near"}]}'
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        with answering(listener, answer), closing(RemoteBackend(f"unix://{path}")) as backend:
            assert backend.name() == "near"


PROXIES = [
    ("http_proxy", "http://127.0.0.1:9"),
    ("HTTP_PROXY", "http://127.0.0.1:9"),
    ("ALL_PROXY", "http://[::1]:9"),
]
PROXIES += [
    ("all_proxy", address)
    for address in ("http://127.0.0.1:9", "socks5://127.0.0.1:9", "strange://x", ":")
]


@pytest.mark.parametrize(("variable", "address"), PROXIES)
def test_no_proxy_reaches_this_machine(
    server: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variable: str,
    address: str,
) -> None:
    monkeypatch.setenv(variable, address)
    for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
        with closing(RemoteBackend(url)) as backend:
            assert backend.name() == "tiny"
    test_a_server_at_a_socket_of_this_machine(tmp_path)


def test_a_proxy_that_cannot_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    with pytest.raises(ConfigError, match="the proxy of the environment"):
        RemoteBackend("http://server.invalid")
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    with (
        closing(RemoteBackend("http://server.invalid")) as backend,
        pytest.raises(UnavailableError, match="refused"),  # by the proxy
    ):
        backend.name()


def test_nobody_there_is_one_clear_line() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        backend = RemoteBackend(url)
        for call in (backend.name, lambda: list(backend.stream(MESSAGES))):
            with pytest.raises(UnavailableError, match=f"cannot reach {url}: .*refused"):
                call()
        backend.close()
    backend = RemoteBackend("http://local host:x")
    with pytest.raises(UnavailableError, match="cannot reach"):
        backend.name()
    backend.close()


def test_a_connection_that_breaks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        broke = pytest.raises(UnavailableError, match=f"the connection to {url} broke")
        with answering(listener, b""), closing(RemoteBackend(url)) as backend, broke:
            backend.name()
