"""Rows outside of llama.cpp's cache, and what to compare them with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyctl.cache.snapshot import Block
from pyctl.llama.library.native import KVState, RowStore, checked
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.prompt import Tokens, as_tokens

UBATCH = 96
N = 600
ENDS = [96, 192, 240, 254, 255, 256, 257, 258, 354, 450, 500, 511, 514, 590, N]
"""Ends of batches: some pass a multiple of 256 in the middle, and single tokens go up to one and
past it.
"""


def tokens_of(seed: int, n: int = N) -> Tokens:
    return as_tokens(np.random.default_rng(seed).integers(0, 256, n))


@dataclass
class Store:
    """Evaluates on a context of few cells, with the rows of a `RowStore`."""

    backend: LlamaBackend

    @property
    def rows(self) -> KVState:
        """The only reference, so that the store is freed before the context."""
        return self.backend.memory.kv

    @property
    def store(self) -> RowStore:
        return self.backend.memory.store

    def evaluate(self, tokens: Tokens, start: int) -> np.ndarray:
        batch = self.backend.batch
        batch.fill(0, tokens, start)
        code = checked(self.store.decode, ctypes.addressof(batch.struct))
        assert code == 0
        self.backend.outputs.set((len(tokens) - 1,))
        return self.backend.logits(0)

    def run(self, tokens: Tokens, start: int = 0, ends: list[int] = ENDS) -> dict[int, np.ndarray]:
        return run(self.evaluate, tokens, start, ends)

    def resume(self, n: int, chain: list[tuple[Block, int, int]], state: Block) -> None:
        """Hold the first ``n`` rows of ``chain``, of which the first are there already, and their
        state.
        """
        kept = self.rows.n_tokens(0)
        checked(
            self.rows.load,
            0,
            kept,
            [(rows, max(a, kept), b) for rows, a, b in chain if kept < b <= n],
        )
        if state.size:
            checked(self.rows.load, 0, n, [], state)


def run(
    evaluate: Callable[[Tokens, int], np.ndarray], tokens: Tokens, start: int, ends: list[int]
) -> dict[int, np.ndarray]:
    found = {}
    for end in ends:
        if start < end <= len(tokens):
            found[end] = evaluate(tokens[start:end], start)
            start = end
    return found


def assert_same(found: dict[int, np.ndarray], wanted: dict[int, np.ndarray]) -> None:
    assert found, "nothing was compared"
    for end, logits in found.items():
        assert np.isfinite(logits).all()
        assert (logits == wanted[end]).all(), f"logits at {end} differ"


def evaluate_on(backend: LlamaBackend) -> Callable[[Tokens, int], np.ndarray]:
    def evaluate(part: Tokens, start: int) -> np.ndarray:
        backend.evaluate(0, part, start)
        return backend.logits(0)

    return evaluate
