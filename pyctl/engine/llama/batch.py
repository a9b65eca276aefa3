"""What llama_decode is given: tokens with their positions and sequences."""

from __future__ import annotations

import ctypes

import numpy as np
from llama_cpp import llama_cpp as api

from pyctl.prompt import Tokens

__all__ = ["Batch"]


class Batch:
    """A llama_batch whose arrays are numpy's, so that filling it is a handful of copies."""

    def __init__(self, capacity: int) -> None:
        self.tokens = np.zeros(capacity, np.int32)
        self.positions = np.zeros(capacity, np.int32)
        self.seqs = np.zeros(capacity, np.int32)
        self.wanted = np.zeros(capacity, np.int8)
        self._n_seqs = np.ones(capacity, np.int32)
        # One pointer per token to the one sequence id that it belongs to.
        self._pointers = self.seqs.ctypes.data + np.arange(capacity, dtype=np.uint64) * self.seqs.itemsize
        self.struct = api.llama_batch()
        for name, array in (
            ("token", self.tokens),
            ("pos", self.positions),
            ("n_seq_id", self._n_seqs),
            ("seq_id", self._pointers),
            ("logits", self.wanted),
        ):
            setattr(self.struct, name, ctypes.cast(array.ctypes.data, type(getattr(self.struct, name))))

    def fill(self, seq: int, tokens: Tokens, start: int, *, every: bool = False, last: bool = True) -> None:
        """``tokens`` of one sequence from position ``start`` on; output is wanted of ``every`` one or the ``last``."""
        n = int(tokens.size)
        self.tokens[:n] = tokens
        self.positions[:n] = np.arange(start, start + n)
        self.seqs[:n] = seq
        self.wanted[:n] = every
        self.wanted[n - 1] = every or last
        self.struct.n_tokens = n
