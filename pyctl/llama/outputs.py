"""The outputs of the last evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

__all__ = ["Outputs"]


class Outputs:
    """The outputs of the last evaluation of ``ctx``: a row of ``n_vocab`` logits each, numbered from 0."""

    def __init__(self, ctx: Any, n_vocab: int) -> None:
        self.ctx, self.n_vocab = ctx, n_vocab
        self._places: Sequence[int] = ()
        self._rows: NDArray[np.float32] | None = None
        self.is_recalled = False

    def set(self, places: Sequence[int]) -> None:
        """Take the outputs of the evaluation that has begun, which are those of tokens ``places`` of its batch."""
        self._places, self._rows, self.is_recalled = places, None, False

    def recall(self, logits: NDArray[np.float32]) -> None:
        """Take ``logits``, shape (n_vocab,), as the only output."""
        self._places, self._rows, self.is_recalled = (0,), logits[None], True

    def place(self, index: int) -> int:
        """Return the place of output ``index`` in the batch, for llama.cpp; none of its outputs is `recall`ed."""
        return self._places[index]

    def row(self, index: int) -> NDArray[np.float32]:
        """Return the logits of output ``index``, shape (n_vocab,), which the next evaluation overwrites. Waits for the
        device."""
        if self._rows is None:
            shape = (len(self._places), self.n_vocab)
            self._rows = np.ctypeslib.as_array(api.llama_get_logits(self.ctx), shape)
        row: NDArray[np.float32] = self._rows[index]
        return row
