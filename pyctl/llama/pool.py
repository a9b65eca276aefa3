"""The pool of rows in the extension, and the trial of its bits at the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyctl.engine.pool import PoolPlan, StreamCounts
from pyctl.engine.selection import BLOCK
from pyctl.llama.library import RowStore
from pyctl.prompt import Tokens, as_tokens

__all__ = ["counts_of", "made_up_text", "open_pool", "same_bits", "trial"]


def open_pool(address: int, plan: PoolPlan, *, marks: bool) -> RowStore:
    """The pool of the context at ``address``; RuntimeError where there can be none."""
    chosen: dict[str, int] = {}
    if (select := plan.select) is not None:
        chosen = {"select_rows": select.n_chosen, "sinks": select.n_sinks, "tail": select.n_tail, "block": BLOCK}
        chosen["select_batch"] = plan.n_selecting
    resident, n_stages = list(plan.resident), max(plan.n_stages, 1)
    return RowStore(address, plan.n_rows, resident, marks=marks, stages=n_stages, **chosen)


def counts_of(rows: RowStore) -> StreamCounts:
    """What attention has read and chosen since it was opened."""
    return StreamCounts(rows.streamed_bytes, rows.wait_ms, rows.selected_chunks, rows.fetched_chunks)


GPU_TOKENS, CPU_TOKENS = 600, 290
"""Beyond a multiple of 256, where the shapes of the graph change; and no more, since processors are slow."""

N_SINGLE = 3
"""Tokens that come alone, as those of a reply do."""


def trial(
    evaluate: Callable[[int, Tokens, int], None],
    logits: Callable[[int], NDArray[np.float32]],
    n_vocab: int,
    n_ubatch: int,
    n_rows: int,
    *,
    on_gpu: bool,
) -> list[NDArray[np.float32]]:
    """The logits after each batch of a made-up text in sequence 0, which is empty, has room for ``n_rows`` and holds it
    afterwards.

    ``evaluate`` takes a sequence, tokens and a position, ``logits`` the number of an output.
    """
    n_tokens = min(GPU_TOKENS if on_gpu else CPU_TOKENS, n_rows - N_SINGLE)
    tokens = made_up_text(n_tokens + N_SINGLE, n_vocab)
    found = []
    for start, end in pairwise([*range(0, n_tokens, n_ubatch), *range(n_tokens, tokens.size + 1)]):
        evaluate(0, tokens[start:end], start)
        found.append(logits(0))
    return found


def made_up_text(n: int, n_vocab: int) -> Tokens:
    """``n`` token ids, shape (n,), of a vocabulary with ``n_vocab``."""
    return as_tokens((np.arange(n) * 7919 + 13) % n_vocab)


def same_bits(one: Sequence[NDArray[Any]], other: Sequence[NDArray[Any]]) -> bool:
    """Whether both trials gave the same bits."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
