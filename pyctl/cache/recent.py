"""The prompts of late, in memory and in a file that survives a restart."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import zstandard

from pyctl.atomic_file import write_atomic
from pyctl.cache.persist import Nearest, Recent
from pyctl.prompt import Prompt, Tokens, common_prefix

__all__ = ["RecentLog", "RecentPrompts"]


class RecentPrompts:
    """The newest ``capacity`` distinct prompts. A prompt that another one continues makes room for it."""

    def __init__(self, capacity: int = 64) -> None:
        self._prompts: deque[Prompt] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, prompt: Prompt) -> None:
        """Remember ``prompt`` as the newest."""
        for known in self._prompts:
            if common_prefix(known.tokens, prompt.tokens) >= known.end:
                self._prompts.remove(known)
                break
        self._prompts.append(prompt)

    def nearest(self, tokens: Tokens) -> tuple[Prompt | None, int]:
        """The prompt that shares the most leading tokens with ``tokens``, the newest of equals, and how many."""
        best: tuple[Prompt | None, int] = (None, 0)
        for known in reversed(self._prompts):
            shared = common_prefix(known.tokens, tokens)
            if shared > best[1]:
                best = known, shared
        return best


MAGIC = b"PYRL\x01"

CHECK_BYTES = 16


class RecentLog:
    """The newest prompts: at most ``capacity`` of them and ``max_tokens`` tokens in all (4 bytes each, also saved).

    A prompt that a newer one continues makes room for it, so a window of N looks at N conversations, not at N turns
    of one. Has no lock: one thread adds and saves.
    """

    def __init__(self, capacity: int = 256, max_tokens: int = 2**22) -> None:
        self._capacity = capacity
        self._max_tokens = max_tokens
        self._recent: list[Recent] = []

    def __len__(self) -> int:
        return len(self._recent)

    def newest_first(self) -> tuple[Recent, ...]:
        """Every prompt that is remembered."""
        return tuple(self._recent)

    def add(self, prompt: Prompt) -> None:
        """Remember ``prompt`` as the newest."""
        nearest = Nearest.find(prompt, self._recent)
        rest = self._recent
        if nearest is not None and nearest.common >= nearest.recent.prompt.end:
            rest = [recent for recent in rest if recent is not nearest.recent]
        self._keep([Recent(prompt, nearest.left if nearest else 0), *rest])

    def save(self, path: Path) -> None:
        """Write everything to ``path``, which is the old file or the new one at any moment; OSError if it cannot be."""
        numbers = [np.array([len(self._recent)], "<i4")]
        for recent in self._recent:
            prompt = recent.prompt
            numbers += [
                np.array([len(prompt), len(prompt.boundaries), recent.left], "<i4"),
                prompt.tokens.astype("<i4", copy=False),
                np.array(prompt.boundaries, "<i4"),
            ]
        frame = zstandard.compress(np.concatenate(numbers).tobytes(), 3)
        write_atomic(path, MAGIC + _check(frame) + frame)

    def load(self, path: Path) -> None:
        """Take over what ``path`` holds; nothing, if it is missing, damaged or not of this kind."""
        try:
            data = path.read_bytes()
        except OSError:
            data = b""
        check, frame = data[len(MAGIC) : len(MAGIC) + CHECK_BYTES], data[len(MAGIC) + CHECK_BYTES :]
        whole = data.startswith(MAGIC) and check == _check(frame)
        try:
            self._keep(_read(frame) if whole else ())
        except (ValueError, zstandard.ZstdError):
            self._recent = []

    def _keep(self, recent: Iterable[Recent]) -> None:
        self._recent = []
        n_tokens = 0
        for one in islice(recent, self._capacity):
            n_tokens += len(one.prompt)
            if n_tokens > self._max_tokens:
                break
            self._recent.append(one)


def _check(frame: bytes) -> bytes:
    return hashlib.blake2b(frame, digest_size=CHECK_BYTES).digest()


def _read(frame: bytes) -> list[Recent]:
    """The prompts of an intact frame; ValueError or ZstdError if it was written differently."""
    numbers = np.frombuffer(zstandard.decompress(frame), "<i4")
    recent = []
    at = 1
    for _ in range(numbers[0] if numbers.size else 0):
        n_tokens, n_boundaries, left = (int(n) for n in numbers[at : at + 3])
        middle, end = at + 3 + n_tokens, at + 3 + n_tokens + n_boundaries
        if not at + 3 <= middle <= end <= numbers.size:
            raise ValueError("a prompt reaches past the end")
        recent.append(Recent(Prompt.of(numbers[at + 3 : middle], numbers[middle:end]), left))
        at = end
    return recent
