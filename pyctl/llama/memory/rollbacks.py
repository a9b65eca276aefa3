"""Rollbacks of drafts: how far the last evaluation of each sequence can be taken back.

There are three ways back:

  cut      Rows alone are the sequence: llama.cpp drops those after any position. Of layers
           with a sliding window it keeps all rows that the first token of the last evaluation
           attends to, and thus those of each later one.
  planes   A recurrent cell keeps the states after its last tokens of an evaluation
           (`llama_n_rs_seq` of them): llama.cpp returns to one of these.
  mark     `KVState.mark` copies the state before an evaluation: the sequence returns to its
           start, and its sure tokens are evaluated again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from pyctl.engine.backend import SequenceTokens
from pyctl.llama.library.native import KVState, checked

__all__ = ["Rollbacks"]

PLAIN_STEPS = 8
"""Steps without drafts before planes are no longer written: a GPU captures another graph then,
which single steps between drafts are not worth."""

NO_MARKS: Mapping[int, int] = MappingProxyType({})


class Floors(NamedTuple):
    """The minimum counts of tokens to which a sequence can be rolled back, -1 for not at all.

    Attributes:
        by_cut: The minimum for a cut or a plane.
        by_mark: The minimum for the mark.
    """

    by_cut: int = -1
    by_mark: int = -1


class Rollbacks:
    """The rollbacks of the sequences of ``kv``, None for a memory without a context.

    Attributes:
        can_cut: Whether a sequence continues wherever its last evaluation was cut.
        n_ctx: The limit of tokens of one sequence.
    """

    def __init__(
        self, kv: KVState | None = None, *, n_state_history: int = 0, n_ubatch: int = 0
    ) -> None:
        """``n_state_history`` states of a recurrent cell can be gone back to; an evaluation has at
        most ``n_ubatch`` tokens.
        """
        self.can_cut = False
        self.n_ctx = 0
        self._kv = kv
        self._n_state_history = n_state_history
        self._n_ubatch = n_ubatch
        self._floors: dict[int, Floors] = {}  # by sequence
        self._n_plain_steps = 0  # the latest steps, none of which had drafts
        self._keeps_history = True

    @property
    def n_rollback(self) -> int:
        """See `BackendFacts`."""
        return self.n_ctx if self.can_cut else self._n_state_history

    @property
    def max_drafts(self) -> int:
        """See `BackendFacts`."""
        if self._kv is not None and self._kv.has_marks:
            return self._n_ubatch - 1  # the others are drafts
        return self.n_rollback

    def mark(self, items: Sequence[SequenceTokens]) -> dict[int, int]:
        """Mark the starts of ``items`` whose drafts require it, before their evaluation, and have
        it write planes if it needs them.

        Returns the minimum count to which a rollback may use the mark, -1 for none, by sequence;
        those with one token have nothing to roll back.
        """
        marks = {}
        for item in items:
            if len(item.tokens) == 1:
                continue
            marks[item.seq] = -1
            if self._kv is not None and self.n_rollback < item.n_drafts <= self.max_drafts:
                checked(self._kv.mark, item.seq, item.position)
                marks[item.seq] = item.position + item.n_committed
        self._n_plain_steps = 0 if marks else self._n_plain_steps + 1
        if self._n_state_history:
            self._keep_history(self._n_plain_steps <= PLAIN_STEPS)
        return marks

    def _keep_history(self, keeps: bool) -> None:
        """Have the next evaluations write planes, or not.

        Each plane takes a kernel in every recurrent layer (`bench.gpu.step_costs` has the time).
        llama.cpp uses a graph again for as many tokens of as many sequences, whether it writes
        planes or not. So only evaluations of one token a sequence, which are never rolled back, go
        without.
        """
        if keeps != self._keeps_history:
            assert self._kv is not None
            self._kv.keep_history(keeps)
            self._keeps_history = keeps

    def record(
        self, items: Sequence[SequenceTokens] = (), marks: Mapping[int, int] = NO_MARKS
    ) -> None:
        """Record an evaluation of ``items`` with drafts and ``marks``: `roll_back` applies to
        these only. Evaluations that follow write planes again.
        """
        if self._n_state_history:
            self._keep_history(True)
        if not marks:
            self._floors = {}
            return
        cuts = self._cut_floors(items)
        self._floors = {seq: Floors(cuts.get(seq, -1), marked) for seq, marked in marks.items()}

    def _cut_floors(self, items: Sequence[SequenceTokens]) -> dict[int, int]:
        """Return by sequence the minimum count to which the last evaluation can be rolled back
        without a mark.

        llama.cpp reports success even if it cannot roll back. With unequal token counts it splits
        the batch, and each part may move the cells of others without their planes.
        """
        if self.can_cut:
            return {item.seq: item.position + item.n_committed for item in items}
        has_equal_counts = len({len(item.tokens) for item in items}) == 1
        if not self.n_rollback or not has_equal_counts:
            return {}
        floors = {}
        for item in items:
            end = item.position + len(item.tokens)
            floors[item.seq] = max(item.position + item.n_committed, end - self._n_state_history)
        return floors

    def forget(self, seq: int) -> None:
        """Allow no rollback of ``seq`` until its next evaluation."""
        self._floors.pop(seq, None)

    def roll_back(self, seq: int, n: int, end: int) -> int | None:
        """Drop the tokens of ``seq`` from ``n`` on, out of ``end``, once.

        Returns how many tokens it has now, fewer than ``n`` after the use of a mark; None, and
        nothing usable in ``seq``, if ``n`` cannot be reached.
        """
        floors = self._floors.pop(seq, Floors())
        if n == end:
            return n
        assert self._kv is not None
        if 0 < floors.by_cut <= n < end and checked(self._kv.cut, seq, n):
            return n
        if 0 < floors.by_mark <= n < end:
            return checked(self._kv.reset, seq)
        return None
