"""The directory of `pyctl worker --cache`: large tensors that ggml keeps, so that a server sends them only once.

ggml trusts a file by its name, a hash of its bytes, and looks neither at its size nor at its bytes. So a file that was
cut off, by the end of the process or by a full disk, must never be found again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pyctl.errors import ConfigError
from pyctl.limit import limit

__all__ = ["BUDGET_MIB", "LOOK_SECONDS", "LOW_BYTES", "TensorDirectory"]

MIB = 2**20

BUDGET_MIB = limit(
    65536, "tensors in the directory of pyctl worker --cache, by default", "the oldest are removed", "disk", "MiB"
)

LOW_BYTES = limit(
    2**32, "free disk space for pyctl worker --cache", "new tensors are removed, or the worker ends", "disk", "bytes"
)

LOOK_SECONDS = 1.0
"""Between two looks at the directory: no disk writes LOW_BYTES in this time."""

SEALED = 0o400
"""The mode of a file that is complete."""

NAME_DIGITS = 16


def _free(directory: Path) -> int:
    return shutil.disk_usage(directory).free


class TensorDirectory:
    """The files of ``directory``, of ``budget`` bytes at most; removes what an earlier process did not complete.

    ``free`` returns the bytes that the disk has left. Raises ConfigError if the directory cannot be used.
    """

    def __init__(self, directory: Path, budget: int, free: Callable[[Path], int] = _free) -> None:
        self.path, self._budget, self._free = directory, budget, free
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if free(directory) < LOW_BYTES:
                raise ConfigError(f"--cache {directory}: less than {LOW_BYTES // MIB:,} MiB are free there")
            for path, found in self._files():
                if found.st_mode & 0o777 != SEALED:
                    path.unlink()
        except OSError as error:
            raise ConfigError(f"cannot use --cache {directory}: {error.strerror}") from error

    def look(self) -> None:
        """Seal what is complete, and remove what was not used for the longest time beyond the budget.

        Where the disk has little room, what is new may lack its end, and goes. Raises OSError if the directory is gone.
        """
        files = self._files()
        opened = self._open_files()  # after the files: what is written now is open
        has_room = self._free(self.path) >= LOW_BYTES
        for path, found in files:
            if found.st_mode & 0o777 != SEALED and not has_room:
                _remove(path)
            elif found.st_mode & 0o777 != SEALED and str(path.resolve()) not in opened:
                _seal(path)
        total = 0
        for path, found in sorted(files, key=lambda each: -max(each[1].st_atime, each[1].st_mtime)):
            total += found.st_size
            if total > self._budget:
                _remove(path)

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """The files that ggml names, by 16 hexadecimal digits, and no others."""
        found = []
        for path in self.path.iterdir():
            is_named = len(path.name) == NAME_DIGITS and all(digit in "0123456789abcdef" for digit in path.name)
            if is_named and path.is_file() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    found.append((path, path.stat()))
        return found

    @staticmethod
    def _open_files() -> set[str]:
        opened = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                opened.add(os.readlink(f"/proc/self/fd/{name}"))
        return opened


def _seal(path: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.fchmod(descriptor, SEALED)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
