"""The array of tokens that llama.cpp's samplers work on, owned here: it can be looked at between two samplers."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

__all__ = ["Candidates"]

_ENTRY = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Candidates:
    """One entry per token that is left, at first all ``n_vocab``."""

    def __init__(self, n_vocab: int) -> None:
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._entries = np.zeros(n_vocab, _ENTRY)
        self._data: Any = ctypes.cast(self._entries.ctypes.data, api.llama_token_data_p)
        self.array = api.llama_token_data_array(self._data, n_vocab, -1, False)

    @property
    def left(self) -> NDArray[Any]:
        """The entries that are left, as (id, logit, p)."""
        return self._entries[: self.array.size]

    def fill(self, logits: Any) -> None:
        """Begin with all tokens; ``logits`` is a pointer to one float per token."""
        self._entries["id"] = self._ids
        self._entries["logit"] = np.ctypeslib.as_array(logits, self._ids.shape)
        self._entries["p"] = 0.0
        self.array.data, self.array.size, self.array.selected, self.array.sorted = self._data, self._ids.size, -1, False

    def keep_only(self, token: int) -> None:
        """Make every token but ``token`` impossible."""
        self.left["logit"][self.left["id"] != token] = -np.inf

    def fill_one(self, token: int) -> None:
        """Begin with ``token`` alone."""
        self._entries[0] = (token, 1.0, 0.0)
        self.array.data, self.array.size, self.array.selected, self.array.sorted = self._data, 1, -1, False

    def apply(self, sampler: Any) -> None:
        """Let ``sampler`` change, sort or shorten the array, or select an entry."""
        api.llama_sampler_apply(sampler, ctypes.byref(self.array))

    def choose(self, chain: Any) -> int | None:
        """The token that ``chain`` selects; None if all that were left are impossible."""
        self.apply(chain)
        chosen = self._entries[self.array.selected]
        return int(chosen["id"]) if self.array.selected >= 0 and chosen["logit"] > -np.inf else None

    def top(self, token: int, n: int) -> tuple[tuple[int, float], ...]:
        """(id, probability) of ``token``, then of the ``n`` most likely ones that are left, without zeros."""
        left = self.left
        order = np.argsort(-left["p"], kind="stable")[:n]
        own = left["p"][left["id"] == token]
        best = [(int(left["id"][i]), float(left["p"][i])) for i in order if left["p"][i] > 0.0]
        return ((token, float(own[0]) if own.size else 1.0), *best)
