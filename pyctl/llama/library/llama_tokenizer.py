"""Tokenizer of a model's vocabulary, which is constant and therefore thread-safe."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import cached_property
from itertools import compress, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyctl.llama.library.bindings import api

__all__ = ["LlamaTokenizer", "read_piece"]

# llama_token_attr
CONTROL = 1 << 3
USER_DEFINED = 1 << 4
FIM = ("pre", "suf", "mid", "rep", "sep")


class LlamaTokenizer:
    """The vocabulary of ``model``, a pointer from llama_model_load_from_file; one that it ``owns``
    goes with it.
    """

    def __init__(self, model: Any, *, owns: bool = False) -> None:
        if owns:
            # Any thread may be tokenizing: not before the last reference has gone, and not at the
            # end of the process.
            weakref.finalize(self, api.llama_model_free, model).atexit = False
        self.vocab = self._vocab = api.llama_model_get_vocab(model)
        self.n_vocab = int(api.llama_vocab_n_tokens(self._vocab))
        self.bos = int(api.llama_vocab_bos(self._vocab))
        self.eos = int(api.llama_vocab_eos(self._vocab))
        self.add_bos = bool(api.llama_vocab_get_add_bos(self._vocab))
        self.sep = int(api.llama_vocab_sep(self._vocab))
        self.add_eos = bool(api.llama_vocab_get_add_eos(self._vocab))
        self.add_sep = bool(api.llama_vocab_get_add_sep(self._vocab))
        # The id that stands for rows of images in interfaces with token ids only.
        ids = self.tokenize("<|image_pad|>")
        self.image_token = ids[0] if len(ids) == 1 else 0
        self._pieces: dict[tuple[int, bool], bytes] = {}

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of ``text``.

        ``add_special`` adds BOS and EOS as the model requires; ``parse_special`` parses names of
        special tokens.
        """
        data = text.encode("utf-8", "surrogatepass")
        size = len(data) + 2
        buffer = (api.llama_token * size)()
        n = api.llama_tokenize(
            self._vocab, data, len(data), buffer, size, add_special, parse_special
        )
        if n < 0:
            buffer = (api.llama_token * -n)()
            n = api.llama_tokenize(
                self._vocab, data, len(data), buffer, -n, add_special, parse_special
            )
        return buffer[:n]

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """Return the bytes of one token; empty for a control token unless ``special``."""
        piece = self._pieces.get((token, special))
        if piece is None:
            piece = self._pieces[token, special] = read_piece(self._vocab, token, special=special)
        return piece

    def detokenize(self, tokens: Sequence[int], *, special: bool = True) -> bytes:
        """Return the concatenated bytes of ``tokens``."""
        return b"".join([self.piece(token, special=special) for token in tokens])

    def special_tokens(self) -> dict[str, int]:
        """Return control and user-defined tokens by their text."""
        tokens = np.flatnonzero(self._attributes & (CONTROL | USER_DEFINED)).tolist()
        return {
            api.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace"): token
            for token in tokens
        }

    def control_tokens(self) -> frozenset[int]:
        """Return all control tokens."""
        return frozenset(np.flatnonzero(self._attributes & CONTROL).tolist())

    @cached_property
    def _attributes(self) -> NDArray[np.int32]:
        """Attributes of all tokens: a call for each of 250,000."""
        return np.fromiter(
            map(api.llama_vocab_get_attr, repeat(self._vocab), range(self.n_vocab)), np.int32
        )

    def all_pieces(self) -> list[bytes]:
        """Return the bytes of every token, control tokens included."""
        vocab = self._vocab
        read = api.llama_token_to_piece
        buffer = ctypes.create_string_buffer(64)
        sizes = ((token, read(vocab, token, buffer, 64, 0, True)) for token in range(self.n_vocab))
        return [
            ctypes.string_at(buffer, n) if n >= 0 else read_piece(vocab, token)
            for token, n in sizes
        ]

    def is_end(self, token: int) -> bool:
        """Return whether ``token`` ends a reply."""
        return bool(api.llama_vocab_is_eog(self._vocab, token))

    def end_tokens(self) -> frozenset[int]:
        """Return all tokens that end a reply."""
        return self._ends

    @cached_property
    def _ends(self) -> frozenset[int]:
        is_end = map(api.llama_vocab_is_eog, repeat(self._vocab), range(self.n_vocab))
        return frozenset(compress(range(self.n_vocab), is_end))

    def fim_tokens(self) -> dict[str, int]:
        """Return the model's fill-in-the-middle tokens: pre, suf, mid (prefix, suffix, middle),
        rep, sep.
        """
        fim_tokens = {name: getattr(api, f"llama_vocab_fim_{name}")(self._vocab) for name in FIM}
        return {name: int(token) for name, token in fim_tokens.items() if token >= 0}


def read_piece(vocab: Any, token: int, *, special: bool = True) -> bytes:
    """Return the bytes of ``token``; empty for an invalid id, and for a control token unless
    ``special``.
    """
    if not 0 <= token < api.llama_vocab_n_tokens(vocab):
        return b""
    buffer = ctypes.create_string_buffer(64)
    n = api.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)
    if n < 0:
        buffer = ctypes.create_string_buffer(-n)
        n = api.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)
    return buffer.raw[:n]
