"""The compiled extension's part for draft heads, see `_core`: hidden rows of a model, and the heads that draft from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class HiddenRows:
    """The rows that enter ``layer`` of the context at address ``ctx``, if negative those that leave its last one.

    Their shape is (n, n_embd). ValueError where llama.cpp does not give them, by the last evaluation. It must not be used after the context is freed. Arrays are views of memory that is written again as said.
    """

    def __init__(self, ctx: int, layer: int = -1) -> None: ...
    def rows(self, n: int) -> NDArray[np.float32]:
        """Rows of the ``n`` tokens evaluated last, in their order, until the next evaluation. Waits for it."""

    def start(self, n: int) -> bool:
        """Start to copy the last evaluation's, one batch of ``n`` tokens of one sequence, so that the next may
        start. False where evaluations are complete on return."""

    def finish(self, before: bool = False) -> NDArray[np.float32]:
        """The copy of the last `start`, or of the one ``before``, valid until the next but one. ValueError without any."""

class NextnHead:
    """Evaluates the nextn block of a model in ``ctx``, a context of type MTP, with whose sequences it does as it likes;
    or an EAGLE-3 model, whose graph ``gives_all`` rows logits.

    Row p of its cache belongs to the token at p and the model's hidden row of the token before. With ``p_min``, a token
    is drafted only if it is that likely among the ten best. ValueError for arguments that cannot be evaluated; else
    llama_decode's result.
    """

    def __init__(self, ctx: int, p_min: float = 0.0, gives_all: bool = False) -> None: ...
    def close(self) -> None:
        """Let go of the context, before it is freed."""

    def evaluate(
        self, seq: int, start: int, tokens: Sequence[int], hidden: NDArray[np.float32]
    ) -> int:
        """Add a row for each of ``tokens`` from ``start`` on; ``hidden`` are as many, each of the token before."""

    def draft(
        self,
        items: Sequence[tuple[int, int, Sequence[int], NDArray[np.float32]]],
        n: int,
        window: int = 1,
    ) -> tuple[list[list[int]], int]:
        """``n`` tokens, or fewer, after each item's: (sequence, start, tokens, hidden rows as in `evaluate`).

        There may be fewer hidden rows than tokens: the block makes those that are missing itself. Rows from ``start``
        on are replaced; those for which hidden rows were given stay. ``window`` rows of each are evaluated in every call
        of the block but the first.
        """
