"""Batches for llama_decode, and their outputs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyctl.engine.backend import SequenceTokens
from pyctl.llama.library.bindings import api
from pyctl.prompt import Tokens

__all__ = ["Batch", "Outputs", "RowBatch"]


def _token_index(seq: int, n: int) -> int:
    """Return ``n``: a text's positions are the indices of its tokens."""
    return n


class Batch:
    """A llama_batch over numpy arrays, filled by a few copies."""

    def __init__(self, capacity: int) -> None:
        """Allocate the arrays for ``capacity`` tokens, and let the llama_batch point to them."""
        self.tokens = np.zeros(capacity, np.int32)
        self.positions = np.zeros(capacity, np.int32)
        self.seqs = np.zeros(capacity, np.int32)
        self.outputs = np.zeros(capacity, np.int8)
        self._n_seqs = np.ones(capacity, np.int32)
        # One pointer per token to the one sequence id that it belongs to.
        self._pointers = (
            self.seqs.ctypes.data + np.arange(capacity, dtype=np.uint64) * self.seqs.itemsize
        )
        self.struct = api.llama_batch()
        for name, array in (
            ("token", self.tokens),
            ("pos", self.positions),
            ("n_seq_id", self._n_seqs),
            ("seq_id", self._pointers),
            ("logits", self.outputs),
        ):
            setattr(
                self.struct, name, ctypes.cast(array.ctypes.data, type(getattr(self.struct, name)))
            )

    def put(
        self, n: int, seq: int, tokens: Sequence[int] | Tokens, start: int, *, n_outputs: int = 1
    ) -> int:
        """Put ``tokens`` of ``seq`` after the first ``n``, from position ``start`` on, with outputs
        of the last ones.

        Returns the new number of tokens.
        """
        end = n + len(tokens)
        if len(tokens) == 1:  # as in most steps of a reply: numpy takes 10 us for slices of one
            self.tokens[n] = tokens[0]
            self.positions[n] = start
            self.seqs[n] = seq
            self.outputs[n] = n_outputs
        else:
            self.tokens[n:end] = tokens
            self.positions[n:end] = np.arange(start, start + len(tokens))
            self.seqs[n:end] = seq
            self.outputs[n:end] = 0
            self.outputs[end - n_outputs : end] = 1
        self.struct.n_tokens = end
        return end

    def fill_all(
        self, items: Sequence[SequenceTokens], position: Callable[[int, int], int] = _token_index
    ) -> tuple[int, list[int]]:
        """Fill in the tokens of ``items``, with outputs from the last sure token of each on.

        ``position`` returns llama.cpp's position of a sequence's token. Returns the number of
        tokens, and the indices of those with outputs."""
        n = 0
        outputs = list[int]()
        for seq, tokens, start, n_sure in items:
            first_output = n + n_sure - 1
            n_outputs = len(tokens) - n_sure + 1
            n = self.put(n, seq, tokens, position(seq, start), n_outputs=n_outputs)
            outputs += range(first_output, n)
        return n, outputs

    def fill(
        self, seq: int, tokens: Tokens, start: int, *, every: bool = False, last: bool = True
    ) -> None:
        """Fill in ``tokens`` of ``seq`` from position ``start`` on, with output of ``every`` or the
        ``last`` one.
        """
        self.put(0, seq, tokens, start, n_outputs=len(tokens) if every else int(last))


class RowBatch:
    """A llama_batch of embeddings of images or of other models' rows, ``width`` floats each."""

    def __init__(self, capacity: int, width: int) -> None:
        self._rows = np.zeros((capacity, width), np.float32)
        self._positions = np.zeros(4 * capacity, np.int32)
        self._batch = Batch(capacity)  # the arrays common to both kinds
        self.struct: Any = self._batch.struct
        self.struct.token = None  # type: ignore[assignment]
        for name, array in (("embd", self._rows), ("pos", self._positions)):
            setattr(
                self.struct, name, ctypes.cast(array.ctypes.data, type(getattr(self.struct, name)))
            )

    def fill(
        self,
        seq: int,
        rows: NDArray[np.float32],
        position: int,
        first: int,
        columns: int,
        *,
        last: bool,
    ) -> None:
        """Fill in rows from ``first`` on, (n, n_embd), of an image at ``position``; with ``last``,
        output the last.
        """
        at = np.arange(first, first + len(rows))
        # M-RoPE sections: the image's position, line, column, and an unused one.
        self._fill(seq, rows, (position, position + at // columns, position + at % columns, 0))
        self._batch.outputs[len(rows) - 1] = last

    def fill_text(self, seq: int, rows: NDArray[np.float32], start: int) -> None:
        """Fill in ``rows``, (n, n_embd), of tokens of text from position ``start`` on, without
        outputs.
        """
        at = np.arange(start, start + len(rows))
        self._fill(seq, rows, (at, at, at, 0))

    def _fill(
        self, seq: int, rows: NDArray[np.float32], sections: Sequence[NDArray[np.int64] | int]
    ) -> None:
        n = len(rows)
        self._rows[:n] = rows
        for i, positions in enumerate(sections):
            self._positions[i * n : (i + 1) * n] = positions
        self._batch.seqs[:n] = seq
        self._batch.outputs[:n] = 0
        self.struct.n_tokens = n


class Outputs:
    """The outputs of the last evaluation of ``ctx``: a row of ``n_vocab`` logits each, numbered
    from 0.
    """

    def __init__(self, ctx: Any, n_vocab: int) -> None:
        self.ctx = ctx
        self.n_vocab = n_vocab
        self._places: Sequence[int] = ()
        self._rows: NDArray[np.float32] | None = None
        # The rows of an earlier evaluation, at an address that llama.cpp mostly keeps.
        self._address = 0
        self._known: NDArray[np.float32] = np.empty((0, n_vocab), np.float32)
        self.is_recalled = False

    def set(self, places: Sequence[int]) -> None:
        """Take the outputs of the evaluation that has started, which belong to tokens ``places`` of
        its batch.
        """
        self._places = places
        self._rows = None
        self.is_recalled = False

    def recall(self, logits: NDArray[np.float32]) -> None:
        """Take ``logits``, shape (n_vocab,), as the only output."""
        self._places = (0,)
        self._rows = logits[None]
        self.is_recalled = True

    def batch_index(self, index: int) -> int:
        """Return the place of output ``index`` in the batch, for llama.cpp; none of its outputs is
        `recall`ed.
        """
        return self._places[index]

    def row(self, index: int) -> NDArray[np.float32]:
        """Return the logits of output ``index``, shape (n_vocab,), which the next evaluation
        overwrites. Waits for the device.
        """
        if self._rows is None:
            self._rows = self._evaluated_rows()
        row: NDArray[np.float32] = self._rows[index]
        return row

    def _evaluated_rows(self) -> NDArray[np.float32]:
        """Return the logits of all outputs, shape (n, n_vocab), at llama.cpp's address."""
        logits = api.llama_get_logits(self.ctx)
        address = ctypes.addressof(logits.contents)
        if address != self._address or len(self._known) != len(self._places):
            shape = (len(self._places), self.n_vocab)
            self._known = np.ctypeslib.as_array(logits, shape)
            self._address = address
        return self._known
