"""GET and POST /tools: who may use them, what they answer, and how the page learns of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pyctl.cli.arguments import parse_chat, parse_serve
from pyctl.errors import ConfigError
from pyctl.mcp import McpServer, ToolSettings
from pyctl.mcp.mcp_client import McpTool
from pyctl.mcp.toolbox import ToolBox
from pyctl.server.app import create_app
from pyctl.server.app_state import AppState
from pyctl.server.models import Models
from pyctl.server.server_settings import Cors, ServerSettings
from tests.case import Case
from tests.client import Client
from tests.unit.server.fake import Bench, play
from tests.unit.server.parts import Caller, in_loop

SERVER = McpServer("own", "none")


class FakeClient:
    """Answers calls of two tools; one of them waits until it is cancelled."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Mapping[str, Any], Future[dict[str, Any]]]] = []

    def call(self, tool: str, arguments: Mapping[str, Any]) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        self.calls.append((tool, arguments, future))
        if tool == "look":
            future.set_result({"plain_text_response": "seen"})
        return future


def bench_with(
    fake: FakeClient,
    settings: ServerSettings | None = None,
    servers: tuple[McpServer, ...] = (SERVER,),
) -> Bench:
    """Return a server with tools; its cross-origin rule is that of the command line with them."""
    settings = settings or ServerSettings(cors=Cors("localhost"))
    bench = Bench(play("x"), settings=settings)
    tools = {
        f"own_{name}": McpTool(
            f"own_{name}",
            f"To {name}.",
            {"type": "object"},
            name == "look",
            partial(fake.call, name),
        )
        for name in ("look", "wait")
    }
    box = ToolBox(ToolSettings(servers), tools)
    bench.app = create_app(
        Models.from_service(replace(bench.service, shared=AppState(settings, tools=box)))
    )
    return bench


def client(
    settings: ServerSettings | None = None, servers: tuple[McpServer, ...] = (SERVER,)
) -> Client:
    return Client.to_app(bench_with(FakeClient(), settings, servers).app)


def call(server: Client, tool: str, headers: dict[str, str] | None = None, **params: Any) -> Any:
    return server.post("/tools", json={"tool": tool, "params": params}, headers=headers or {})


def test_without_tools_both_are_disabled() -> None:
    server = client(servers=())
    for answer in (server.get("/tools"), call(server, "own_look")):
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "feature_disabled"
    assert "tools" not in server.get("/props").json()


def test_tools_are_listed_and_called_without_builtin_headers() -> None:
    fake = FakeClient()
    server = Client.to_app(bench_with(fake).app)
    looks, waits = server.get("/tools").json()
    assert looks["tool"] == "own_look"
    assert looks["type"] == "mcp"
    assert looks["permissions"] == {"write": False}
    assert waits["tool"] == "own_wait"
    assert waits["permissions"] == {"write": True}
    assert waits["uses_cwd"] is False
    assert server.get("/props").json()["tools"] is True
    headers = {"x-tool-runtime": "ssh:x", "x-tool-cwd": "/", "x-resp-type": "base64"}
    assert call(server, "own_look", headers, cwd=5).json() == {"plain_text_response": "seen"}
    assert fake.calls[0][:2] == ("look", {"cwd": 5})


@pytest.mark.parametrize(
    "case",
    [
        Case("/tools", {"tool": "own_none"}, 404, ""),
        Case("/tools", b'{"tool": "\\ud83d"}', 404, ""),
        Case("/tools", {"tool": 5}, 400, ""),
        Case("/tools", {"tool": "own_look", "params": [1]}, 400, ""),
        Case("/tools", {"tool": "own_look", "stream": True}, 404, ""),
    ],
    ids=str,
)
def test_wrong_calls(case: Case) -> None:
    assert case.check(client())


@in_loop
async def test_a_call_ends_when_its_client_leaves_and_too_many_are_refused() -> None:
    """At most 64 calls run at once and one more is refused. A client that leaves cancels its call,
    which makes room.
    """
    fake = FakeClient()
    bench = bench_with(fake)
    body = {"tool": "own_wait"}
    callers = [Caller(bench.app, "/tools", body) for _ in range(64)]
    calls = [asyncio.ensure_future(each.call()) for each in callers]
    await callers[0].until(lambda: len(fake.calls) == 64)
    late = Caller(bench.app, "/tools", body)
    await late.call()
    assert late.sent[0]["status"] == 503
    for each in callers[1:]:
        each.gone.set()
    await asyncio.wait(calls[1:])
    assert [future.cancelled() for _, _, future in fake.calls] == [False, *[True] * 63]
    fake.calls[0][2].set_result({"error": "late"})
    await calls[0]
    assert callers[0].bodies == [b'{"error":"late"}']
    last = Caller(bench.app, "/tools", {"tool": "own_look"})
    await last.call()
    assert last.sent[0]["status"] == 200


OTHERS = ("http://evil.example", "http://localhost:3000", "null", "http://server.evil.example")


@pytest.mark.parametrize("origin", OTHERS)
@pytest.mark.parametrize("origins", ["localhost", "*"])
def test_pages_of_other_origins_have_no_tools(origin: str, origins: str) -> None:
    server = client(ServerSettings(cors=Cors(origins)))
    for answer in (
        server.get("/tools", headers={"origin": origin}),
        call(server, "own_look", {"origin": origin}),
    ):
        assert answer.status_code == 403
        assert answer.json()["error"]["type"] == "permission_error"
    assert call(server, "own_look", {"origin": "http://server"}).status_code == 200
    named = client(ServerSettings(cors=Cors(f"{origin},http://other")))
    assert call(named, "own_look", {"origin": origin}).status_code == 200


def test_rebound_page_and_client_without_key_get_no_texts() -> None:
    rebound = {"host": "evil.example", "origin": "http://evil.example"}
    assert call(client(), "own_look", rebound).status_code == 403
    keyed = client(ServerSettings(api_keys=("k",), cors=Cors("localhost")))
    assert keyed.get("/tools").status_code == call(keyed, "own_look").status_code == 401
    assert call(keyed, "own_look", {"authorization": "Bearer k"}).status_code == 200


def test_tools_limit_the_origins_that_may_send_requests() -> None:
    argv = ["--mcp-servers-json", json.dumps({"mcpServers": {"a": {"command": "b"}}})]
    assert parse_serve(argv, {}).server.cors.origins == "localhost"
    assert parse_serve([*argv, "--cors-origins", "*"], {}).server.cors.origins == "*"
    assert parse_serve(["--no-agent"], {"LLAMA_ARG_AGENT": "off"}).server.cors.origins == "*"


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        *(
            (argv, {})
            for argv in (["--tools", "all"], ["--tools-runtime", "ssh:x"], ["-ag"], ["--agent"])
        ),
        *(
            ([], environ)
            for environ in ({"LLAMA_ARG_TOOLS": "read_file"}, {"LLAMA_ARG_AGENT": "1"})
        ),
    ],
)
@pytest.mark.parametrize("parse", [parse_serve, parse_chat])
def test_built_in_tools_are_refused_with_what_to_use_instead(
    parse: Any, argv: list[str], environ: Any
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^[-A-Z_a-z]+ is not supported: .*--mcp-servers-config.*server-filesystem",
    ):
        parse(argv, environ)
