"""Atomic file writes: write a temp file, sync it, rename it. New files have mode 0600, new
directories 0700.

The writer holds a lock on its temp file. The lock shows whether the writer still runs, in any
container.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "CALLS",
    "PRIVATE",
    "FileCalls",
    "files_in",
    "has_locks",
    "inode",
    "is_abandoned",
    "make_private",
    "open_private",
    "open_regular",
    "read_regular",
    "replacing",
    "sync_directory",
    "temp_name",
    "temp_path",
    "temp_pid",
    "write_atomic",
]

PRIVATE = 0o600
"""Mode of files that may hold prompts: text, tokens, rows and states."""


@dataclass(frozen=True)
class FileCalls:
    """The calls of the operating system that an atomic write consists of.

    Attributes:
        flock: Locks an open file, as `fcntl.flock` does.
        fsync: Waits until an open file is durable.
        replace: Renames a file over another one.
    """

    flock: Callable[[int, int], None] = fcntl.flock
    fsync: Callable[[int], None] = os.fsync
    replace: Callable[[Path, Path], None] = os.replace


CALLS = FileCalls()
"""The calls of this system."""

_TEMP = re.compile(r"\.(\d{1,10})-[0-9a-f]{16}\.tmp")


def temp_name() -> str:
    """Return a new name for a temp file of this process."""
    import secrets  # only now: OpenSSL comes with it, and most commands write no file

    return f".{os.getpid()}-{secrets.token_hex(8)}.tmp"


def temp_pid(name: str) -> int | None:
    """Return the id of the process that created the temp file ``name``; None if ``name`` is not a
    temp name.
    """
    match = _TEMP.fullmatch(name)
    return int(match[1]) if match else None


def make_private(directory: Path) -> None:
    """Create ``directory`` and missing parents with mode 0700. Existing ones keep their mode.
    Raises OSError.
    """
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
        directory.chmod(0o700)  # the umask may have cleared even the owner's bits


def open_private(path: Path, flags: int) -> int:
    """Open as `os.open` does, but create files with mode 0600, for any umask. Existing files keep
    their mode.
    """
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
    except FileExistsError:
        if flags & os.O_EXCL:
            raise
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, PRIVATE)
    try:
        os.fchmod(descriptor, PRIVATE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, a new one as `open_private` does. Raises OSError for links, and for
    pipes and devices, on which a read may wait for ever.
    """
    flags |= os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = open_private(path, flags) if flags & os.O_CREAT else os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_regular(path: Path, n_bytes: int = -1) -> bytes:
    """Return all of a regular file, or its first ``n_bytes``. Raises OSError."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read(n_bytes)


def files_in(directory: Path) -> list[Path]:
    """Return all entries of ``directory``, sorted; none if it cannot be read or is a link, which
    may lead to others' files.
    """
    try:
        return [] if directory.is_symlink() else sorted(directory.iterdir())
    except OSError:
        return []


@contextmanager
def temp_path(directory: Path, calls: FileCalls = CALLS) -> Iterator[Path]:
    """Create a locked temp file in ``directory`` for the time of the block, then remove it unless
    it was renamed.

    Raises OSError.
    """
    path, descriptor = _locked_temp(directory, calls)
    try:
        yield path
    finally:
        _discard(path, descriptor)


def _locked_temp(directory: Path, calls: FileCalls) -> tuple[Path, int]:
    while True:
        path = directory / temp_name()
        descriptor = open_private(path, os.O_RDWR | os.O_EXCL)
        try:
            calls.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process checks whether the file is abandoned
            _discard(path, descriptor)
            continue
        except OSError:
            return path, descriptor  # the file system has no locks
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # another process removed it as abandoned


def _discard(path: Path, descriptor: int) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
    os.close(descriptor)


@contextmanager
def replacing(path: Path, *, sync: bool = True, calls: FileCalls = CALLS) -> Iterator[BinaryIO]:
    """Open a new file for writing that replaces ``path`` if the block ends without an exception.

    Otherwise ``path`` keeps its content. Without ``sync``, a power failure may leave an empty file.
    Raises OSError if the write fails, ValueError if ``path`` is not a valid name.
    """
    temporary, descriptor = _locked_temp(path.parent, calls)
    try:
        with os.fdopen(os.dup(descriptor), "w+b") as file:
            yield file
            file.flush()
            if sync:
                calls.fsync(file.fileno())
        calls.replace(temporary, path)
    finally:
        _discard(temporary, descriptor)


def has_locks(directory: Path) -> bool:
    """Return whether the file system of ``directory`` has both flock and POSIX locks; True if that
    is unknown.
    """
    with suppress(OSError), temp_path(directory) as path, path.open("r+b") as file:
        for lock in (fcntl.flock, fcntl.lockf):
            try:
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # the temp file is locked, as it should be
                continue
            except OSError:
                return False
    return True


def write_atomic(path: Path, data: bytes, *, sync: bool = True, calls: FileCalls = CALLS) -> None:
    """Write ``data`` to ``path`` atomically: readers see the old file or the new one. Raises
    OSError.
    """
    with replacing(path, sync=sync, calls=calls) as file:
        file.write(data)


def sync_directory(directory: Path) -> None:
    """Sync the entries of ``directory``, so that they survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def inode(path: Path) -> int:
    """Return the number of the file at ``path``, which another file in its place does not have; 0
    without one.
    """
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def is_abandoned(path: Path, *, remove: bool = False, calls: FileCalls = CALLS) -> bool:
    """Return whether ``path`` is a temp file whose writer no longer runs.

    With ``remove`` such a file is removed while it is locked: one that was only just created has no
    lock yet, and its writer would take it between the check and the removal.
    """
    if temp_pid(path.name) is None:
        return False
    try:
        descriptor = open_regular(path)
    except OSError:
        return False
    try:
        try:
            calls.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # of its writer, or the file system has no locks, if no cache is
            return False
        if remove:
            with suppress(OSError):
                path.unlink()
    finally:
        os.close(descriptor)
    return True
