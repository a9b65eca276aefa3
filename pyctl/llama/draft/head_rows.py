"""Rows of draft models that follow the rows of their trunk: heads, and files that read rows of its
layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.snapshot import NOTHING, Block
from pyctl.engine.backend import SequenceTokens
from pyctl.llama.draft.draft_model import SIGNATURE_BYTES, BlockSpan, DraftModel
from pyctl.llama.library.bindings import api
from pyctl.settings.limit import limit

__all__ = ["DraftSequence", "HeadRows"]

FIRST_AND_LAST = slice(SIGNATURE_BYTES + 16, SIGNATURE_BYTES + 32)
"""The range of rows in a block, two int64 (csrc/core/block.h)."""

MAX_SPARE = limit(64, "spare hidden rows for a draft head", "the oldest are forgotten", "memory")


class DraftSequence:
    """The draft model's state of one sequence, in which the trunk has ``end`` tokens.

    It holds rows [first, last), and possibly one at ``end`` for the expected token ``ahead``.
    ``tokens`` are the latest before ``end``, at least those of missing rows; `hidden` has the
    trunk's rows for these and the token before.
    """

    def __init__(self, width: int, n: int = 0, origin: int = 0) -> None:
        """Start at ``n`` without earlier rows; the first row that there can be is ``origin``."""
        self.end = n
        self.first = self.last = max(n, origin)
        self.tokens: list[int] = []
        self.ahead = -1
        self.is_known = n == 0  # whether the last hidden row is known; zeros replace an unknown one
        self._rows = np.zeros((1, width), np.float32)
        self._n_rows = 1

    @property
    def n_pending(self) -> int:
        """The rows that are missing up to ``end``."""
        return max(self.end - self.last, 0)

    def hidden(self, n: int) -> NDArray[np.float32]:
        """Return the hidden rows of the latest ``n`` tokens and of the token before them, shape (n
        + 1, width).
        """
        return self._rows[self._n_rows - n - 1 : self._n_rows]

    def append(self, tokens: list[int], hidden: NDArray[np.float32]) -> None:
        """Append ``tokens`` with their hidden rows, shape (len(tokens), width)."""
        n = self._n_rows + len(tokens)
        if n > len(self._rows):
            grown = np.empty((2 * n, self._rows.shape[1]), np.float32)
            grown[: self._n_rows] = self._rows[: self._n_rows]
            self._rows = grown
        self._rows[self._n_rows : n] = hidden
        self._n_rows = n
        self.end += len(tokens)
        self.is_known = True
        self.tokens += tokens

    def drop(self, n: int) -> None:
        """Remove the last ``n`` tokens."""
        self.end -= n
        if n <= len(self.tokens):
            del self.tokens[len(self.tokens) - n :]
            self._n_rows -= n
        else:
            self.reset_hidden(np.zeros(self._rows.shape[1], np.float32), is_known=self.end == 0)

    def reset_hidden(self, row: NDArray[np.float32], *, is_known: bool) -> None:
        """Set ``row``, shape (width,), as the only hidden row, the last token's."""
        self._rows = np.array(row[None])
        self._n_rows = 1
        self.tokens = []
        self.is_known = is_known

    def forget_all_but(self, n: int) -> None:
        """Keep the latest ``n`` tokens and at most MAX_SPARE more."""
        n_more = len(self.tokens) - n
        if n_more > (MAX_SPARE if n else 0):
            self._rows = np.array(self.hidden(n))
            self._n_rows = n + 1
            del self.tokens[:n_more]


class HeadRows(DraftModel):
    """The base of draft models that make their rows from the trunk's.

    Rows of small batches stay pending until the next draft. A subclass makes rows from the trunk's
    (`_evaluate`) and how they draft (`_draft`). ``width`` is how wide the trunk's rows are in
    `DraftSequence`, ``window`` the maximum of pending rows.
    """

    _seqs: list[DraftSequence]

    def __init__(
        self,
        ctx: Any,
        width: int,
        window: int,
        *,
        model: Any = None,
        identity: str = "",
        attach: Callable[[int], None] = lambda address: None,
    ) -> None:
        self._width = width
        super().__init__(ctx, model, identity, attach)
        self._window = window
        self._cells = api.llama_get_memory(ctx)
        self._max_pending = max(self._n_batch // 2, window)
        self._none = np.zeros((2, width), np.float32)
        self.n_rows = 1  # per call

    def _sequence_at(self, n: int) -> DraftSequence:
        return DraftSequence(self._width, n, self.origin)

    def _unusable(self) -> str:
        if self._memory.kind == "opaque":
            return "no rows of the draft model can be moved: llama.cpp saves them as a whole only"
        return ""

    @abstractmethod
    def _evaluate(
        self, seq: int, start: int, tokens: Sequence[int], hidden: NDArray[np.float32]
    ) -> int:
        """Add rows of ``tokens`` from ``start`` on; return llama_decode's result.

        ``hidden``, shape (len(tokens) + 1, width), are the trunk's rows of these and of the token
        before them.
        """

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        drafts: list[tuple[int, ...]] = []
        n_together = max(self._n_batch // self._window, 1)
        for first in range(0, len(items), n_together):
            drafts += self._draft(items[first : first + n_together], n)
        return drafts

    @abstractmethod
    def _draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        """Draft as `draft`, for items that fit into one batch."""

    # -- following
    # ----------------------------------------------------------------------------------

    def _append(self, seq: int, tokens: list[int], hidden: NDArray[np.float32] | None) -> None:
        assert hidden is not None
        state = self._seqs[seq]
        if state.last > state.end and state.ahead != tokens[0]:  # another token was expected
            self._cut(seq, state.end)
        state.append(tokens, hidden)
        if state.n_pending >= self._max_pending:
            state = self._evaluate_pending(seq)
        # After a prompt's batch keep only the rows of a snapshot; later, also those needed after
        # rejected drafts.
        n_before = 0
        if self.n_rows > 1 and len(tokens) <= self._window:
            n_before = self.n_rows - 1 + self._window
        state.forget_all_but(max(state.n_pending, n_before))

    def truncate(self, seq: int, n: int) -> None:
        state = self._seqs[seq]
        if state.end > n:
            state.drop(state.end - n)
            if state.last > n:
                self._cut(seq, n)

    def _cut(self, seq: int, n: int) -> None:
        """Drop the rows from ``n`` on."""
        self._finish_copies()
        api.llama_memory_seq_rm(self._cells, seq, n, -1)
        state = self._seqs[seq]
        state.last = max(n, self.origin)
        state.first = min(state.first, state.last)

    def _evaluate_pending(self, seq: int) -> DraftSequence:
        state = self._seqs[seq]
        while state.n_pending > 0:
            n_pending = state.n_pending
            n = min(n_pending, self._n_batch)
            tokens = state.tokens[len(state.tokens) - n_pending :][:n]
            code = self._evaluate(seq, state.last, tokens, state.hidden(n_pending)[: n + 1])
            if code != 0:
                self._restart(seq, state.end)
                self._log_failure(code)
                break
            state.last += n
        return self._seqs[seq]

    # -- rows and hidden state
    # ----------------------------------------------------------------------------------

    def load_rows(self, seq: int, first: int, spans: Sequence[BlockSpan]) -> None:
        state = self._evaluate_pending(seq)
        if state.last > first:
            self._cut(seq, first)
        last = spans[-1][2] if spans else first
        own = self._own_at_end(spans)
        follows = state.end == first and len(own) == len(spans)
        if not follows:  # rows before those are unknown
            self._restart(seq, own[0][1] if own else last)
        if own and not self._load(seq, own):
            self._restart(seq, last)
        self._seqs[seq].reset_hidden(self._none[0], is_known=last == 0)

    def _own_at_end(self, spans: Sequence[BlockSpan]) -> Sequence[BlockSpan]:
        """Return the last of ``spans`` that this draft model saved, with none of another between
        them.
        """
        n = sum(1 for _ in takewhile(lambda span: self._is_own(span[0]), reversed(spans)))
        return spans[len(spans) - n :]

    def _load(self, seq: int, spans: Sequence[BlockSpan]) -> bool:
        """Append this head's rows; return False on failure."""
        state = self._seqs[seq]
        # The extension appends only to existing rows, so a temporary row precedes the first ones.
        begins_late = state.first == state.last > 0
        if begins_late and self._evaluate(seq, state.last - 1, [0], self._none) != 0:
            return False
        parts = []
        try:
            for block, first, last in spans:
                first_row = max(first, self.origin)
                if first_row < last:
                    parts.append((self._unpadded(block), first_row, last))
            self._memory.load(seq, state.last, parts)
        except (ValueError, RuntimeError):
            return False
        if begins_late:
            api.llama_memory_seq_rm(self._cells, seq, state.last - 1, state.last)
        state.end = spans[-1][2]
        state.last = max(state.end, self.origin)
        return True

    def _unpadded(self, block: Block) -> Block:
        """Return the rows that the extension saved in ``block``, which may have room for a row
        before `origin` after it.
        """
        rows = block[SIGNATURE_BYTES:]
        if not self.origin or rows.size < int(self._memory.rows_size(0, 1)):
            return rows
        first, last = map(int, block[FIRST_AND_LAST].view(np.int64))
        return rows[: int(self._memory.rows_size(first, last))] if first == self.origin else rows

    def state_size(self, seq: int) -> int:
        return SIGNATURE_BYTES + int(self._none[0].nbytes)

    def save_state(self, seq: int, n: int, out: Block | None = None) -> Block:
        state = self._seqs[seq]
        if state.end != n or not state.is_known:
            return NOTHING
        block = np.empty(self.state_size(seq), np.uint8) if out is None else out
        block[SIGNATURE_BYTES:] = state.hidden(0)[0].view(np.uint8)
        return self._signed(block)

    def load_state(self, seq: int, n: int, block: Block) -> None:
        self._seek(seq, n)
        if block.size == self.state_size(seq) and self._is_own(block):
            row = np.array(block[SIGNATURE_BYTES:]).view(np.float32)
            self._evaluate_pending(seq).reset_hidden(row, is_known=True)
