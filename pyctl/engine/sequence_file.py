"""Slot files: a sequence on disk, in the blocks of which snapshots consist.

A file has the blocks of rows and the state, the tokens, the exact batch ends, the sizes of the
blocks, and `TAIL`.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyctl.cache import NOTHING, NOWHERE, Block, LiveSequence, Rows, SequenceMemory, Span, State
from pyctl.errors import RequestError, StateError
from pyctl.files.atomic_file import make_private, open_regular, replacing
from pyctl.prompt import Tokens, as_tokens

__all__ = ["SPAN", "SavedSequence", "load_file", "save_file"]

MAGIC = b"pyctlsq2"
TAIL = struct.Struct("<16sIII8s16s")
"""BLAKE2b-128 of the fingerprint; tokens, ends and blocks; MAGIC; BLAKE2b-128 of all before."""

SPAN = 4096
"""Tokens whose rows are saved and written at a time, which bounds the memory that this takes."""

INVALID = "No available space in KV cache or invalid slot save file"
"""llama-server's error for all invalid files."""


@dataclass(frozen=True)
class SavedSequence:
    """A sequence from a file of ``n_bytes``: tokens, exact batch ends, rows, and the state, None
    without tokens.
    """

    tokens: Tokens
    ends: tuple[int, ...]
    spans: tuple[Span, ...]
    state: State | None
    n_bytes: int


def save_file(
    memory: SequenceMemory, seq: LiveSequence, ends: Sequence[int], path: Path, identity: str
) -> int:
    """Write ``seq`` and return the bytes written.

    `load_file` refuses other values of ``identity``, the fingerprint. Raises StateError,
    RequestError for a long name.
    """
    if seq.n and int(seq.tokens.min()) < 0:
        raise StateError("Unable to save slot: it holds an image")
    if memory.shape.resume_points == NOWHERE:
        raise StateError(
            "Unable to save slot: this model's memory does not restore to the same bits"
        )
    digest = _digest()
    sizes: list[int] = []
    ends = ends if memory.shape.resume_points.allow(seq.n) else ()
    try:
        make_private(path.parent)
        with replacing(
            path, sync=False
        ) as file:  # the digest detects files truncated by a power failure
            for block in _blocks(memory, seq):
                sizes.append(block.nbytes)
                digest.update(block.data)
                file.write(block.data)
            tail = (
                seq.tokens.tobytes()
                + np.array(ends, np.int32).tobytes()
                + np.array(sizes, np.int64).tobytes()
            )
            tail += TAIL.pack(
                _digest(identity.encode()).digest(), seq.n, len(ends), len(sizes), MAGIC, b""
            )[:-16]
            digest.update(tail)
            file.write(tail + digest.digest())
            return file.tell()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise RequestError("Invalid filename: too long for this directory") from error
        raise StateError(f"Unable to save slot: {error.strerror}") from error


def _blocks(memory: SequenceMemory, seq: LiveSequence) -> Iterator[Block]:
    """Yield the own and the draft model's rows of each span, then both parts of the state."""
    for first in range(0, seq.n, SPAN):
        rows = memory.save_rows(seq.id, first, min(first + SPAN, seq.n))
        memory.synchronize()
        yield from (rows.block, rows.draft)
    if seq.n:
        state = memory.save_state(seq.id, seq.n)
        memory.synchronize()
        yield from (state.recurrent, state.draft)


def load_file(path: Path, identity: str) -> SavedSequence:
    """Return the sequence in a file. StateError if that is missing, damaged, or of another model.

    The digest finds damage. A crafted file has a right one, so counts, sizes and ends are checked.
    """
    try:
        with os.fdopen(open_regular(Path(os.path.realpath(path))), "rb") as file:
            data: NDArray[np.uint8] = np.memmap(file, np.uint8, "c")
    except (OSError, ValueError) as error:  # ValueError for an empty file
        raise StateError(INVALID) from error
    end = data.size - TAIL.size
    if end < 0:
        raise StateError(INVALID)
    owner, n, n_ends, n_sizes, magic, digest = TAIL.unpack(data[end:].tobytes())
    if magic != MAGIC or _digest(data[:-16]).digest() != digest:
        raise StateError(INVALID)
    if owner != _digest(identity.encode()).digest():
        raise StateError("the file is of another model or other settings")
    first = end - 4 * (n + n_ends) - 8 * n_sizes
    starts = range(0, n, SPAN)
    if first < 0 or n_sizes != (2 * len(starts) + 2 if n else 0):
        raise StateError(INVALID)
    numbers = data[first:end].tobytes()
    tokens, ends = np.split(np.frombuffer(numbers, np.int32, n + n_ends), [n])
    sizes = np.frombuffer(numbers, np.int64, n_sizes, 4 * (n + n_ends)).tolist()
    has_all = min(sizes, default=0) >= 0 and sum(sizes) == first
    if not has_all or not _are_ends(ends, n) or int(tokens.min(initial=0)) < 0:
        raise StateError(INVALID)
    *rows, recurrent, draft = (
        np.split(data[:first], np.cumsum(sizes)[:-1]) if n else (NOTHING, NOTHING)
    )
    spans = tuple(
        (Rows(rows[2 * i], rows[2 * i + 1]), at, min(at + SPAN, n)) for i, at in enumerate(starts)
    )
    state = State.of(recurrent, draft) if n else None
    return SavedSequence(as_tokens(tokens), tuple(ends.tolist()), spans, state, int(data.size))


def _are_ends(ends: NDArray[np.int32], n: int) -> bool:
    """Return whether ``ends`` are ends of batches of ``n`` tokens: ascending, from 1 to n."""
    return not ends.size or bool(ends[0] > 0 and ends[-1] <= n and np.all(np.diff(ends) > 0))


def _digest(data: Any = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=16)
