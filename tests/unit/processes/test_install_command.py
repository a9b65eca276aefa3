"""The command that adds a package to an environment of pip, pipx or uv."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pyctl.processes.install_command import install_command

PIP = (
    [sys.executable, "-m", "pip", "install"]
    if find_spec("pip")
    else ["uv", "pip", "install", "--python"]
)


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("pipx_metadata.json", ["pipx", "inject", "env", "mcp>=2,<3"]),
        (
            "uv-receipt.toml",
            [
                "uv",
                "tool",
                "install",
                "--with",
                "mcp>=2,<3",
                "pyctl-llama @ file:///home/a%20b/pyctl",
            ],
        ),
        ("pyvenv.cfg", [*PIP, *([] if find_spec("pip") else [sys.executable]), "mcp>=2,<3"]),
    ],
)
def test_it_is_that_of_the_tool_that_made_the_environment(
    file: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = tmp_path / "pyctl_llama-9.dist-info"
    noted.mkdir()
    (noted / "METADATA").write_text("Metadata-Version: 2.1\nName: pyctl-llama\nVersion: 9\n")
    (noted / "direct_url.json").write_text(json.dumps({"url": "file:///home/a%20b/pyctl"}))
    monkeypatch.syspath_prepend(str(tmp_path))
    (prefix := tmp_path / "env").mkdir()
    (prefix / file).touch()
    assert shlex.split(install_command("mcp>=2,<3", prefix)) == command


def test_a_tree_that_is_not_installed_names_the_package(tmp_path: Path) -> None:
    """A tree without the metadata of pyctl, in an environment of uv, names the package."""
    (tmp_path / "uv-receipt.toml").touch()
    code = (
        "import importlib.metadata as m\n"
        "def missing(name): raise m.PackageNotFoundError(name)\n"
        "m.distribution = missing\n"
        "import sys, pathlib; from pyctl.processes.install_command import install_command\n"
        "print(install_command('mcp', pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "uv tool install --with mcp pyctl-llama\n"
