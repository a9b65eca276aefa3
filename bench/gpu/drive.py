"""Files on a drive: out of the page cache, how much of them is in it, and how fast the drive itself reads them."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["cached_share", "direct_rate", "evict", "settle"]

BLOCK = 4 * 2**20
LIMIT = 4 * 2**30
"""Enough to know the drive's speed."""


def settle(directory: Path, quiet: float = 1.0, limit: float = 60.0) -> int:
    """Wait until the sizes of all files have not changed for ``quiet`` seconds; returns the bytes."""
    began = since = time.monotonic()
    before: dict[str, int] = {}
    while time.monotonic() - since < quiet and time.monotonic() - began < limit:
        now = {}
        for path in sorted(directory.rglob("*")):
            try:
                now[str(path)] = path.stat().st_size
            except FileNotFoundError:
                continue  # renamed while we looked
        if now != before:
            before, since = now, time.monotonic()
        time.sleep(0.1)
    return sum(before.values())


def evict(files: Sequence[Path]) -> None:
    """Take the files out of the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(files: Sequence[Path]) -> float:
    """Which share of the files' pages is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    cached = pages = 0
    for path in files:
        size = path.stat().st_size
        if not size:
            continue
        count = -(-size // mmap.PAGESIZE)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
            state = ctypes.create_string_buffer(count)
            if libc.mincore(address, size, state) == 0:
                cached += sum(byte & 1 for byte in state.raw[:count])
            pages += count
            libc.munmap(address, size)
        finally:
            os.close(descriptor)
    return cached / pages if pages else 0.0


def direct_rate(files: Sequence[Path], streams: int) -> float | None:
    """GB/s of reading the files in order past the page cache, ``streams`` blocks at a time; None if that is refused."""
    spans = []
    for path in sorted(files, key=lambda path: path.stat().st_size, reverse=True):
        size = path.stat().st_size // BLOCK * BLOCK
        spans += [(path, at) for at in range(0, size, BLOCK)]
    spans = spans[: LIMIT // BLOCK]
    if not spans:
        return None
    try:
        descriptors = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path, _ in spans}
    except OSError:
        return None
    buffers = [mmap.mmap(-1, BLOCK) for _ in range(streams)]

    def read(stream: int) -> int:
        return sum(os.preadv(descriptors[path], [buffers[stream]], at) for path, at in spans[stream::streams])

    try:
        with ThreadPoolExecutor(streams) as pool:
            began = time.perf_counter()
            total = sum(pool.map(read, range(streams)))
            return total / (time.perf_counter() - began) / 1e9
    except OSError:
        return None
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
        for buffer in buffers:
            buffer.close()
