"""Live sequences in files, as llama-server saves and restores them; each program can read the other's.

The file is llama.cpp's (llama_state_seq_save_file). Where it keeps token ids, llama-server packs little-endian words:
-1, a version, the count of tokens, the tokens, and a count of images, which is 0 here. Older files hold only tokens.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api

from pyctl.engine.llama.log import last_error
from pyctl.errors import StateError
from pyctl.prompt import Tokens, as_tokens

__all__ = ["load_file", "save_file"]

log = logging.getLogger(__name__)

PACKED, VERSION = -1, 1
HEADER = struct.Struct("<4sII")
"""Magic, version, and the number of words that follow before the state."""


INVALID = "No available space in KV cache or invalid slot save file"
"""llama-server's words for every file that cannot be used."""


def save_file(ctx: Any, seq: int, path: Path, tokens: Tokens) -> int:
    """Write sequence ``seq``, which holds ``tokens``, and return the bytes written; StateError if that fails."""
    words = np.concatenate([as_tokens([PACKED, VERSION, tokens.size]), tokens, as_tokens([0])]).astype(np.int32)
    temporary = path.with_name(f".{path.name}.tmp")
    pointer = words.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    n_bytes = int(api.llama_state_seq_save_file(ctx, os.fsencode(temporary), seq, pointer, words.size))
    if not n_bytes:
        temporary.unlink(missing_ok=True)
        raise StateError(f"Unable to save slot: {last_error('llama.cpp gave no reason')}")
    os.replace(temporary, path)
    return n_bytes


def load_file(ctx: Any, seq: int, path: Path, n_ctx: int, n_vocab: int) -> tuple[Tokens, int]:
    """Fill sequence ``seq``; its tokens and the bytes of the file.

    StateError when there is no such file, when it does not fit into ``n_ctx`` tokens or is of another model.
    """
    n_words = _count(path)
    words = np.zeros(max(n_words, 1), np.int32)
    count = ctypes.c_size_t()
    pointer = words.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    n_bytes = int(api.llama_state_seq_load_file(ctx, os.fsencode(path), seq, pointer, words.size, ctypes.byref(count)))
    if not n_bytes:
        log.warning("%s is of no use: %s", path, last_error("llama.cpp gave no reason"))
        raise StateError(INVALID)
    tokens = _unpacked(words[:n_words])
    if tokens.size > n_ctx:
        raise StateError("Restored prompt does not fit in the slot context")
    last = int(api.llama_memory_seq_pos_max(api.llama_get_memory(ctx), seq))
    if last + 1 != tokens.size or (tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < n_vocab):
        raise StateError("Invalid tokens in slot save file")
    return tokens, n_bytes


def _count(path: Path) -> int:
    """How many words of tokens the file says it has, if it can be that many."""
    try:
        with path.open("rb") as file:
            header = file.read(HEADER.size)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise StateError(INVALID) from error
    if len(header) < HEADER.size:
        raise StateError(INVALID)
    n_words = int(HEADER.unpack(header)[2])
    if n_words > (size - HEADER.size) // 4:
        raise StateError(INVALID)
    return n_words


def _unpacked(words: Tokens) -> Tokens:
    if words.size == 0 or words[0] != PACKED:
        return words
    if words.size < 4 or words[1] != VERSION or not 0 <= words[2] <= words.size - 4:
        raise StateError("Unsupported server tokens state version")
    n = int(words[2])
    if words[3 + n] != 0:
        raise StateError("Cannot restore media tokens without an mmproj")
    return words[3 : 3 + n]
