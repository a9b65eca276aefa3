"""The outputs of the last evaluation, and what samplers look for in them, found for several outputs at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, partial
from threading import Barrier
from typing import Any, TypeAlias

import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

__all__ = ["Outputs", "read_by", "row_threads"]

Rows: TypeAlias = NDArray[np.float32]
Read: TypeAlias = Callable[[Rows], Sequence[Any]]
"""Returns one result for each row of logits."""

N_THREADS = min(4, len(os.sched_getaffinity(0)))
"""Memory answers several threads faster than one; more than four gain little."""

FEW, MANY = 8, 8
"""Of fewer outputs than FEW each is read when it is needed. Threads are handed up to MANY rows each at once."""


@cache
def row_threads(n: int) -> ThreadPoolExecutor | None:
    """``n`` threads that read rows, all started; None where the system does not start them."""
    threads, together = ThreadPoolExecutor(n, "logits-read"), Barrier(n)
    try:
        for _ in range(n):
            threads.submit(together.wait)
    except RuntimeError:
        together.abort()
        threads.shutdown(wait=False)
        return None
    return threads


def read_by(threads: ThreadPoolExecutor, n_parts: int, read: Read, rows: Rows) -> list[Any]:
    """Return the results of ``read`` for all ``rows``. No thread reads them after that, nor after an error."""
    size = -(-len(rows) // n_parts)
    parts = [threads.submit(read, rows[start : start + size]) for start in range(0, len(rows), size)]
    wait(parts)
    return [found for part in parts for found in part.result()]


def _maxima(n_groups: int, lets_run: bool, rows: Rows) -> list[Rows]:
    """Return the maxima of ``n_groups`` ranges of each row; ``lets_run`` other threads, which takes longer alone."""
    size = rows.shape[1] // n_groups
    whole = rows[:, : n_groups * size]
    if lets_run:
        return [*whole.reshape(len(rows), n_groups, size).max(axis=2)]
    return [*np.maximum.reduceat(whole, np.arange(0, n_groups * size, size), axis=1)]


class Outputs:
    """The outputs of the last evaluation of ``ctx``: a row of ``n_vocab`` logits each, numbered from 0.

    A search of one row also covers the next ones, by ``n_threads``, as far ahead as rows were needed before: drafts
    that were right so far are likely to go on. Rows are read within calls only, since the next evaluation writes them.
    """

    def __init__(self, ctx: Any, n_vocab: int, n_threads: int = N_THREADS) -> None:
        self.ctx, self.n_vocab, self.n_threads = ctx, n_vocab, n_threads
        self.is_recalled = False
        self._places: Sequence[int] = ()
        self._rows: Rows | None = None
        self._found: dict[int, tuple[int, list[Any]]] = {}

    def set(self, places: Sequence[int]) -> None:
        """Take the outputs of the evaluation that has begun, which are those of tokens ``places`` of its batch."""
        self._places, self._rows, self.is_recalled = places, None, False
        self._found.clear()

    def recall(self, logits: Rows) -> None:
        """Take ``logits``, shape (n_vocab,), as the only output."""
        self.set((0,))
        self._rows, self.is_recalled = logits[None], True

    def place(self, index: int) -> int:
        """Return the place of output ``index`` in the batch, for llama.cpp; none of its outputs is `recall`ed."""
        return self._places[index]

    def row(self, index: int) -> Rows:
        """Return the logits of output ``index``, shape (n_vocab,), which the next evaluation overwrites. Waits for the
        device."""
        row: Rows = self._all()[index]
        return row

    def likeliest(self, index: int) -> int:
        """Return the first of the most likely tokens at output ``index``, or the first one whose logit is NaN."""
        return int(self._look(index, 0, lambda rows: rows.argmax(axis=1).tolist()))

    def maxima(self, index: int, n_groups: int) -> Rows:
        """Return the largest logit of each of ``n_groups`` equal ranges of tokens, NaN if one is NaN, at ``index``.

        Tokens that are left over belong to none."""
        found: Rows = self._look(index, n_groups, partial(_maxima, n_groups, self._beside() is not None))
        return found

    def _all(self) -> Rows:
        if self._rows is None:
            shape = (len(self._places), self.n_vocab)
            self._rows = np.ctypeslib.as_array(api.llama_get_logits(self.ctx), shape)
        return self._rows

    def _beside(self) -> ThreadPoolExecutor | None:
        """The threads that read rows; None for few rows, or where the system starts none."""
        return row_threads(self.n_threads) if self.n_threads > 1 and len(self._places) >= FEW else None

    def _look(self, index: int, what: int, read: Read) -> Any:
        """Return what ``read`` finds at ``index``; ``what`` identifies it."""
        first, found = self._found.get(what, (0, []))
        if not first <= index < first + len(found):
            threads = self._beside()
            n_ahead = max(self.n_threads, min(index, self.n_threads * MANY)) if threads is not None else 1
            rows = self._all()[index : index + n_ahead]
            found = (
                [*read(rows)] if threads is None or len(rows) < 2 else read_by(threads, 2 * self.n_threads, read, rows)
            )
            first, self._found[what] = index, (index, found)
        return found[index - first]
