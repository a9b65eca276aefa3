"""GET and POST /tools: who may use them, what they answer, and how the page learns of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyctl.cli.arguments import parse_serve
from pyctl.errors import ConfigError
from pyctl.server import Cors, ServerSettings
from pyctl.server.app import create_app
from pyctl.server.models import Models
from pyctl.server.service import Shared
from pyctl.tools import ToolSettings
from pyctl.tools.toolbox import ToolBox
from tests.unit.server.fake import Bench, Client, events, play

NAMES = ("read_file", "exec_shell_command", "get_info")


def client(settings: ServerSettings | None = None, names: tuple[str, ...] = NAMES) -> Client:
    """A server that runs tools; its cross-origin rule is that of the command line with them."""
    settings = settings or ServerSettings(cors=Cors("localhost"))
    bench, box = Bench(play("x"), settings=settings), ToolBox(ToolSettings(names))
    box.start()
    shared = Shared(settings, tools=box)
    return Client(create_app(Models.of(replace(bench.service, shared=shared))))


def call(server: Client, tool: str, headers: dict[str, str] | None = None, **params: Any) -> Any:
    return server.post("/tools", json={"tool": tool, "params": params}, headers=headers or {})


def test_without_tools_both_are_disabled() -> None:
    server = client(names=())
    for answer in (server.get("/tools"), call(server, "get_info")):
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "feature_disabled")
    assert "tools" not in server.get("/props").json()


def test_tools_are_listed_and_called(tmp_path: Path) -> None:
    server = client()
    assert [tool["tool"] for tool in server.get("/tools").json()] == list(NAMES)
    assert server.get("/props").json()["tools"] is True
    (tmp_path / "f").write_text("text\n")
    within = {"x-tool-cwd": str(tmp_path)}
    assert call(server, "read_file", within, path="f", cwd="/").json() == {"plain_text_response": "text\n"}
    assert call(server, "read_file", {**within, "x-resp-type": "base64"}, path="f").json()["size_bytes"] == 5
    assert "base64" not in call(server, "read_file", within, path="f", as_base64=True).json()
    assert "error" in call(server, "read_file", path="/none").json()


def test_a_stream_has_the_output_and_an_end() -> None:
    body = {"tool": "exec_shell_command", "params": {"command": "echo hello"}, "stream": True}
    found = events(client().post("/tools", json=body).content)
    assert found[-1] == {"done": True}
    assert "".join(event["chunk"] for event in found[:-1]) == "hello\n\n[exit code: 0]"
    assert client().post("/tools", json={"tool": "get_info", "stream": True}).status_code == 404
    wrong = {**body, "params": {}}
    assert events(client().post("/tools", json=wrong).content) == [
        {"done": True, "error": "parameter 'command' is missing"}
    ]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"tool": "write_file", "params": {"path": "/tmp/x", "content": ""}}, 404),
        ({"tool": "none"}, 404),
        ({"tool": 5}, 400),
        ({"tool": "read_file", "params": []}, 200),  # no parameters, and so no path: see below
        ({"tool": "read_file", "params": [1]}, 400),
        ({"tool": "read_file", "params": {"path": 5}}, 400),
    ],
)
def test_wrong_calls(body: dict[str, Any], status: int) -> None:
    answer = client().post("/tools", json=body)
    assert answer.status_code == (400 if status == 200 else status)
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("runtime", ["fake:x", "ssh:-oProxyCommand=x", "docker-container:--privileged", "ssh"])
def test_another_runtime_never_falls_back_to_this_machine(runtime: str) -> None:
    answer = call(client(), "exec_shell_command", {"x-tool-runtime": runtime}, command="echo hello")
    assert answer.status_code == 500
    assert "tools run on the machine of this server only" in answer.json()["error"]["message"]
    with pytest.raises(ConfigError, match="--tools-runtime is not supported"):
        parse_serve(["--tools-runtime", runtime], {})


OTHERS = ("http://evil.example", "http://localhost:3000", "null", "http://server.evil.example")


@pytest.mark.parametrize("origin", OTHERS)
@pytest.mark.parametrize("origins", ["localhost", "*"])
def test_pages_of_other_origins_have_no_tools(origin: str, origins: str) -> None:
    server = client(ServerSettings(cors=Cors(origins)))
    for answer in (
        server.get("/tools", headers={"origin": origin}),
        call(server, "get_info", {"origin": origin}),
    ):
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
    assert call(server, "get_info", {"origin": "http://server"}).status_code == 200
    named = client(ServerSettings(cors=Cors(f"{origin},http://other")))
    assert call(named, "get_info", {"origin": origin}).status_code == 200


def test_a_page_whose_name_may_be_rebound_and_a_client_without_the_key_have_none() -> None:
    rebound = {"host": "evil.example", "origin": "http://evil.example"}
    assert call(client(), "get_info", rebound).status_code == 403
    keyed = client(ServerSettings(api_keys=("k",), cors=Cors("localhost")))
    assert keyed.get("/tools").status_code == call(keyed, "get_info").status_code == 401
    assert call(keyed, "get_info", {"authorization": "Bearer k"}).status_code == 200


@pytest.mark.parametrize(
    "argv",
    [
        ["--tools", "get_info"],
        ["--agent"],
        ["--mcp-servers-json", json.dumps({"mcpServers": {"a": {"command": "b"}}})],
    ],
)
def test_tools_limit_the_origins_that_may_send_requests(argv: list[str]) -> None:
    assert parse_serve(argv, {}).server.cors.origins == "localhost"
    assert parse_serve([*argv, "--cors-origins", "*"], {}).server.cors.origins == "*"
    assert parse_serve([], {}).server.cors.origins == "*"
    assert not parse_serve(["--agent", "--no-agent"], {}).tools.is_wanted
