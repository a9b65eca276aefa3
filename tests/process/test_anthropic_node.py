"""Anthropic's SDK for Node.js in a session with threads, a prewarm and a diagnosis."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.conftest import Server
from tests.process.test_launched_clients import CLIENTS

SDK = CLIENTS / "node_modules" / "@anthropic-ai" / "sdk"
SCRIPT = Path(__file__).with_name("anthropic_session.mjs")
KEY = "secret"


@pytest.mark.skipif(
    shutil.which("node") is None or not SDK.is_dir(),
    reason="needs Node.js, and: npm install --prefix .venv/clients @anthropic-ai/sdk",
)
def test_a_session_of_the_sdk_for_node(start: Callable[..., Server]) -> None:
    """Its tool runner and its thread send each message once, ``max_tokens`` 0 answers nothing, and
    a changed message is named.
    """
    server = start("tiny-hybrid", "-c", "16384", "--alias", "tiny", "--api-key", KEY, is_f32=True)
    done = subprocess.run(
        ["node", str(SCRIPT), str(SDK), server.url, KEY],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "threads": [
            ["create", "user"],
            ["continue", "user"],
            ["create", "user"],
            ["continue", "user"],
            *[["", "user"]] * 3,
        ],
        "first_stop": "tool_use",
        "continued": True,
        "filled": [0, "max_tokens", 0],
        "diagnosed": [None, "messages_changed"],
    }
