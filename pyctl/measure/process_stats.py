"""Processes and files, by the kernel's accounting."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["evict", "resident_mib"]


def resident_mib(pid: int) -> float:
    """Return the MiB of RAM that a process holds, without pages of the model's file."""
    sizes = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name.startswith("Rss"):
            sizes[name] = int(value.split()[0])
    return (sizes["RssAnon"] + sizes["RssShmem"]) / 1024


def evict(files: Sequence[Path]) -> None:
    """Evict the files from the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
