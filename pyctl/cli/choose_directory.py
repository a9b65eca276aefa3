"""The choice of the directory of the disk cache, with a default that depends on the machine.

docs/internals/decisions/006-defaults.md has the reasons for the formulas.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from pyctl.cache.cache_settings import DiskSettings
from pyctl.cli.arguments import CommandSettings
from pyctl.disk.directory import CacheDirectory
from pyctl.disk.remote_store import connect
from pyctl.errors import ConfigError
from pyctl.files.atomic_file import temp_path
from pyctl.files.free_space import free_at

__all__ = ["is_full", "log_cache_dir", "with_directory"]

log = logging.getLogger("pyctl")

MIB = 2**20

MIN_DISK = 2**30
"""A smaller cache holds too few snapshots of a large model to be of use."""


def with_directory(
    settings: CommandSettings,
    open_directory: Callable[[Path], CacheDirectory] = CacheDirectory,
    free_bytes: Callable[[Path], int] = free_at,
) -> CommandSettings:
    """Create and try the directory of the disk cache, and set its budget; use none if the default
    cannot be used, or if its disk is full. ``free_bytes`` returns the free space of a directory.

    Raises ConfigError if a given directory or its object store cannot be used.
    """
    disk = settings.disk
    if not disk.cache_dir or settings.terminal.url:
        return settings
    if disk.store_url:
        connect(disk.store_url)
    directory = Path(disk.cache_dir).expanduser()
    try:
        with closing(open_directory(directory)) as opened, temp_path(directory):
            disk_mib = _disk_mib(disk, free_bytes(directory) + opened.n_bytes)
    except OSError as error:
        reason = error.strerror or error
        # It passes, while a service manager would not restart a program that ends with exit code 2.
        if is_full(directory, error, free_bytes):
            log.warning(
                "no disk cache: no space for %s: %s; the next start tries again", directory, reason
            )
            return replace(settings, disk=replace(disk, cache_dir=""))
        if not disk.is_default:
            raise ConfigError(f"cannot use --kv-cache-dir {directory}: {reason}") from error
        log.warning(
            "no disk cache: cannot use %s: %s; --kv-cache-dir names another", directory, reason
        )
        return replace(settings, disk=replace(disk, cache_dir=""))
    return replace(settings, disk=replace(disk, disk_mib=disk_mib))


FULL_BYTES = 2**20
"""SQLite cannot open an index in less space: its log and its shared memory start with some pages.
"""


def is_full(directory: Path, error: OSError, free_bytes: Callable[[Path], int] = free_at) -> bool:
    """Return whether ``error``, from the use of ``directory``, is caused by a full disk. SQLite
    reports that without a number, as an I/O error.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    if error.errno not in (None, errno.EIO):  # a wrong path
        return False
    try:
        return free_bytes(directory) < FULL_BYTES
    except OSError:  # it does not exist: another reason
        return False


def log_cache_dir(disk: DiskSettings) -> None:
    """Show the user the place of the cache, if it is on disk: in the log, or if that is quiet, at
    the terminal.
    """
    if disk.cache_dir:
        size = f"at most {disk.disk_mib:,} MiB" if disk.disk_mib else "of any size"
        where = f"disk cache: {Path(disk.cache_dir).expanduser()}, {size}"
        text = f"{where}; its files contain text of prompts; --no-kv-cache turns it off"
        if log.isEnabledFor(logging.INFO):
            log.info("%s", text)
        elif sys.stderr.isatty():
            print(text, file=sys.stderr)


def _disk_mib(disk: DiskSettings, free: int) -> int:
    """Return the budget of a directory with ``free`` bytes, its own files included. Raises OSError
    if that is too little.
    """
    if not disk.free_part:
        return disk.disk_mib
    if free // disk.free_part < MIN_DISK:
        raise OSError(
            f"{free // MIB:,} MiB of disk space are free, less than "
            f"{disk.free_part * MIN_DISK // MIB:,}"
        )
    return min(disk.disk_mib, free // disk.free_part // MIB)
