"""The speed of a disk, measured with one small file that is removed again."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyctl.limit import limit

__all__ = ["DiskSpeed", "disk_speed"]

FILE_BYTES = limit(2**26, "the file that `pyctl doctor` measures a disk with", "it is not larger", "disk", "bytes")

MOST_SECONDS = 2.0
"""Of writing, and of reading."""

BLOCK = 2**22


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second of writing with a flush at the end, and of reading past the page cache."""

    write: float
    read: float


def disk_speed(directory: Path, clock: Callable[[], float] = time.perf_counter) -> DiskSpeed:
    """Measure the disk of ``directory``, which exists. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix="pyctl-doctor-") as file:
        block, began, n_bytes = os.urandom(BLOCK), clock(), 0
        while n_bytes < FILE_BYTES and clock() - began < MOST_SECONDS:
            n_bytes += os.write(file.fileno(), block)
        os.fsync(file.fileno())
        write = n_bytes / max(clock() - began, 1e-9)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return DiskSpeed(write, _read_rate(Path(file.name), clock))


def _read_rate(path: Path, clock: Callable[[], float]) -> float:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # some file systems have no direct reads
        descriptor = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(-1, BLOCK) as buffer:  # direct reads go to whole pages
            began, n_bytes, n = clock(), 0, 1
            while n and clock() - began < MOST_SECONDS:
                n = os.preadv(descriptor, [buffer], n_bytes)
                n_bytes += n
            return n_bytes / max(clock() - began, 1e-9)
    finally:
        os.close(descriptor)
