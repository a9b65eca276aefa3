"""The tools of several servers under one roof."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest

from pyctl.mcp import McpServer, ToolSettings
from pyctl.mcp.mcp_client import McpTool
from pyctl.mcp.toolbox import ToolBox


def test_the_end_does_not_wait_for_a_server_that_never_lists_its_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pyctl.mcp.mcp_client._LIST_SECONDS", 3600)
    box = ToolBox(ToolSettings((McpServer("mute", "sleep", ("3600",)),)))
    box.start()
    Timer(0.1, box.close).start()
    box.wait()


def test_nobody_waits_for_a_server_that_never_lists_its_tools() -> None:
    box = ToolBox(ToolSettings((McpServer("mute", "sleep", ("3600",)),)))
    box.start()
    box.wait(0.0)
    assert list(box) == []
    box.close()


def test_tools_that_come_late_are_added() -> None:
    late = Future[list[McpTool]]()
    soon = Future[list[McpTool]]()
    known: Any = SimpleNamespace(name="known")
    soon.set_result([known])
    box = ToolBox(_found=[late, soon])
    box.wait(0.0)
    assert list(box) == [known]
    first: Any = SimpleNamespace(name="known")
    late.set_result([first])
    assert list(box) == [first], "of the server that is named first"
