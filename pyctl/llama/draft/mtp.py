"""Drafts from an MTP head ("nextn" block) of the model, or from an EAGLE-3 draft model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyctl.engine.backend import SequenceTokens
from pyctl.errors import ModelError
from pyctl.llama.draft.head_rows import HeadRows
from pyctl.llama.library.batch import RowBatch
from pyctl.llama.library.bindings import api, ext
from pyctl.llama.library.native import NextnHead

__all__ = ["Eagle3", "MtpHead"]


class MtpHead(HeadRows):
    """A head that drafts ``n_max`` tokens at a time on ``ctx``, a context of type MTP, one token
    after the other.

    Row p is computed from the token at p and the trunk's hidden row before it. A draft evaluates
    pending rows with its first token. On a GPU each call evaluates ``n_max`` + 1 rows, some again,
    so that one graph serves all calls at the same cost. A draft ends before a token below
    probability ``p_min``. Raises ModelError. Otherwise as `HeadRows`.
    """

    type = "draft-mtp"
    layers: tuple[int, ...] = (-1,)
    gives_all = False

    def __init__(self, ctx: Any, n_max: int, *, p_min: float = 0.0, **options: Any) -> None:
        width = int(api.llama_model_n_embd_out(api.llama_get_model(ctx)))
        super().__init__(ctx, width, n_max + 1, **options)
        self._head = NextnHead(self._address, p_min, self.gives_all)
        try:
            if self._evaluate(0, 0, [0], self._none) != 0:
                raise ModelError("cannot evaluate the draft head of the model")
            self._open_memory()
        except BaseException:
            self._head.close()  # before the context is freed
            raise
        if self._memory.is_async:
            self.n_rows = self._window
            self._load_kernels(n_max)

    def _load_kernels(self, n_max: int) -> None:
        """Load the device's kernels of large batches and drafts, before the first request."""
        hidden = np.zeros((self._n_batch + 1, self._width), np.float32)
        self._evaluate(0, 0, [0] * self._n_batch, hidden)
        self._head.draft([(0, self._n_batch, [0], self._none[:1])], n_max, self.n_rows)
        self._memory.clear(0)

    def _evaluate(
        self, seq: int, start: int, tokens: Sequence[int], hidden: NDArray[np.float32]
    ) -> int:
        return int(self._head.evaluate(seq, start, tokens, hidden[:-1]))

    def _draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        """Evaluate pending rows and draft after them, in one call for all ``items``."""
        self._finish_copies()
        jobs = []
        for item in items:
            self._seek(item.seq, item.position)
            state = self._seqs[item.seq]
            if state.n_pending >= self._window:
                state = self._evaluate_pending(item.seq)
            # Rows that are evaluated again, so that each call has as many.
            n_spare = min(len(state.tokens), self.n_rows - 1, state.end - self.origin)
            n_before = max(n_spare, state.n_pending)
            tokens = [*state.tokens[len(state.tokens) - n_before :], *item.tokens]
            jobs.append((item.seq, state.end - n_before, tokens, state.hidden(n_before)))
        drafts, code = self._head.draft(jobs, n, self.n_rows)
        for item, (seq, start, _, _) in zip(items, jobs, strict=True):
            state = self._seqs[seq]
            if code == 0:
                state.last = state.end + 1
                state.ahead = item.tokens[0]
                continue
            n_held = int(api.llama_memory_seq_pos_max(self._cells, seq)) + 1
            if n_held:
                state.last = min(n_held, state.end)
            else:
                state.first = start
                state.last = start
        self._log_failure(code)
        return [tuple(draft) for draft in drafts]

    def close(self) -> None:
        self._head.close()
        super().close()


class Eagle3(MtpHead):
    """A head that drafts on ``ctx`` of an EAGLE-3 model, which fuses its hidden rows from the
    inputs of the trunk's ``layers``.
    """

    type = "draft-eagle3"
    gives_all = True
    origin = 1
    _batch: RowBatch | None = None

    def __init__(self, ctx: Any, n_max: int, layers: tuple[int, ...], **options: Any) -> None:
        self.layers = layers
        super().__init__(ctx, n_max, **options)

    def _append(self, seq: int, tokens: list[int], hidden: NDArray[np.float32] | None) -> None:
        assert hidden is not None
        super()._append(seq, tokens, self._fused(hidden))

    def _fused(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the hidden rows of the trunk's ``rows``, zeros where llama.cpp fails, which costs
        only drafts.
        """
        fused = np.zeros((len(rows), self._width), np.float32)
        if self._batch is None:
            self._batch = RowBatch(self._n_batch, rows.shape[1])
        ext.llama_set_embeddings_nextn(self._ctx, True, False)
        for first in range(0, len(rows), self._n_batch):
            part = rows[first : first + self._n_batch]
            # The positions only have to follow the memory's.
            start = int(api.llama_memory_seq_pos_max(self._cells, 0)) + 1
            self._batch.fill_text(0, part, start)
            code = int(api.llama_encode(self._ctx, self._batch.struct))
            self._log_failure(code)
            if code == 0:
                pointer = ext.llama_get_embeddings_nextn(self._ctx)
                result = np.ctypeslib.as_array(pointer, (len(part), self._width))
                fused[first : first + len(part)] = result
        return fused
