"""The command that adds a package to the environment of this process."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

__all__ = ["install_command"]


def install_command(requirement: str, prefix: Path = Path(sys.prefix)) -> str:
    """The shell command that installs ``requirement`` into the environment at ``prefix``, that of this interpreter.

    It never names pyctl as a package: the one of that name on PyPI is another project.
    """
    wanted = shlex.quote(requirement)
    if (prefix / "pipx_metadata.json").exists():
        return f"pipx inject {prefix.name} {wanted}"
    if (prefix / "uv-receipt.toml").exists() and (source := _source()):
        return f"uv tool install --with {wanted} {shlex.quote(source)}"
    python = shlex.quote(sys.executable)
    return f"{python} -m pip install {wanted}" if find_spec("pip") else f"uv pip install --python {python} {wanted}"


def _source() -> str:
    """Where this package was installed from, as pip and uv note it; empty if unknown."""
    try:
        noted = json.loads(distribution("pyctl").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return ""
    return unquote(str(noted.get("url", ""))).removeprefix("file://")
