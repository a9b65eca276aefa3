"""The speed of a disk, measured with one small file that is removed again."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
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


def disk_speed(directory: Path) -> DiskSpeed:
    """Measure the disk of ``directory``, which exists. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix="pyctl-doctor-") as file:
        block, began, n_bytes = os.urandom(BLOCK), time.perf_counter(), 0
        while n_bytes < FILE_BYTES and time.perf_counter() - began < MOST_SECONDS:
            n_bytes += os.write(file.fileno(), block)
        os.fsync(file.fileno())
        write = n_bytes / max(time.perf_counter() - began, 1e-9)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return DiskSpeed(write, _read_rate(Path(file.name)))


def _read_rate(path: Path) -> float:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # some file systems have no direct reads
        descriptor = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(-1, BLOCK) as buffer:  # direct reads go to whole pages
            began, n_bytes, n = time.perf_counter(), 0, 1
            while n and time.perf_counter() - began < MOST_SECONDS:
                n = os.preadv(descriptor, [buffer], n_bytes)
                n_bytes += n
            return n_bytes / max(time.perf_counter() - began, 1e-9)
    finally:
        os.close(descriptor)
