"""Tokenizer of a model's vocabulary, which is constant and therefore thread-safe."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pyctl.llama.library.bindings import api
from pyctl.llama.library.extension import library_file

__all__ = ["LlamaTokenizer", "read_piece"]

# llama_token_attr
CONTROL = 1 << 3
USER_DEFINED = 1 << 4
FIM = ("pre", "suf", "mid", "rep", "sep")

RUN = 4096
"""Tokens that are read before another thread may run: half a millisecond."""

T = TypeVar("T", bound=np.generic)


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
        control, user_defined = self._special
        return {
            api.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace"): token
            for token in sorted(control | user_defined)
        }

    def control_tokens(self) -> frozenset[int]:
        """Return all control tokens."""
        return self._special[0]

    @cached_property
    def _special(self) -> tuple[frozenset[int], frozenset[int]]:
        """The control and the user-defined tokens, found by a call for each of 250,000."""
        attributes = self._of_all("llama_vocab_get_attr", ctypes.c_int, np.int32)
        control = np.flatnonzero(attributes & CONTROL)
        user_defined = np.flatnonzero(attributes & USER_DEFINED)
        return frozenset(control.tolist()), frozenset(user_defined.tolist())

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of every token, control tokens included."""
        vocab = self._vocab
        read = api.llama_token_to_piece
        buffer = ctypes.create_string_buffer(64)
        for token in range(self.n_vocab):
            n = read(vocab, token, buffer, 64, 0, True)
            yield ctypes.string_at(buffer, n) if n >= 0 else read_piece(vocab, token)

    def is_end(self, token: int) -> bool:
        """Return whether ``token`` ends a reply."""
        return bool(api.llama_vocab_is_eog(self._vocab, token))

    def end_tokens(self) -> frozenset[int]:
        """Return all tokens that end a reply."""
        return self._ends

    @cached_property
    def _ends(self) -> frozenset[int]:
        is_end = self._of_all("llama_vocab_is_eog", ctypes.c_bool, np.bool_)
        return frozenset(np.flatnonzero(is_end).tolist())

    def _of_all(self, name: str, result: type, dtype: type[T]) -> NDArray[T]:
        """Return what llama.cpp's function ``name``, which returns a ``result``, has for each
        token, shape (n_vocab,).

        Such a call takes nanoseconds. It keeps the interpreter's lock, since giving it up takes as
        long as the call, and others would take it at every token. They get it between runs.
        """
        function = ctypes.PyDLL(str(library_file("libllama.so")))[name]
        function.restype = result
        vocab = repeat(ctypes.c_void_p(self._vocab))
        found = np.empty(self.n_vocab, dtype)
        for first in range(0, self.n_vocab, RUN):
            tokens = range(first, min(first + RUN, self.n_vocab))
            found[first : tokens.stop] = np.fromiter(map(function, vocab, tokens), dtype)
        return found

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
