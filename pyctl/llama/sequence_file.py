"""Live sequences in files, as llama-server saves and restores them; each program can read the other's.

The file is llama.cpp's (llama_state_seq_save_file). Where it keeps token ids, llama-server packs little-endian words:
-1, a version, the count of tokens, the tokens, and a count of images, which is 0 here. Older files hold only tokens.
After the state, where llama-server does not look, follow the exact batch ends, a BLAKE2b-128 of what saved bytes mean
here and one of everything before it, the number of ends, and a magic. Files without that end are llama-server's.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from pyctl.atomic_file import make_private, temp_path
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
"""HEADER: magic, version, and the number of words that follow before the state. PREFIX: what stands before a state in
memory, llama.cpp's io_magic and a sequence."""

DIGEST_SIZE = 16
END = struct.Struct("<16sI8s")
END_MAGIC = b"pyctlsq1"

INVALID = "No available space in KV cache or invalid slot save file"
"""llama-server's words for every file that cannot be used."""


@dataclass(frozen=True)
class StateForm:
    """Where positions are in the state of a sequence, as llama.cpp writes it: of the cells, and of the recurrent state.

    A cell takes ``cell`` bytes and its rows ``row``, in ``n_parts`` tensors, each with a head of 12 bytes.
    """

    cell: int
    row: int
    n_parts: int
    is_hybrid: bool

    @classmethod
    def of(cls, layout: str) -> StateForm:
        """From the layout's text (csrc/core/layout.cpp)."""
        kind, ext, *_ = layout.split()
        parts = [re.fullmatch(r"\d+:(\d+)x(\d+)", part) for part in re.split("[ =,]", layout)]
        rows = [int(part[1]) * int(part[2]) for part in parts if part is not None]
        return cls(12 if ext == "ext=0" else 24, sum(rows), len(rows), kind == "hybrid")

    def check(self, state: NDArray[np.uint8], n: int) -> None:
        """StateError unless the cells are those of ``n`` tokens and the recurrent state stands behind them.

        llama.cpp takes any position, and one that is the largest of all would stay in the sequence for ever.
        """
        cells_end = 8 + n * self.cell
        if not n or state[:8].tobytes() != struct.pack("<II", 1, n) or state.size < cells_end:
            raise StateError(INVALID)
        cells = np.frombuffer(state[8:cells_end].tobytes(), "<i4").reshape(n, -1)
        if not np.array_equal(np.sort(cells[:, 0]), np.arange(n)) or not np.all(cells[:, 1] == 1):
            raise StateError(INVALID)
        at = cells_end + 8 + 12 * self.n_parts + n * self.row
        if self.is_hybrid and state[at : at + 8].tobytes() != struct.pack("<II", 1, n - 1):
            raise StateError(INVALID)


def save_file(ctx: Any, seq: int, path: Path, tokens: Tokens, ends: Sequence[int], identity: str) -> int:
    """Write sequence ``seq``, which holds ``tokens``, and return the bytes written; StateError if that fails.

    RequestError for too long a name. ``identity`` names what saved bytes mean; a file of another one is refused.
    """
    words = np.concatenate([as_tokens([PACKED, VERSION, tokens.size]), tokens, as_tokens([0])]).astype(np.int32)
    pointer = words.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    forget_log_errors()
    try:
        make_private(path.parent)
        # Not synced: what a power failure cuts off does not have its digest, and is refused.
        with temp_path(path.parent) as temporary:  # llama.cpp fills the file that is there
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
    """Fill sequence ``seq`` from ``path``, whose state has this ``form`` if that is known.

    ``reserve`` is told before how many cells it will take.

    StateError when there is no such file, when it is damaged, of another model, or longer than ``n_ctx`` tokens.
    """
    try:
        data: NDArray[np.uint8] = np.memmap(path, np.uint8, "c")
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
    # llama_state_seq_load_file ends the program when a file is cut; reading from memory, llama.cpp minds the end. There
    # it wants a prefix, for which the last bytes before the state do, in our private copy of them.
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
    """What llama.cpp wrote, and the batch ends after it; the former is everything in a file of llama-server."""
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
    """The words of the token list, between the header and the state."""
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
