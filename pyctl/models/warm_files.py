"""Files of models kept in the kernel's page cache, so that a switch reads no disk."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["WarmFiles", "read_dropped"]

log = logging.getLogger("pyctl")

PIECE = 2 << 20
"""Bytes that are looked at together: the kernel keeps or drops pages, and one of a piece stands for it."""

MIB = 1 << 20


class WarmFiles:
    """Reads files that the page cache has dropped, each time that `look` is called.

    ``wanted`` returns the files of each model by its name, the most urgent model first. ``room`` returns the bytes that
    all of them may take, None if that is unknown; a model that does not fit any more is left out.
    """

    def __init__(self, wanted: Callable[[], Mapping[str, Sequence[Path]]], room: Callable[[], int | None]) -> None:
        self._wanted, self._room = wanted, room
        self._said: tuple[str, ...] = ()
        self._ends = threading.Event()

    def close(self) -> None:
        """Read no more. Does not wait."""
        self._ends.set()

    def look(self) -> list[str]:
        """Read what was dropped of the files that have room; returns the names of their models."""
        room = self._room() or 0
        kept, lines = [], []
        for name, files in self._wanted().items():
            n_bytes = sum(map(_size, files))
            if not 0 < n_bytes <= room:
                continue
            room -= n_bytes
            kept.append(name)
            lines.append(f"{name} ({n_bytes // MIB:,} MiB)")
            read_dropped(files, self._ends.is_set)
        if tuple(lines) != self._said and not self._ends.is_set():
            self._said = tuple(lines)
            log.info("files kept in RAM for a switch: %s", ", ".join(lines) or "none, RAM has no room")
        return kept


def _size(file: Path) -> int:
    """The bytes of ``file``; 0 if it is gone."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def read_dropped(files: Iterable[Path], stops: Callable[[], bool] = lambda: False) -> int:
    """Read the pieces of ``files`` that are not in the page cache until ``stops``; returns their bytes.

    Files that cannot be read are passed over: loading a model says what is wrong with it.
    """
    found, buffer = 0, bytearray(PIECE)
    for file in files:
        with suppress(OSError), file.open("rb", buffering=0) as opened:
            end = os.fstat(opened.fileno()).st_size
            # Without reading ahead, what is not in the cache stays so until it is read here.
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for at in range(0, end, PIECE):
                if stops():
                    return found
                if not _is_cached(opened.fileno(), at):
                    found += os.preadv(opened.fileno(), [buffer], at)
    return found


def _is_cached(descriptor: int, at: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except OSError:  # it would have to wait, or this file system cannot say
        return False
