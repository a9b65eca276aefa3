"""The extension's KV pool, and the test of its bits at startup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyctl.engine.pool import PoolPlan
from pyctl.llama.library import KVState, RowStore
from pyctl.prompt import Tokens, as_tokens

__all__ = ["made_up_text", "open_pool", "same_bits", "trial"]


def open_pool(kv: KVState, plan: PoolPlan) -> RowStore:
    """Open a pool for the rows of ``kv``. Raises RuntimeError if it is not possible."""
    return RowStore(kv, plan.n_rows, plan.resident, plan.n_stages)


GPU_TOKENS, CPU_TOKENS = 600, 290
"""Tokens of the trial: just above a multiple of 256, where graph shapes change, and few for slow CPUs."""

N_SINGLE = 3
"""Tokens evaluated one at a time, as in a reply."""


def trial(
    evaluate: Callable[[int, Tokens, int], None],
    logits: Callable[[int], NDArray[np.float32]],
    n_vocab: int,
    n_ubatch: int,
    n_rows: int,
    *,
    on_gpu: bool,
) -> list[NDArray[np.float32]]:
    """Evaluate a test text in the empty sequence 0, with room for ``n_rows``; return the logits after each batch.

    ``evaluate`` takes a sequence, tokens and a position, ``logits`` an output index. The text stays in the sequence.
    """
    n_tokens = min(GPU_TOKENS if on_gpu else CPU_TOKENS, n_rows - N_SINGLE)
    tokens = made_up_text(n_tokens + N_SINGLE, n_vocab)
    found = []
    for start, end in pairwise([*range(0, n_tokens, n_ubatch), *range(n_tokens, tokens.size + 1)]):
        evaluate(0, tokens[start:end], start)
        found.append(logits(0))
    return found


def made_up_text(n: int, n_vocab: int) -> Tokens:
    """Return ``n`` test token ids below ``n_vocab``, shape (n,)."""
    return as_tokens((np.arange(n) * 7919 + 13) % n_vocab)


def same_bits(one: Sequence[NDArray[Any]], other: Sequence[NDArray[Any]]) -> bool:
    """Whether both trials have identical bits."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
