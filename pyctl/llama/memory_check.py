"""Checks of llama.cpp's memory kinds: the places where restored sequences reproduce the same bits."""

from __future__ import annotations

from pyctl.cache import ANYWHERE, NOWHERE, Block, ResumePlaces
from pyctl.engine.backend import Backend
from pyctl.errors import StateError
from pyctl.llama.library import KVState
from pyctl.llama.pool import made_up_text, same_bits
from pyctl.prompt import Tokens

__all__ = ["TESTED", "TRIAL_TOKENS", "describe", "is_tested", "places_of", "restores"]

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

TRIAL_TOKENS, TRIAL_REST = 96, 40
"""Tokens that a trial saves, and tokens that it evaluates after them; both fit into the smallest context."""


def is_tested(memory: KVState) -> bool:
    """Whether tests cover this memory class, or the model has no memory to restore."""
    return not memory.type or memory.type in TESTED


def places_of(memory: KVState, n_cells: int) -> ResumePlaces:
    """Return the places where sequences of ``memory`` may be saved, if they are restored to the same bits at all.

    Sliding layers keep rows in a ring of cells, and attention sums in cell order. llama.cpp restores the window of an
    opaque memory to the first cells, so sums match within the first window, and a whole number of rings after it. In
    other memories these rows come back to their own cells.
    """
    window, ring = memory.window
    if not window or memory.kind != "opaque":
        return ANYWHERE
    return ResumePlaces(window, ring if 0 < ring < n_cells else 0)


def describe(memory: KVState, places: ResumePlaces) -> str:
    """Return a one-line description of the memory."""
    if not memory.type:
        return "none: each text is evaluated in one batch"
    if places == NOWHERE:
        return f"not cached: {memory.type} does not come back to the same bits"
    if memory.kind == "attention":
        return "attention: rows of tokens"
    if memory.kind == "hybrid":
        line = "hybrid: rows of tokens, and a state" if memory.can_hold else "recurrent: a state"
        line += " at each snapshot"
    else:
        line = f"whole sequences of {memory.type}"
    if places != ANYWHERE:
        behind = f", then every {places.step}" if places.step else ""
        line += f" with a sliding window: resumed within {places.window} tokens{behind}"
    return line


def restores(backend: Backend, n: int, n_vocab: int) -> bool:
    """Whether TRIAL_REST tokens have bit-identical outputs after ``n`` test tokens are saved and restored, and where
    the sequence can be cut after them, also then.

    Uses sequence 0, which is empty before and after.
    """
    tokens, memory = made_up_text(n + TRIAL_REST, n_vocab), backend.memory
    _evaluate(backend, tokens[:n], 0)
    try:
        rows, state = memory.save_rows(0, 0, n), memory.save_state(0, n)
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


def _evaluate(backend: Backend, tokens: Tokens, start: int) -> list[Block]:
    """Evaluate ``tokens`` in batches and return the output of each."""
    found = []
    for first in range(0, len(tokens), backend.facts.n_ubatch):
        backend.evaluate(0, tokens[first : first + backend.facts.n_ubatch], start + first)
        found.append(backend.output())
    return found
