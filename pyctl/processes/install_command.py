"""The command that adds a package to the environment of this process."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

__all__ = ["install_command"]


def install_command(requirement: str, prefix: Path = Path(sys.prefix)) -> str:
    """Return the shell command that installs ``requirement`` into the environment at ``prefix``,
    this interpreter's.
    """
    quoted = shlex.quote(requirement)
    python = shlex.quote(sys.executable)
    if (prefix / "pipx_metadata.json").exists():
        return f"pipx inject {prefix.name} {quoted}"
    if (prefix / "uv-receipt.toml").exists():
        # Only here: every start of pyctl imports this module, and email and zipfile with that one.
        from importlib.metadata import PackageNotFoundError, distribution

        noted = {}
        with suppress(PackageNotFoundError, ValueError):  # a tree that nothing has installed
            noted = json.loads(distribution("pyctl-llama").read_text("direct_url.json") or "{}")
        source = (
            f"pyctl-llama @ {noted['url']}" if "url" in noted else "pyctl-llama"
        )  # PyPI's pyctl is another project
        return f"uv tool install --with {quoted} {shlex.quote(source)}"
    return (
        f"{python} -m pip install {quoted}"
        if find_spec("pip")
        else f"uv pip install --python {python} {quoted}"
    )
