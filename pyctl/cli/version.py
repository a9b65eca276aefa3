"""The versions of what runs here."""

from __future__ import annotations

from pyctl import version_line
from pyctl.errors import PyctlError

__all__ = ["print_version"]


def print_version() -> None:
    """Print the releases of pyctl and llama.cpp's bindings, and a line for each native module that is missing."""
    print(version_line())
    try:
        from pyctl.llama.extension import losses
    except (ImportError, PyctlError) as error:
        print(f"llama.cpp's libraries cannot be loaded: {error}")
    else:
        for line in losses():
            print(line)
