"""The free space of a disk."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["free_at"]


def free_at(directory: Path) -> int:
    """Return the free bytes of the disk of ``directory``. Raises OSError if it does not exist."""
    return shutil.disk_usage(directory).free
