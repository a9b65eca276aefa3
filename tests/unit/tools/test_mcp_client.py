"""Tools of MCP servers: real processes that the official package serves."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyctl.errors import ConfigError
from pyctl.tools import McpServer, ToolSettings, mcp_servers
from pyctl.tools.mcp_client import McpClient
from pyctl.tools.toolbox import ToolBox
from tests.waiting import until

CHILD = str(Path(__file__).with_name("mcp_child.py"))


def child(name: str = "child", **more: Any) -> McpServer:
    return McpServer(name, sys.executable, (CHILD,), **more)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolBox]:
    """One server that works, between one that is no program and one that says nothing."""
    where = str(tmp_path_factory.mktemp("cwd"))
    servers = (
        McpServer("missing", "no-such-program-anywhere"),
        child(env={"PLACE": "here"}, cwd=where, timeout_ms=20_000),
        McpServer("silent", "true"),
    )
    box = ToolBox(ToolSettings(mcp_config=servers, mcp_json=(child("missing"),)))
    box.start()
    box.wait()
    yield box
    box.close()


def said(box: ToolBox, tool: str, /, **params: Any) -> dict[str, Any]:
    return box.named(tool).run(params)


def test_tools_are_listed_under_the_name_of_their_server(box: ToolBox) -> None:
    shown = {tool.name: tool.for_client() for tool in box}
    assert list(shown) == [f"child_{name}" for name in ("greet", "fail", "sleep", "end", "pid")]
    greet = shown["child_greet"]
    assert (greet["type"], greet["permissions"], greet["uses_cwd"]) == ("mcp", {"write": False}, False)
    function = greet["definition"]["function"]
    assert (function["name"], function["description"]) == ("child_greet", "Greet someone.")
    assert function["parameters"]["required"] == ["name"]
    assert shown["child_fail"]["permissions"] == {"write": True}


def test_a_call_reaches_the_server_with_its_variables_and_directory(box: ToolBox) -> None:
    text = said(box, "child_greet", name="Ada")["plain_text_response"]
    assert text.startswith("Hello Ada, from here in ")
    assert "cwd" in text


def test_errors_are_results(box: ToolBox) -> None:
    assert "fail" in said(box, "child_fail")["error"]
    assert "name" in said(box, "child_greet")["error"]


def test_a_server_that_has_ended_is_started_again(box: ToolBox) -> None:
    before = said(box, "child_pid")
    assert said(box, "child_pid") == before
    assert said(box, "child_end")["error"]
    until(lambda: "plain_text_response" in said(box, "child_pid"))
    assert said(box, "child_pid") != before


def test_a_call_has_its_time_and_ends_with_the_client() -> None:
    client = McpClient([child(timeout_ms=300), child("patient")])
    client.start()
    assert {tool.server for tool in client.tools()} == {"child", "patient"}
    assert "took longer than 300 ms" in client.call("child", "sleep", {"seconds": 60}).result()["error"]
    running = client.call("patient", "sleep", {"seconds": 60})
    pid = client.call("patient", "pid", {})
    client.close()
    assert "shutting down" in running.result(20)["error"]
    assert "shutting down" in pid.result(20)["error"]
    assert "shutting down" in client.call("patient", "pid", {}).result()["error"]


def test_why_a_server_is_left_out_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pyctl"):
        client = McpClient(
            [
                McpServer("a", "no-such-program-anywhere"),
                McpServer("b", "sh", ("-c", "echo broken >&2")),
                McpServer("c", ""),
            ]
        )
        client.start()
        assert client.tools() == []
    text = "\n".join(caplog.messages)
    assert "MCP server a left out: " in text
    assert "cannot run no-such-program-anywhere: No such file or directory" in text
    assert ": broken" in text
    assert "MCP server c left out: it has no command" in text


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = "\n".join(
        (
            "import os, sys",
            "from pyctl.tools import McpServer",
            "from pyctl.tools.mcp_client import McpClient",
            f"client = McpClient([McpServer('child', sys.executable, ({CHILD!r},))])",
            "client.start()",
            "client.tools()",
            "print(client.call('child', 'pid', {}).result()['plain_text_response'], flush=True)",
            "client.call('child', 'sleep', {'seconds': 600})",
            "os.kill(os.getpid(), 9)",
        )
    )
    import subprocess

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    pid = int(done.stdout)
    until(lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("nonsense", "not JSON"),
        ("{}", "mcpServers"),
        ('{"mcpServers": {"a": 5}}', "not an object"),
        ('{"mcpServers": {"a": {"command": "x", "args": [1]}}}', "texts only"),
        ('{"mcpServers": {"a": {"command": "x", "timeout_ms": 0}}}', "whole number above 0"),
        ('{"mcpServers": {"a": {"command": ["x"]}}}', "'command' is not a text"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_said(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        mcp_servers(text)


def test_without_the_package_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyctl.tools.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        ToolSettings(mcp_config=mcp_servers(json.dumps({"mcpServers": {"a": {"command": "b"}}})))
