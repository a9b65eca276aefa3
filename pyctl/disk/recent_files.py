"""Files of recent prompts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import zstandard

from pyctl.cache.recent import RecentPrompt
from pyctl.disk.file_format import MAX_TOKENS, PromptName
from pyctl.files.atomic_file import (
    CALLS,
    FileCalls,
    files_in,
    make_private,
    read_regular,
    sync_directory,
    write_atomic,
)
from pyctl.prompt import Prompt

__all__ = ["DEFAULT_FILE_BYTES", "RecentFiles", "read_prompt"]

MAGIC = b"PYRP\x01"

CHECK_BYTES = 16

MAX_PROMPT_BYTES = 8 * MAX_TOKENS
"""Tokens and boundaries of the longest prompt."""

MAX_NS = 2**64 - 1
"""The latest time that a name has room for, in nanoseconds."""

DEFAULT_FILE_BYTES = 2**25
"""Room for some 12 million tokens."""


class RecentFiles:
    """The recent prompts on disk, a file each in ``directory``, together at most ``max_bytes``.

    ``spend`` is called before bytes are written, and returns False if the day has enough.
    ``clock_ns`` is the Unix time, ``calls`` write the files. For one thread at a time.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int = DEFAULT_FILE_BYTES,
        spend: Callable[[int], bool] = lambda n_bytes: True,
        clock_ns: Callable[[], int] = time.time_ns,
        calls: FileCalls = CALLS,
    ) -> None:
        self._calls = calls
        self._clock_ns = clock_ns
        self._directory = directory
        self._max_bytes = max_bytes
        self._spend = spend
        self._saved: dict[
            RecentPrompt, tuple[PromptName, int]
        ] = {}  # the oldest first; 0 bytes: there was no room for it
        self._newest_ns = 0

    def load(self) -> list[RecentPrompt]:
        """Return the prompts in the directory, the newest first. Files that are damaged or of
        another kind are removed; files that cannot be read now stay.
        """
        prompts = []
        names = [
            name for path in files_in(self._directory) if (name := PromptName.parse(path.name))
        ]
        for name in sorted(names, key=str):
            path = self._directory / str(name)
            try:
                data = read_regular(path, self._max_bytes + 1)
                if len(data) > self._max_bytes:
                    raise ValueError("larger than any that is written")
                recent = read_prompt(data)
            except (OSError, MemoryError):
                continue
            except ValueError:
                path.unlink(missing_ok=True)
                continue
            self._saved[recent] = name, len(data)
            self._newest_ns = name.made_ns
            prompts.append(recent)
        return prompts[::-1]

    def save(self, newest_first: Sequence[RecentPrompt]) -> None:
        """Write the files that are not there yet and remove all others; OSError if the disk
        refuses.
        """
        kept = {recent for recent in newest_first if recent.for_disk}
        gone = [recent for recent in self._saved if recent not in kept]
        fresh = [
            recent
            for recent in reversed(newest_first)
            if recent.for_disk and recent not in self._saved
        ]
        n_bytes = sum(size for recent, (_, size) in self._saved.items() if recent in kept)
        if fresh:
            make_private(self._directory)
        for recent in fresh:
            data = pack_prompt(recent)
            # Names sort by age, also where the clock stands still or is set back.
            self._newest_ns = min(max(self._clock_ns(), self._newest_ns + 1), MAX_NS)
            name = PromptName.new(self._newest_ns)
            if len(data) > self._max_bytes:
                self._saved[recent] = name, 0
                continue
            n_bytes -= self._make_room(n_bytes + len(data), kept)
            if not self._spend(len(data)):
                break
            write_atomic(self._directory / str(name), data, calls=self._calls)
            self._saved[recent] = name, len(data)
            n_bytes += len(data)
        if fresh:
            sync_directory(self._directory)
        for recent in gone:
            (self._directory / str(self._saved.pop(recent)[0])).unlink(missing_ok=True)

    def _make_room(self, n_bytes: int, kept: set[RecentPrompt]) -> int:
        """Remove the oldest until ``n_bytes`` are few enough; returns how many went."""
        freed = 0
        for recent, (name, size) in list(self._saved.items()):
            if n_bytes - freed <= self._max_bytes:
                break
            if recent in kept:
                (self._directory / str(name)).unlink(missing_ok=True)
                self._saved[recent] = name, 0
                freed += size
        return freed


def pack_prompt(recent: RecentPrompt) -> bytes:
    """Return the content of a prompt's file."""
    prompt = recent.prompt
    numbers = [
        np.array([len(prompt), len(prompt.boundaries), recent.boundaries_remaining], "<i4"),
        prompt.tokens.astype("<i4", copy=False),
        np.array(prompt.boundaries, "<i4"),
    ]
    frame = zstandard.compress(np.concatenate(numbers).data, 3)
    return MAGIC + _check(frame) + frame


def read_prompt(data: bytes) -> RecentPrompt:
    """Return the prompt in ``data``, the result of `pack_prompt`. Raises ValueError for anything
    else.

    The checksum comes first, and the size before decompressing, so that a damaged file takes no
    memory.
    """
    check = data[len(MAGIC) : len(MAGIC) + CHECK_BYTES]
    frame = data[len(MAGIC) + CHECK_BYTES :]
    if not data.startswith(MAGIC) or check != _check(frame):
        raise ValueError("a damaged file, or one of another kind")
    try:
        if not 0 <= zstandard.frame_content_size(frame) <= MAX_PROMPT_BYTES:
            raise ValueError("larger than any prompt")
        numbers = np.frombuffer(zstandard.decompress(frame), "<i4")
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if numbers.size < 3:
        raise ValueError("too short")
    n_tokens, n_boundaries, left = (int(n) for n in numbers[:3])
    if n_tokens < 0 or n_boundaries < 0 or numbers.size != 3 + n_tokens + n_boundaries:
        raise ValueError("a prompt reaches past the end")
    return RecentPrompt(Prompt.from_ids(numbers[3 : 3 + n_tokens], numbers[3 + n_tokens :]), left)


def _check(frame: bytes) -> bytes:
    return hashlib.blake2b(frame, digest_size=CHECK_BYTES).digest()
