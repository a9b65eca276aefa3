"""A server that runs tools for a model, built-in ones and those of an MCP server, in a loop of calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from tests.unit.tools import test_mcp_client

N_CALLS = 10


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    servers = {"mcpServers": {"child": {"command": sys.executable, "args": [test_mcp_client.CHILD]}}}
    flags = ("--tools", "get_info", "--mcp-servers-json", json.dumps(servers), "--no-kv-cache", "--temp", "0")
    with ServerProcess((*PYCTL_SERVE, "-t", "1", "-c", "8192", *flags), tmp_path_factory.mktemp("x") / "log") as server:
        yield server


def post(server: ServerProcess, path: str, body: Any) -> Any:
    answer = httpx.post(f"{server.url}/{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_loop_of_ten_calls_evaluates_each_token_once(server: ServerProcess) -> None:
    listed = httpx.get(f"{server.url}/tools", timeout=60).json()
    assert [tool["tool"] for tool in listed][:2] == ["get_info", "child_greet"]
    tools = [tool["definition"] for tool in listed if tool["tool"] in ("get_info", "child_pid")]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Where are we?"}]
    n_before, n_evaluated, n_lost = 0, 0, 0
    for turn in range(N_CALLS):
        name = ("get_info", "child_pid")[turn % 2]
        body = {
            "messages": messages,
            "tools": tools,
            "parallel_tool_calls": False,
            "reasoning_budget_tokens": 0,
            "tool_choice": {"type": "function", "function": {"name": name}},
            "thinking_budget_tokens": 8,  # without, what it thinks of a process id may have no end
        }
        reply = post(server, "v1/chat/completions", body)
        timings, message = reply["timings"], reply["choices"][0]["message"]
        # A reply's last token ends it: it was sampled and never evaluated.
        assert timings["cache_n"] >= n_before - 1
        n_lost += max(n_before - 1 - timings["cache_n"], 0)
        n_before = timings["cache_n"] + timings["prompt_n"] + timings["predicted_n"]
        n_evaluated += timings["prompt_n"] + timings["predicted_n"] - 1
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == name
        result = post(server, "tools", {"tool": name, "params": json.loads(call["function"]["arguments"])})
        content = result.get("plain_text_response") or json.dumps(result)
        assert str(Path.cwd()) in content or content.isdigit()
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": content}]
    # An idle engine may have evaluated the end of a reply before the next prompt came.
    assert n_lost == 0
    assert n_evaluated <= n_before - 1
