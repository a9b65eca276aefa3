"""Tools of MCP servers: real processes that the official package serves."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyctl.mcp import McpServer, ToolSettings
from pyctl.mcp.toolbox import ToolBox
from pyctl.terminal.conversation import Call
from pyctl.terminal.mcp_calls import OwnTools, ToolCalls
from tests.waiting import until

NAMES = ("greet", "fail", "sleep", "end", "pid", "say", "variables", "work", "place", "note")
CHILD = str(Path(__file__).with_name("mcp_child.py"))


def opened(*servers: McpServer) -> ToolBox:
    """Return the tools of ``servers``, which have listed them."""
    box = ToolBox(ToolSettings(servers))
    box.start()
    box.wait()
    return box


def child(name: str = "child", **more: Any) -> McpServer:
    return McpServer(name, sys.executable, (CHILD,), **more)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolBox]:
    """Yield a box with a server that works, between one that is no program and one that is
    silent.
    """
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
    return box.get(tool).run(params)


def test_tools_are_listed_under_the_name_of_their_server(box: ToolBox) -> None:
    shown = {tool.name: tool for tool in box}
    assert list(shown) == [f"child_{name}" for name in NAMES]
    assert shown["child_greet"].reads_only
    function = shown["child_greet"].definition()["function"]
    assert function["name"] == "child_greet"
    assert function["description"] == "Greet someone."
    assert function["parameters"]["required"] == ["name"]
    assert not shown["child_fail"].reads_only


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
    box = opened(child(timeout_ms=300), child("patient"))
    assert "took longer than 300 ms" in said(box, "child_sleep", seconds=60)["error"]
    running = box.get("patient_sleep").call({"seconds": 60})
    pid = box.get("patient_pid").call({})
    box.close()
    assert "shutting down" in running.result(20)["error"]
    assert "shutting down" in pid.result(20)["error"]
    assert "shutting down" in said(box, "patient_pid")["error"]


def test_why_a_server_is_left_out_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pyctl"):
        missing = McpServer("a", "no-such-program-anywhere")
        broken = McpServer("b", "sh", ("-c", "echo broken >&2"))
        assert list(opened(missing, broken, McpServer("c", ""))) == []
    text = "\n".join(caplog.messages)
    assert "MCP server a left out: " in text
    assert "cannot run no-such-program-anywhere: No such file or directory" in text
    assert ": broken" in text
    assert "MCP server c left out: it has no command" in text


def working(path: Path) -> list[int]:
    """Return the numbers of the processes that tool `work` has started, and of its server, when all
    are there.
    """
    until(lambda: path.exists() and len(path.read_text().split()) == 3)
    return [int(text) for text in path.read_text().split()]


def are_gone(pids: list[int]) -> bool:
    """Return whether all processes have ended."""
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return False
    return True


@pytest.mark.parametrize("end", ["stopped", "time", "closed", "killed"])
def test_a_call_ends_with_all_that_it_has_started(tmp_path: Path, end: str) -> None:
    """Also what has left its session, whether the user stops it, its time is over, or the server
    ends or is killed.
    """
    script = "\n".join(
        (
            "import os, sys",
            "from pathlib import Path",
            (
                "from tests.unit.mcp.test_mcp_client import are_gone, child, opened, said, "
                "until, "
                "working"
            ),
            "box = opened(child(timeout_ms=60_000))",
            "said(box, 'child_pid')",
            f"if {end == 'time'}: box._connections[0]._server = child(timeout_ms=2_000)",
            f"path = Path({str(tmp_path / 'pids')!r})",
            "call = box.get('child_work').call({'path': str(path)})",
            "pids = working(path)",
            {
                "stopped": "call.cancel()",
                "time": "assert 'took longer than' in call.result()['error']",
                "closed": "box.close(); os._exit(0)",
                "killed": "os.kill(os.getpid(), 9)",
            }[end],
            "until(lambda: are_gone(pids))",
            "box.close()",
        )
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == (-9 if end == "killed" else 0)
    assert done.stderr == ""
    until(lambda: are_gone(working(tmp_path / "pids")))


def test_a_stopped_call_hurts_no_other_of_the_same_server(tmp_path: Path) -> None:
    box = opened(child())
    other = box.get("child_sleep").call({"seconds": 2})
    pid = said(box, "child_pid")
    stopped = box.get("child_work").call({"path": str(tmp_path / "pids")})
    pids = working(tmp_path / "pids")
    stopped.cancel()
    until(lambda: said(box, "child_pid") != pid)
    assert other.result() == {"plain_text_response": "awake"}
    until(lambda: are_gone(pids))
    box.close()


SECRETS = ("LLAMA_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD", "https_proxy")


def test_no_secret_reaches_a_server_unless_its_configuration_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "http://ada:s3cret@proxy")
    monkeypatch.setenv("http_proxy", "http://proxy")
    box = opened(child(env={"HF_TOKEN": "given"}))
    found = json.loads(said(box, "child_variables")["plain_text_response"])
    box.close()
    assert "s3cret" not in str(found)
    assert {name: found[name] for name in ("HF_TOKEN", "http_proxy", "PATH", "HOME")} == {
        "HF_TOKEN": "given",
        "http_proxy": "http://proxy",
        "PATH": os.environ["PATH"],
        "HOME": os.environ["HOME"],
    }


DEEP = '{"name": ' + '{"a":' * 254 + "1" + "}" * 255
"""Deeper than what the package can write as JSON."""


@pytest.mark.parametrize(
    "arguments",
    [
        '{"name": "\\ud83d"}',
        '{"name": {"\\u0000": "\\u0000"}}',
        '{"name": 5, "cwd": 5, "as_base64": true}',
        '{"name": NaN}',
        DEEP,
    ],
)
def test_odd_arguments_are_a_result_and_end_nothing(box: ToolBox, arguments: str) -> None:
    before = said(box, "child_pid")
    calls = ToolCalls(OwnTools(box), lambda question: "o")
    assert calls.result(Call("id", "child_greet", arguments)).startswith('{"error": ')
    assert said(box, "child_pid") == before


def test_results_are_bounded(box: ToolBox) -> None:
    assert (
        said(box, "child_say", size=300_000)["plain_text_response"]
        == "x" * (256 << 10) + "\n[output truncated]"
    )
    assert said(box, "child_say", size=17 << 20)["error"]
    assert said(box, "child_pid")["plain_text_response"]


def test_output_that_is_no_message_ends_nothing_and_shows_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    box = opened(McpServer("child", "sh", ("-c", f"echo garbage; exec {sys.executable} {CHILD}")))
    assert said(box, "child_pid")["plain_text_response"]
    box.close()
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_key_that_interrupts_a_call_ends_it(box: ToolBox) -> None:
    class Interrupted(Future[dict[str, Any]]):
        def result(self, timeout: float | None = None) -> dict[str, Any]:
            raise KeyboardInterrupt

    call = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        replace(box.get("child_pid"), call=lambda arguments: call).run({})
    assert call.cancelled()
