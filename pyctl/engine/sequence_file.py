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
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pyctl.cache.ports import SequenceMemory
from pyctl.cache.resume_points import NOWHERE
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import (
    Block,
    Rows,
    Span,
    State,
)
from pyctl.errors import RequestError, StateError
from pyctl.files.atomic_file import make_private, open_regular, replacing
from pyctl.prompt import Tokens, as_tokens

__all__ = ["SPAN", "SavedSequence", "load_file", "save_file"]

MAGIC = b"pyctlsq2"

DIGEST_SIZE = 16
"""Bytes of a BLAKE2b-128 digest."""

TAIL = struct.Struct("<16sIII8s16s")
"""BLAKE2b-128 of the fingerprint; tokens, ends and blocks; MAGIC; BLAKE2b-128 of all before."""

SPAN = 4096
"""Tokens whose rows are saved and written at a time, which bounds the memory that this takes."""

INVALID = "No available space in KV cache or invalid slot save file"
"""llama-server's error for all invalid files."""


class SavedSequence(msgspec.Struct, frozen=True):
    """A sequence from a file of ``n_bytes``: tokens, exact batch ends, rows, and the state, None
    without tokens.
    """

    tokens: Tokens
    batch_ends: tuple[int, ...]
    spans: tuple[Span, ...]
    state: State | None
    n_bytes: int


def save_file(
    memory: SequenceMemory,
    seq: LiveSequence,
    ends: Sequence[int],
    path: Path,
    identity: str,
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
    if not memory.shape.resume_points.contains(seq.n):
        ends = ()
    try:
        make_private(path.parent)
        # No sync: the digest detects files truncated by a power failure.
        with replacing(path, sync=False) as file:
            for block in _blocks(memory, seq):
                sizes.append(block.nbytes)
                digest.update(block.data)
                file.write(block.data)
            tail = _tail(seq, ends, sizes, identity)
            digest.update(tail)
            file.write(tail + digest.digest())
            return file.tell()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise RequestError("Invalid filename: too long for this directory") from error
        raise StateError(f"Unable to save slot: {error.strerror}") from error


def _tail(seq: LiveSequence, ends: Sequence[int], sizes: list[int], identity: str) -> bytes:
    """Return all that follows the blocks, without the digest at the end."""
    numbers = seq.tokens.tobytes()
    numbers += np.array(ends, np.int32).tobytes()
    numbers += np.array(sizes, np.int64).tobytes()
    tail = TAIL.pack(
        _digest(identity.encode()).digest(),
        seq.n,
        len(ends),
        len(sizes),
        MAGIC,
        b"",
    )
    return numbers + tail[:-DIGEST_SIZE]


def _blocks(memory: SequenceMemory, seq: LiveSequence) -> Iterator[Block]:
    """Yield the own and the draft model's rows of each span, then both parts of the state."""
    for first in range(0, seq.n, SPAN):
        last = min(first + SPAN, seq.n)
        rows = memory.save_rows(seq.id, first, last)
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
        real_path = Path(os.path.realpath(path))
        with os.fdopen(open_regular(real_path), "rb") as file:
            data: NDArray[np.uint8] = np.memmap(file, np.uint8, "c")
    except (OSError, ValueError) as error:  # ValueError for an empty file
        raise StateError(INVALID) from error
    end = data.size - TAIL.size
    if end < 0:
        raise StateError(INVALID)
    owner, n, n_ends, n_sizes, magic, digest = TAIL.unpack(data[end:].tobytes())
    if magic != MAGIC:
        raise StateError(INVALID)
    if _digest(data[:-DIGEST_SIZE]).digest() != digest:
        raise StateError(INVALID)
    if owner != _digest(identity.encode()).digest():
        raise StateError("the file is of another model or other settings")
    n_number_bytes = 4 * (n + n_ends)
    first = end - n_number_bytes - 8 * n_sizes
    starts = range(0, n, SPAN)
    n_blocks = 0
    if n:
        n_blocks = 2 * len(starts) + 2
    if first < 0 or n_sizes != n_blocks:
        raise StateError(INVALID)
    numbers = data[first:end].tobytes()
    tokens_and_ends = np.frombuffer(numbers, np.int32, n + n_ends)
    tokens, ends = np.split(tokens_and_ends, [n])
    sizes = np.frombuffer(numbers, np.int64, n_sizes, n_number_bytes).tolist()
    if min(sizes, default=0) < 0 or sum(sizes) != first:
        raise StateError(INVALID)
    if not _are_ends(ends, n) or int(tokens.min(initial=0)) < 0:
        raise StateError(INVALID)
    spans: list[Span] = []
    state: State | None = None
    if n:
        blocks = np.split(data[:first], np.cumsum(sizes)[:-1])
        for i, start in enumerate(starts):
            rows = Rows(blocks[2 * i], blocks[2 * i + 1])
            spans.append((rows, start, min(start + SPAN, n)))
        state = State.from_parts(blocks[-2], blocks[-1])
    return SavedSequence(
        tokens=as_tokens(tokens),
        batch_ends=tuple(ends.tolist()),
        spans=tuple(spans),
        state=state,
        n_bytes=int(data.size),
    )


def _are_ends(ends: NDArray[np.int32], n: int) -> bool:
    """Return whether ``ends`` are ends of batches of ``n`` tokens: ascending, from 1 to n."""
    if not ends.size:
        return True
    if ends[0] <= 0 or ends[-1] > n:
        return False
    return bool(np.all(np.diff(ends) > 0))


def _digest(data: Any = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=DIGEST_SIZE)
