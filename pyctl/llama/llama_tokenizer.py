"""Text to tokens and back by the model's own vocabulary. The vocabulary never changes, so any thread may use it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from llama_cpp import llama_cpp as api

__all__ = ["LlamaTokenizer", "read_piece"]

CONTROL, USER_DEFINED = 1 << 3, 1 << 4  # llama_token_attr
FIM = ("pre", "suf", "mid", "rep", "sep")


class LlamaTokenizer:
    """The vocabulary of ``model``, a pointer from llama_model_load_from_file."""

    def __init__(self, model: Any) -> None:
        self.vocab = self._vocab = api.llama_model_get_vocab(model)
        self.n_vocab = int(api.llama_vocab_n_tokens(self._vocab))
        self.bos = int(api.llama_vocab_bos(self._vocab))
        self.eos = int(api.llama_vocab_eos(self._vocab))
        self.add_bos = bool(api.llama_vocab_get_add_bos(self._vocab))
        self.sep = int(api.llama_vocab_sep(self._vocab))
        self.add_eos = bool(api.llama_vocab_get_add_eos(self._vocab))
        self.add_sep = bool(api.llama_vocab_get_add_sep(self._vocab))
        # What stands for a row of an image where only tokens can be told.
        ids = self.tokenize("<|image_pad|>")
        self.image_token = ids[0] if len(ids) == 1 else 0
        self._pieces: dict[tuple[int, bool], bytes] = {}

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of ``text``; ``add_special`` adds BOS if the model wants it, ``parse_special`` reads markers."""
        data = text.encode("utf-8", "surrogatepass")
        size = len(data) + 2
        buffer = (api.llama_token * size)()
        n = api.llama_tokenize(self._vocab, data, len(data), buffer, size, add_special, parse_special)
        if n < 0:
            buffer = (api.llama_token * -n)()
            n = api.llama_tokenize(self._vocab, data, len(data), buffer, -n, add_special, parse_special)
        return buffer[:n]

    def piece(self, token: int, *, special: bool = True) -> bytes:
        """The bytes of one token; those of a control token are empty unless ``special``."""
        known = self._pieces.get((token, special))
        if known is None:
            known = self._pieces[token, special] = read_piece(self._vocab, token, special=special)
        return known

    def detokenize(self, tokens: Sequence[int], *, special: bool = True) -> bytes:
        """The bytes of ``tokens``, piece by piece."""
        return b"".join([self.piece(token, special=special) for token in tokens])

    def special_tokens(self) -> dict[str, int]:
        """Control and user-defined tokens by their text."""
        found = {}
        for token in range(self.n_vocab):
            if api.llama_vocab_get_attr(self._vocab, token) & (CONTROL | USER_DEFINED):
                found[api.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace")] = token
        return found

    def control_tokens(self) -> frozenset[int]:
        """Tokens that stand for no text."""
        attributes = api.llama_vocab_get_attr
        return frozenset(token for token in range(self.n_vocab) if attributes(self._vocab, token) & CONTROL)

    def all_pieces(self) -> list[bytes]:
        """The bytes of every token, those of control tokens, too."""
        return [read_piece(self._vocab, token) for token in range(self.n_vocab)]

    def end_tokens(self) -> frozenset[int]:
        """All tokens that end a reply."""
        return frozenset(token for token in range(self.n_vocab) if api.llama_vocab_is_eog(self._vocab, token))

    def fim_tokens(self) -> dict[str, int]:
        """The tokens for filling gaps that the model has: pre, suf, mid (prefix, suffix, middle), rep, sep."""
        found = {name: getattr(api, f"llama_vocab_fim_{name}")(self._vocab) for name in FIM}
        return {name: int(token) for name, token in found.items() if token >= 0}


def read_piece(vocab: Any, token: int, *, special: bool = True) -> bytes:
    """The bytes of ``token``, those of a control token only if ``special``; empty for what is no token."""
    if not 0 <= token < api.llama_vocab_n_tokens(vocab):
        return b""
    buffer = ctypes.create_string_buffer(64)
    n = api.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)
    if n < 0:
        buffer = ctypes.create_string_buffer(-n)
        n = api.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, special)
    return buffer.raw[:n]
