"""Trials at the start: whether sequences are restored to the same bits, and where, and whether a
pool changes any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyctl.cache.resume_points import ANYWHERE, NOWHERE, ResumePoints
from pyctl.cache.snapshot import Block
from pyctl.engine.backend import Backend
from pyctl.errors import StateError
from pyctl.llama.library.native import KVState
from pyctl.prompt import Tokens, as_tokens

__all__ = [
    "TESTED",
    "TRIAL_TOKENS",
    "describe",
    "find_resume_points",
    "is_tested",
    "pool_trial",
    "restores",
    "same_bits",
    "synthetic_tokens",
]

TESTED = frozenset(
    {
        "llama_kv_cache",
        "llama_kv_cache_dsa",
        "llama_kv_cache_dsa_iswa",
        "llama_kv_cache_dsv4",
        "llama_kv_cache_iswa",
        "llama_kv_cache_msa",
        "llama_memory_hybrid",
        "llama_memory_hybrid_idx",
        "llama_memory_hybrid_iswa",
        "llama_memory_recurrent",
    }
)
"""Memory classes covered by tests/model/llama/test_families.py; others are tested at startup."""

TRIAL_TOKENS = 96
TRIAL_REST = 40
"""Tokens that a trial saves, and tokens that it evaluates after them; both fit into the smallest
context.
"""

GPU_TOKENS = 600
CPU_TOKENS = 290
N_SINGLE = 3
"""Tokens of the trial of a pool: just above a multiple of 256, where graph shapes change, and few
for slow CPUs; how many follow one at a time, as in a reply.
"""


def is_tested(memory: KVState) -> bool:
    """Return whether tests cover this memory class, or the model has no memory to restore."""
    return not memory.type or (memory.type in TESTED and not memory.reason)


def find_resume_points(memory: KVState, n_cells: int) -> ResumePoints:
    """Return the places where sequences of ``memory`` may be saved, if they are restored to the
    same bits at all.

    Sliding layers keep rows in a ring of cells, and attention sums in cell order. llama.cpp
    restores the window of an opaque memory to the first cells, so sums match within the first
    window, and a whole number of rings after it. In other memories these rows come back to their
    own cells.
    """
    window, ring = memory.window
    if not window or memory.kind != "opaque":
        return ANYWHERE
    return ResumePoints(window, ring if 0 < ring < n_cells else 0)


def describe(memory: KVState, points: ResumePoints) -> str:
    """Return a one-line description of the memory."""
    if not memory.type:
        return "none: each text is evaluated in one batch"
    if points == NOWHERE:
        return f"not cached: {memory.type} is not restored to the same bits"
    if memory.kind == "attention":
        return "attention: rows of tokens"
    if memory.kind == "hybrid":
        line = "hybrid: rows of tokens, and a state" if memory.can_hold else "recurrent: a state"
        line += " at each snapshot"
    else:
        line = f"whole sequences of {memory.type}"
    if points != ANYWHERE:
        behind = f", then every {points.step}" if points.step else ""
        line += f" with a sliding window: resumed within {points.window} tokens{behind}"
    return f"{line}, without separate rows: {memory.reason}" if memory.reason else line


def restores(backend: Backend, n: int, n_vocab: int, *, hold: bool = False) -> bool:
    """Return whether up to TRIAL_REST tokens have bit-identical outputs after ``n`` test tokens are
    saved and restored and, where the sequence can be cut after them, after a cut.

    Uses sequence 0, which is empty before and after, and with ``hold`` held rows. Other tokens are
    evaluated before the restore, so that rows which it does not bring back are different ones.
    """
    tokens = synthetic_tokens(min(n + TRIAL_REST, backend.facts.n_ctx), n_vocab)
    memory = backend.memory
    _evaluate(backend, tokens[:n], 0)
    try:
        rows = memory.save_rows(0, 0, n, hold=hold)
        state = memory.save_state(0, n)
        memory.synchronize()
        expected = _evaluate(backend, tokens[n:], n)
        if memory.shape.cut_anywhere:
            memory.rewind(0, n)
            if not same_bits(expected, _evaluate(backend, tokens[n:], n)):
                return False
        memory.clear(0)
        _evaluate(backend, tokens[::-1], 0)
        memory.clear(0)
        memory.restore(0, 0, [(rows, 0, n)], state)
        return same_bits(expected, _evaluate(backend, tokens[n:], n))
    except StateError:
        return False
    finally:
        memory.clear(0)
        memory.cells.release_all()


def pool_trial(backend: Backend, n_vocab: int, *, on_gpu: bool) -> list[Block]:
    """Evaluate a test text in the empty sequence 0, its last tokens one at a time; return the
    output of each batch.

    The text stays in the sequence.
    """
    n = min(GPU_TOKENS if on_gpu else CPU_TOKENS, backend.facts.n_cells - N_SINGLE)
    tokens = synthetic_tokens(n + N_SINGLE, n_vocab)
    outputs = _evaluate(backend, tokens[:n], 0)
    for start in range(n, n + N_SINGLE):
        outputs += _evaluate(backend, tokens[start : start + 1], start)
    return outputs


def same_bits(one: Sequence[Block], other: Sequence[Block]) -> bool:
    """Return whether both trials have identical bits."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def synthetic_tokens(n: int, n_vocab: int) -> Tokens:
    """Return ``n`` test token ids below ``n_vocab``, shape (n,)."""
    return as_tokens((np.arange(n) * 7919 + 13) % n_vocab)


def _evaluate(backend: Backend, tokens: Tokens, start: int) -> list[Block]:
    """Evaluate ``tokens`` in batches and return the output of each."""
    outputs = []
    for first in range(0, len(tokens), backend.facts.n_ubatch):
        backend.evaluate(0, tokens[first : first + backend.facts.n_ubatch], start + first)
        outputs.append(backend.output())
    return outputs
