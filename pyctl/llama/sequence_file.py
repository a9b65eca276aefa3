"""Slot files: sequences on disk, compatible with llama-server in both directions.

The format is llama.cpp's (llama_state_seq_save_file). Its token list holds llama-server's little-endian words: -1, a
version, the number of tokens, the tokens, and the number of images, here 0. Older files hold only tokens. pyctl appends
after the state, which llama-server ignores: the exact batch ends, the BLAKE2b-128 of the fingerprint, that of
everything before, the number of ends, and a magic. Files without this trailer come from llama-server.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import logging
import os
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from pyctl.atomic_file import make_private, open_regular, temp_path
from pyctl.cache import SavedSequence
from pyctl.errors import RequestError, StateError
from pyctl.llama.library import forget_log_errors, last_log_error
from pyctl.prompt import Tokens, as_tokens

__all__ = ["StateForm", "load_file", "save_file"]

log = logging.getLogger(__name__)

PACKED, VERSION = -1, 1
MAGIC = api.LLAMA_STATE_SEQ_MAGIC
HEADER = struct.Struct("<III")
STATE_MAGIC = 0xAF143CD8
PREFIX = struct.Struct("<II")
"""HEADER: magic, version, number of words before the state. PREFIX, before a state in memory: llama.cpp's io_magic and
a sequence id."""

DIGEST_SIZE = 16
END = struct.Struct("<16sI8s")
END_MAGIC = b"pyctlsq1"

INVALID = "No available space in KV cache or invalid slot save file"
"""llama-server's error for all invalid files."""


@dataclass(frozen=True)
class CellsForm:
    """One cache in llama.cpp's sequence state: a cell has ``cell`` bytes, and its rows ``row`` in ``n_parts`` tensors,
    each with a header of 12 bytes. One that ``slides`` has the last positions only."""

    cell: int
    row: int
    n_parts: int
    slides: bool = False

    @classmethod
    def of(cls, text: str) -> CellsForm:
        """Parse a cache in the layout's text, after "ext="."""
        parts = [(int(row), int(n)) for row, n in re.findall(r"\d+:(\d+)x(\d+)", text)]
        return cls(12 if text.startswith("0") else 24, sum(row * n for row, n in parts), len(parts))

    def size(self, n: int) -> int:
        """Bytes of ``n`` cells and their rows."""
        return 16 + n * self.cell + 12 * self.n_parts + n * self.row

    def check(self, state: NDArray[np.uint8], n: int) -> int:
        """Return the bytes of cells and rows at ``state``; StateError unless they are at all positions below ``n``, or
        at the last of them."""
        n_streams, n_cells = struct.unpack("<II", state[:8].tobytes()) if state.size >= 8 else (0, 0)
        least, cells_end = 1 if self.slides else n, 8 + n_cells * self.cell
        if n_streams != 1 or not 0 < least <= n_cells <= n or state.size < cells_end:
            raise StateError(INVALID)
        cells = np.frombuffer(state[8:cells_end].tobytes(), "<i4").reshape(n_cells, -1)
        if not np.array_equal(np.sort(cells[:, 0]), np.arange(n - n_cells, n)) or not np.all(cells[:, 1] == 1):
            raise StateError(INVALID)
        return self.size(n_cells)


@dataclass(frozen=True)
class StateForm:
    """The caches in llama.cpp's sequence state, and how many come before the recurrent state, -1 if there is none."""

    caches: tuple[CellsForm, ...]
    n_before: int

    @classmethod
    def of(cls, layout: str) -> StateForm:
        """Parse the layout's text (csrc/core/layout.cpp)."""
        text, _, state = layout.partition(" state=")
        grown, _, window = text.partition(" window=")
        caches = [CellsForm.of(each) for each in grown.split(" ext=")[1:]]
        sliding = [replace(CellsForm.of(each), slides=True) for each in window.split(" ext=")[1:]]
        # An indexer's keys come last, the rows of a window before the state.
        n_before = len(caches) + len(sliding) if sliding else 1
        return cls((*caches, *sliding), n_before if state else -1)

    def check(self, state: NDArray[np.uint8], n: int) -> None:
        """Raise StateError unless ``state`` has the cells of ``n`` tokens and the recurrent state at the last.

        llama.cpp accepts any position; the largest one could never be removed from the sequence.
        """
        at = 0
        for i, cache in enumerate(self.caches):
            if i == self.n_before:
                self._check_state(state[at:], n)
                at = int(state.size) - sum(other.size(n) for other in self.caches[i:])
            at += cache.check(state[max(at, 0) :], n)
        if self.n_before == len(self.caches):
            self._check_state(state[at:], n)

    def _check_state(self, state: NDArray[np.uint8], n: int) -> None:
        if state[:8].tobytes() != struct.pack("<II", 1, n - 1):
            raise StateError(INVALID)


def save_file(ctx: Any, seq: int, path: Path, tokens: Tokens, ends: Sequence[int], identity: str) -> int:
    """Write sequence ``seq``, which holds ``tokens``, and return the bytes written.

    `load_file` refuses other values of ``identity``, the fingerprint. Raises StateError, RequestError for a long name.
    """
    words = np.concatenate([as_tokens([PACKED, VERSION, tokens.size]), tokens, as_tokens([0])]).astype(np.int32)
    pointer = words.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    forget_log_errors()
    try:
        make_private(path.parent)
        # Not synced: the digest detects files truncated by a power failure.
        with temp_path(path.parent) as temporary:  # llama.cpp writes to the existing file
            if not api.llama_state_seq_save_file(ctx, os.fsencode(temporary), seq, pointer, words.size):
                raise StateError(f"Unable to save slot: {last_log_error('llama.cpp gave no reason')}")
            with temporary.open("r+b") as file:
                digest = _digest(np.memmap(file, np.uint8, "r"))
                tail = np.array(ends, np.int32).tobytes() + _digest(identity.encode()).digest()
                digest.update(tail)
                n_bytes = file.seek(0, os.SEEK_END)
                n_bytes += file.write(tail + END.pack(digest.digest(), len(ends), END_MAGIC))
            os.replace(temporary, path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise RequestError("Invalid filename: too long for this directory") from error
        raise StateError(f"Unable to save slot: {error.strerror}") from error
    return n_bytes


def load_file(
    ctx: Any,
    seq: int,
    path: Path,
    n_ctx: int,
    n_vocab: int,
    identity: str,
    form: StateForm | None,
    reserve: Callable[[int], None],
) -> SavedSequence:
    """Fill sequence ``seq`` from ``path``. Checks the state with ``form``, and calls ``reserve`` with its cells first.

    StateError if the file is missing, damaged, of another model, or longer than ``n_ctx`` tokens.
    """
    try:
        with os.fdopen(open_regular(Path(os.path.realpath(path))), "rb") as file:
            data: NDArray[np.uint8] = np.memmap(file, np.uint8, "c")
    except (OSError, ValueError) as error:  # ValueError for an empty file
        raise StateError(INVALID) from error
    n_bytes = int(data.size)
    data, ends = _verified(data, identity)
    words = _words(data)
    tokens = _unpacked(words)
    if tokens.size > n_ctx:
        raise StateError("Restored prompt does not fit in the slot context")
    if form is not None:
        form.check(data[HEADER.size + words.nbytes :], int(tokens.size))
    reserve(int(tokens.size))
    # llama_state_seq_load_file aborts on a truncated file; reading from memory checks the size. It requires a prefix,
    # which overwrites the bytes before the state in this private mapping.
    start = HEADER.size + words.nbytes - PREFIX.size
    state = data[start:]
    state[: PREFIX.size] = np.frombuffer(PREFIX.pack(STATE_MAGIC, seq), np.uint8)
    pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    forget_log_errors()
    if int(api.llama_state_seq_set_data(ctx, pointer, state.size, seq)) != state.size:
        log.warning("cannot restore %s: %s", path, last_log_error("llama.cpp gave no reason"))
        raise StateError(INVALID)
    last = int(api.llama_memory_seq_pos_max(api.llama_get_memory(ctx), seq))
    if last + 1 != tokens.size or (tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < n_vocab):
        raise StateError("Invalid tokens in slot save file")
    return SavedSequence(tokens, ends, n_bytes)


def _verified(data: NDArray[np.uint8], identity: str) -> tuple[NDArray[np.uint8], tuple[int, ...]]:
    """Return llama.cpp's part of the file and the batch ends; a file of llama-server is all llama.cpp's part."""
    if data.size < END.size:
        return data, ()
    checksum, n_ends, magic = END.unpack(data[-END.size :].tobytes())
    if magic != END_MAGIC:
        return data, ()
    body = data[: -END.size]
    if n_ends * 4 + DIGEST_SIZE > body.size or _digest(body).digest() != checksum:
        raise StateError(INVALID)
    if body[-DIGEST_SIZE:].tobytes() != _digest(identity.encode()).digest():
        raise StateError("the file is of another model or other settings")
    first = body.size - DIGEST_SIZE - 4 * n_ends
    return body[:first], tuple(np.frombuffer(body[first : first + 4 * n_ends].tobytes(), np.int32).tolist())


def _digest(data: Any = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=DIGEST_SIZE)


def _words(data: NDArray[np.uint8]) -> Tokens:
    """Return the words of the token list between header and state."""
    if data.size < HEADER.size:
        raise StateError(INVALID)
    magic, version, n_words = HEADER.unpack(data[: HEADER.size].tobytes())
    if (magic, version) != (MAGIC, api.LLAMA_STATE_SEQ_VERSION) or n_words > (data.size - HEADER.size) // 4:
        raise StateError(INVALID)
    return np.frombuffer(data[HEADER.size : HEADER.size + 4 * n_words].tobytes(), np.int32)


def _unpacked(words: Tokens) -> Tokens:
    if words.size == 0 or words[0] != PACKED:
        return words
    if words.size < 4 or words[1] != VERSION or not 0 <= words[2] <= words.size - 4:
        raise StateError("Unsupported server tokens state version")
    n = int(words[2])
    if words[3 + n] != 0:
        raise StateError("Cannot restore media tokens without an mmproj")
    return words[3 : 3 + n]
