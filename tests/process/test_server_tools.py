"""A server that runs tools of an MCP server for a model: a loop of calls, and how calls end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from pyctl.measure.server_process import PYCTL_SERVE, ServerProcess
from tests.client import Client, ServerClient
from tests.unit.mcp import test_mcp_client
from tests.unit.mcp.test_mcp_client import are_gone, working
from tests.waiting import until

N_CALLS = 10
SECRET = "5ecret"
HEADERS = {"authorization": f"Bearer {SECRET}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    servers = {
        "mcpServers": {"child": {"command": sys.executable, "args": [test_mcp_client.CHILD]}}
    }
    flags = ("--mcp-servers-json", json.dumps(servers), "--no-kv-cache", "--temp", "0")
    log = tmp_path_factory.mktemp("x") / "log"
    secrets = {"LLAMA_API_KEY": SECRET, "HF_TOKEN": SECRET}
    with ServerProcess(
        (*PYCTL_SERVE, "-t", "1", "-c", "8192", *flags), log, environment=secrets
    ) as server:
        # It serves before the child has listed its tools.
        until(lambda: client_of(server).get_json("/tools"))
        yield server


def client_of(server: ServerProcess) -> ServerClient:
    return Client.to_server(server.url, headers=HEADERS)


def test_a_loop_of_ten_calls_evaluates_each_token_once(server: ServerProcess) -> None:
    """Through ten calls and results no token of the conversation is evaluated twice: an agent's
    loop costs its length, not the square of it.
    """
    client = client_of(server)
    listed = client.get_json("/tools")
    tools = [tool["definition"] for tool in listed if tool["tool"] in ("child_place", "child_pid")]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Where are we?"}]
    n_before = 0
    n_evaluated = 0
    n_lost = 0
    for turn in range(N_CALLS):
        name = ("child_place", "child_pid")[turn % 2]
        reply = client.chat(
            messages,
            tools=tools,
            parallel_tool_calls=False,
            reasoning_budget_tokens=0,
            tool_choice={"type": "function", "function": {"name": name}},
            thinking_budget_tokens=8,  # else its thoughts on a process id may have no end
        )
        timings = reply.timings
        message = reply.body["choices"][0]["message"]
        # A reply's last token ends it: it was sampled and never evaluated.
        assert timings["cache_n"] >= n_before - 1
        n_lost += max(n_before - 1 - timings["cache_n"], 0)
        n_before = timings["cache_n"] + timings["prompt_n"] + timings["predicted_n"]
        n_evaluated += timings["prompt_n"] + timings["predicted_n"] - 1
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == name
        arguments = json.loads(call["function"]["arguments"])
        result = client.post_json("/tools", {"tool": name, "params": arguments})
        content = result.get("plain_text_response") or json.dumps(result)
        assert str(Path.cwd()) in content or content.isdigit()
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": content}]
    # An idle engine may have evaluated the end of a reply before the next prompt came.
    assert n_lost == 0
    assert n_evaluated <= n_before - 1


def test_a_call_ends_with_its_client_and_with_the_server(
    server: ServerProcess, tmp_path: Path
) -> None:
    """A call and every process that it started end with its client and with the server; the server
    of the tools gets no secret of this one.
    """
    client = client_of(server)
    found = client.post_json("/tools", {"tool": "child_variables"})["plain_text_response"]
    assert SECRET not in str(json.loads(found))
    for end in ("client", "server"):
        connection = HTTPConnection("127.0.0.1", server.port)
        path = tmp_path / end
        body = {"tool": "child_work", "params": {"path": str(path)}}
        connection.request(
            "POST", "/tools", json.dumps(body), {"content-type": "application/json", **HEADERS}
        )
        pids = working(path)
        if end == "client":
            connection.close()  # as the page does when it is stopped
        else:
            server.stop()
        until(partial(are_gone, pids))
        connection.close()
