"""SDKs for Node.js, which `make clients` installs, and scripts that use them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.clients.programs import CLIENTS

__all__ = ["OLDEST_NODE", "node_version", "run_session"]

OLDEST_NODE = 20
"""The oldest Node.js on which the SDKs and Qwen Code run; the package of OpenAI's asks for 22."""

SECONDS = 300
"""The maximum duration of a session, on a busy machine too."""


def node_version() -> int:
    """Return the major version of Node.js, 0 without one."""
    node = shutil.which("node")
    if node is None:
        return 0
    shown = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    return int(shown.removeprefix("v").partition(".")[0])


def run_session(script: str, package: str, *arguments: str) -> Any:
    """Run the ``script`` of this folder on the SDK ``package``, and return its one line of JSON.

    The test is skipped without Node.js or the package.
    """
    folder = CLIENTS / "node_modules" / package
    if not folder.is_dir():
        pytest.skip(f"{package} is not installed; make clients installs it, with npm")
    if node_version() < OLDEST_NODE:
        pytest.skip(f"{package} needs Node.js {OLDEST_NODE}")
    path = Path(__file__).with_name(script)
    done = subprocess.run(
        ["node", str(path), str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
