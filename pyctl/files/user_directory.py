"""The user's directories for files of pyctl, by the XDG Base Directory standard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

__all__ = ["user_directory"]

_BELOW_HOME = {"cache": ".cache", "data": ".local/share", "state": ".local/state"}


def user_directory(kind: Literal["cache", "data", "state"], environ: Mapping[str, str]) -> Path:
    """Return a directory of the user, such as ``~/.cache/pyctl``. Raises RuntimeError if the user
    has no home directory.
    """
    base = Path(environ.get(f"XDG_{kind.upper()}_HOME", ""))
    if not base.is_absolute():  # the standard ignores such a value
        home = environ.get("HOME", "")
        base = (Path(home) if home else Path.home()) / _BELOW_HOME[kind]
    return base / "pyctl"
