"""A real agent, the command line of smolagents, works through many steps on a live server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pyctl.measure.server_process import clean_environment
from tests.process.conftest import Server

MAX_STEPS = 20
"""Where the agent gives up; a model of random weights never finishes by itself."""


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start("tiny-hybrid", "-c", "65536", "-ub", "512", "--temp", "0", "-n", "16")


def run_agent(server: Server, home: Path, *flags: str) -> str:
    """What the agent printed; the server is its only connection."""
    command = [sys.executable, "-m", "smolagents.cli", "Name three colours.", "--model-type", "OpenAIModel"]
    command += ["--model-id", "tiny", "--api-base", f"{server.url}/v1", "--api-key", "none", *flags]
    environment = {**clean_environment(), "HOME": str(home), "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, cwd=home)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def totals(server: Server) -> dict[str, Any]:
    found = httpx.get(f"{server.url}/cache").json()["totals"]
    assert isinstance(found, dict)
    return found


def test_each_step_evaluates_only_what_is_new(server: Server, tmp_path: Path) -> None:
    printed = run_agent(server, tmp_path, "--action-type", "code", "--tools")
    assert f"[Step {MAX_STEPS}" in printed
    assert "Error in generating model output" not in printed
    sums = totals(server)
    assert sums["requests"] == MAX_STEPS + 1
    # The last request is another conversation: the agent asks for a summary of its work.
    assert sum(sums["hits"].values()) >= MAX_STEPS - 1
    inputs = [int(number.replace(",", "")) for number in re.findall(r"Input tokens: ([\d,]+)", printed)]
    assert sums["prompt"] == inputs[-1]
    assert sums["evaluated"] < inputs[-1] / 5


def test_an_agent_that_calls_tools(server: Server, tmp_path: Path) -> None:
    printed = run_agent(server, tmp_path, "--action-type", "tool_calling", "--tools", "python_interpreter")
    assert "Error in generating model output" not in printed
    assert "Step 1" in printed
    assert totals(server)["requests"] >= 1
