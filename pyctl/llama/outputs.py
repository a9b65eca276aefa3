"""The outputs of the last evaluation, and what samplers look for in them, found for several outputs at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

__all__ = ["Outputs", "RowThreads"]

Rows: TypeAlias = NDArray[np.float32]
Read: TypeAlias = Callable[[Rows], Sequence[Any]]
"""Returns one result for each row of logits."""

N_THREADS = min(4, len(os.sched_getaffinity(0)))
"""Memory answers several threads faster than one; more than four gain little."""

FEW, MANY = 8, 8
"""Of fewer outputs than FEW each is read when it is needed. Threads are handed up to MANY rows each at once."""


class RowThreads:
    """Up to ``n`` threads that read rows beside the calling one, as many as the system starts."""

    def __init__(self, n: int) -> None:
        self.n = 0
        self._parts: SimpleQueue[_Part] = SimpleQueue()
        for _ in range(n):
            try:
                threading.Thread(target=self._run, name="logits-read", daemon=True).start()
            except RuntimeError:
                break
            self.n += 1

    def each(self, read: Read, rows: Rows) -> list[Any]:
        """Return the results of ``read`` for all ``rows``. No thread reads them after that, nor after an error."""
        size = -(-len(rows) // (2 * (self.n + 1)))
        done: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        starts = range(0, len(rows), size)
        for start in starts:
            self._parts.put(_Part(read, rows[start : start + size], start, done))
        with suppress(Empty):  # threads that wake late find less to do
            while True:
                self._parts.get_nowait().run()
        found = dict(done.get() for _ in starts)
        for result in found.values():
            if isinstance(result, BaseException):
                raise result
        return [each for start in starts for each in found[start]]

    def _run(self) -> None:
        while True:
            self._parts.get().run()


class _Part(NamedTuple):
    read: Read
    rows: Rows
    start: int
    done: SimpleQueue[tuple[int, Any]]

    def run(self) -> None:
        try:
            result: Any = self.read(self.rows)
        except BaseException as error:
            result = error
        self.done.put((self.start, result))


@cache
def _threads() -> RowThreads:
    return RowThreads(N_THREADS - 1)


def _maxima(n_groups: int, lets_run: bool, rows: Rows) -> list[Rows]:
    """Return the maxima of ``n_groups`` ranges of each row; ``lets_run`` other threads, which takes longer alone."""
    size = rows.shape[1] // n_groups
    whole = rows[:, : n_groups * size]
    if lets_run:
        return [*whole.reshape(len(rows), n_groups, size).max(axis=2)]
    return [*np.maximum.reduceat(whole, np.arange(0, n_groups * size, size), axis=1)]


class Outputs:
    """The outputs of the last evaluation of ``ctx``: a row of ``n_vocab`` logits each, numbered from 0.

    A search of one row also covers the next ones, by ``threads``, as far ahead as rows were needed before: drafts that
    were right so far are likely to go on. Rows are read within calls only, since the next evaluation writes them.
    """

    def __init__(self, ctx: Any, n_vocab: int, threads: RowThreads | None = None) -> None:
        self.ctx, self.n_vocab = ctx, n_vocab
        self.is_recalled = False
        self._threads = threads
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

    def _beside(self) -> RowThreads | None:
        """The threads that read rows beside this one; None for few rows, or where the system starts none."""
        threads = (self._threads or _threads()) if len(self._places) >= FEW else None
        return threads if threads is not None and threads.n else None

    def _look(self, index: int, what: int, read: Read) -> Any:
        """Return what ``read`` finds at ``index``; ``what`` identifies it."""
        first, found = self._found.get(what, (0, []))
        if not first <= index < first + len(found):
            threads = self._beside()
            n_ahead = max(threads.n + 1, min(index, (threads.n + 1) * MANY)) if threads is not None else 1
            rows = self._all()[index : index + n_ahead]
            found = threads.each(read, rows) if threads is not None and len(rows) > 1 else [*read(rows)]
            first, self._found[what] = index, (index, found)
        return found[index - first]
