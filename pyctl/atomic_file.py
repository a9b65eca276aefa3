"""Files that appear whole or not at all: written under a temp name, synced, renamed. Only their owner may read them.

The writer of a temp file holds a lock on it, which tells files that a killed process left from those that a living one
is writing, in whatever container that runs.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "ABANDONED_SECONDS",
    "PRIVATE",
    "is_abandoned",
    "make_private",
    "open_private",
    "replacing",
    "sync_directory",
    "temp_name",
    "temp_path",
    "temp_pid",
    "write_atomic",
]

ABANDONED_SECONDS = 600.0
"""Where there are no locks, a temp file not written to for so long is abandoned."""

PRIVATE = 0o600
"""The mode of files that may hold prompts: texts, tokens, rows and states."""

_TEMP = re.compile(r"\.(\d{1,10})-[0-9a-f]{16}\.tmp")


def temp_name() -> str:
    """A new name for a file of this process that is being written."""
    return f".{os.getpid()}-{secrets.token_hex(8)}.tmp"


def temp_pid(name: str) -> int | None:
    """The process that made the temp file ``name``; None if it is none."""
    found = _TEMP.fullmatch(name)
    return int(found[1]) if found else None


def make_private(directory: Path) -> None:
    """Make ``directory`` and what is missing above it, for its owner alone; what exists keeps its mode. OSError."""
    if directory.is_dir():
        return
    if directory.parent != directory:
        make_private(directory.parent)
    try:
        directory.mkdir(0o700)
    except FileExistsError:
        if not directory.is_dir():
            raise
    else:
        directory.chmod(0o700)  # a umask may have taken away even the owner's bits


def open_private(path: Path, flags: int) -> int:
    """`os.open`; a file that this makes is for its owner alone, whatever the umask. One that exists keeps its mode."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    os.fchmod(descriptor, PRIVATE)
    return descriptor


@contextmanager
def temp_path(directory: Path) -> Iterator[Path]:
    """A new file under a temp name in ``directory``, locked as long as the block runs; removed if it still has that
    name at the end. OSError if none can be made.
    """
    path, descriptor = _locked_temp(directory)
    try:
        yield path
    finally:
        _give_up(path, descriptor)


def _locked_temp(directory: Path) -> tuple[Path, int]:
    while True:
        path = directory / temp_name()
        descriptor = open_private(path, os.O_RDWR | os.O_EXCL)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process looks whether it is abandoned
            _give_up(path, descriptor)
            continue
        except OSError:
            return path, descriptor  # no locks there
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # another process took it for abandoned


def _give_up(path: Path, descriptor: int) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
    os.close(descriptor)


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A new file, open for writing, that takes the place of ``path`` when the block ends without an exception.

    Otherwise ``path`` stays as it was. Without ``sync`` a power failure may leave an empty file. OSError if it cannot
    be written; ValueError if ``path`` cannot be a name.
    """
    temporary, descriptor = _locked_temp(path.parent)
    try:
        with os.fdopen(os.dup(descriptor), "w+b") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        _give_up(temporary, descriptor)


def write_atomic(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write ``data`` to ``path``, which is the old file or the new one at any moment; OSError if it cannot be."""
    with replacing(path, sync=sync) as file:
        file.write(data)


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_abandoned(path: Path) -> bool:
    """Whether ``path`` is a temp file without a living writer."""
    if temp_pid(path.name) is None:
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks there
        return time.time() - os.fstat(descriptor).st_mtime > ABANDONED_SECONDS
    finally:
        os.close(descriptor)
    return True
