"""The libraries in pyctl/lib, which are no modules of Python."""

from __future__ import annotations

from pathlib import Path

import pyctl

__all__ = ["package_library"]


def package_library(name: str) -> Path:
    """Return the file lib``name``.so of the package; it may be missing."""
    paths = [Path(place) / "lib" / f"lib{name}.so" for place in pyctl.__path__]
    # An editable pyctl has two places.
    return next((path for path in paths if path.exists()), paths[0])
