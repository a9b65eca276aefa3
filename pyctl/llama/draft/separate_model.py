"""Drafts from a separate small model that follows the large one in every sequence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.snapshot import NOTHING, Block
from pyctl.engine.backend import SequenceTokens
from pyctl.errors import ModelError
from pyctl.llama.draft.draft_model import SIGNATURE_BYTES, BlockSpan, DraftModel
from pyctl.llama.draft.greedy import Greedy
from pyctl.llama.library.pinned_memory import allocate

__all__ = ["SeparateModel"]

NO_CELLS = 1
"""llama_decode's result for lack of cells; the context is unchanged."""

SMALL = 32
"""Batches of fewer tokens wait for the next draft and join its first batch."""


@dataclass
class _SequenceState:
    """The draft model's state of a sequence, in which the trunk has ``end`` tokens.

    The context holds the trunk's tokens [first, last), then ``ahead``: the unconfirmed tokens that
    were evaluated for a draft. ``pending`` are the trunk's tokens from ``last`` on, by batch. A
    recurrent state cannot be cut: there is a copy at ``checkpoint``; the state is stale if it does
    not belong to the last row.
    """

    first: int = 0
    last: int = 0
    pending: list[list[int]] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    checkpoint: int = -1
    is_stale: bool = False

    @property
    def end(self) -> int:
        return self.last + sum(map(len, self.pending))


class SeparateModel(DraftModel):
    """A draft model on ``ctx``, a context of ``model`` with the trunk's number of sequences; owns
    both once constructed.

    `Greedy` decides where a draft ends, by the trunk's ``n_vocab`` and by ``p_min``. Raises
    ModelError for a model that cannot draft. Otherwise as `DraftModel`.
    """

    type = "draft-simple"
    _seqs: list[_SequenceState]

    def __init__(
        self,
        model: Any,
        ctx: Any,
        n_vocab: int,
        *,
        p_min: float = 0.0,
        identity: str = "",
        attach: Callable[[int], None] = lambda address: None,
    ) -> None:
        """Evaluate one token to check the model. Raises ModelError if it cannot draft."""
        super().__init__(ctx, model, identity, attach)
        self._drafts: list[tuple[int, ...]] = [()] * len(self._seqs)  # the latest ones
        self.greedy = Greedy(ctx, n_vocab, p_min)
        try:
            if self.greedy.decode(self.greedy.put(0, 0, [0], 0)) != 0:
                raise ModelError("cannot evaluate the draft model")
            self._open_memory(marks=True)
            self._is_hybrid = self._memory.kind == "hybrid"
            self.greedy.sample_on_device()
        except BaseException:
            self._close_memory()
            self.greedy.close()
            raise

    def _sequence_at(self, n: int) -> _SequenceState:
        return _SequenceState(n, n)

    def _unusable(self) -> str:
        if not self._memory.can_hold:
            return "the memory of the draft model has no rollback"
        if self._memory.window[0]:
            # Each draft is an evaluation of its own, and a later one may take the cell of a row
            # that the first wrong draft still attends to. A snapshot has no rows of its window
            # either: after a restore the model would draft without the text before.
            return "the memory of the draft model has no rollback: it has a sliding window"
        return ""

    # -- following
    # ----------------------------------------------------------------------------------

    def _append(self, seq: int, tokens: list[int], hidden: NDArray[np.float32] | None) -> None:
        state = self._seqs[seq]
        joins_last = state.pending and len(state.pending[-1]) + len(tokens) < 2 * SMALL
        if joins_last:
            state.pending[-1] += tokens
            return
        if state.pending:
            self._evaluate_pending(seq)
        self._seqs[seq].pending.append(tokens)

    def truncate(self, seq: int, n: int) -> None:
        state = self._seqs[seq]
        if n < state.first:
            self._restart(seq, n)
        elif n < state.last:
            self._cut(seq, n)
            state.pending = []
        elif n < state.end:
            left = list(itertools.chain(*state.pending))[: n - state.last]
            state.pending = [left] if left else []

    def _cut(self, seq: int, n: int) -> None:
        """Cut the context to [first, n)."""
        state = self._seqs[seq]
        if self._is_hybrid and state.checkpoint == n:
            self._memory.reset(seq)
        else:
            self._memory.rewind(seq, n)
            state.is_stale = self._is_hybrid
        state.last = n
        state.ahead = []
        state.checkpoint = -1

    def _confirm(self, seq: int) -> None:
        """Compare ``ahead`` with the trunk's tokens and keep the common prefix."""
        state = self._seqs[seq]
        if state.ahead:
            pending = list(itertools.chain(*state.pending))
            n_same = self._keep_confirmed(seq, pending)
            state.pending = [pending[n_same:]] if n_same < len(pending) else []
        if state.is_stale:
            self._restart(seq, state.last)
            self._seqs[seq].pending = state.pending

    def _keep_confirmed(self, seq: int, pending: list[int]) -> int:
        """Keep the tokens ahead that the trunk has as ``pending``, as far as the context can be cut
        to them; return how many.
        """
        state = self._seqs[seq]
        n_same = 0
        for drafted, token in zip(state.ahead, pending, strict=False):
            if drafted != token:
                break
            n_same += 1
        last = state.last + n_same
        if n_same == len(state.ahead):
            state.last = last
            state.ahead = []
            state.checkpoint = -1
            return n_same
        if self._is_hybrid and state.last <= state.checkpoint <= last:
            last = state.checkpoint
        n_same = last - state.last
        self._cut(seq, last)
        return n_same

    def _evaluate_pending(self, seq: int) -> _SequenceState:
        """Evaluate the pending tokens in their original batches; on failure drop all rows."""
        self._confirm(seq)
        state = self._seqs[seq]
        end = state.end
        parts = []
        for tokens in state.pending:
            for first in range(0, len(tokens), self._n_batch):
                parts.append(tokens[first : first + self._n_batch])
        state.pending = []
        for part in parts:
            n_tokens = self.greedy.put(0, seq, part, state.last, n_outputs=0)
            code = self.greedy.decode(n_tokens)
            if code != 0:
                self._restart(seq, end)
                self._log_failure(code)
                break
            state.last += len(part)
        return self._seqs[seq]

    # -- drafting
    # ----------------------------------------------------------------------------------

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        group: list[tuple[SequenceTokens, list[int]]] = []
        n_tokens = 0
        for item in items:
            if self._has_drafted(item, n):
                continue
            tokens = self._evaluate_overflow(item)
            if n_tokens + len(tokens) > self._n_batch:
                self._draft(group, n)
                group = []
                n_tokens = 0
            group.append((item, tokens))
            n_tokens += len(tokens)
        if group:
            self._draft(group, n)
        return [self._drafts[item.seq][:n] for item in items]

    def _has_drafted(self, item: SequenceTokens, n: int) -> bool:
        """Return whether the last draft is for the same tokens and unused, for example for lack of
        cells.
        """
        state = self._seqs[item.seq]
        is_here = state.end == state.last == item.position
        is_same = is_here and tuple(state.ahead[: len(item.tokens)]) == item.tokens
        return is_same and len(self._drafts[item.seq]) >= n

    def _evaluate_overflow(self, item: SequenceTokens) -> list[int]:
        """Evaluate pending tokens that do not fit into one batch with ``item``; return that
        batch.
        """
        self._seek(item.seq, item.position)
        self._confirm(item.seq)
        state = self._seqs[item.seq]
        last = state.pending.pop() if state.pending and len(state.pending[-1]) < SMALL else []
        self._evaluate_pending(item.seq)
        tokens = [*last, *item.tokens]
        n_early = max(len(tokens) - self._n_batch, 0)
        if n_early:
            self._seqs[item.seq].pending = [tokens[:n_early]]
            self._evaluate_pending(item.seq)
        return tokens[n_early:]

    def _draft(self, group: Sequence[tuple[SequenceTokens, list[int]]], n: int) -> None:
        """Draft after the tokens of each item; together they are one batch."""
        outputs = []
        n_tokens = 0
        for item, tokens in group:
            start = item.position + len(item.tokens) - len(tokens)
            n_tokens = self.greedy.put(n_tokens, item.seq, tokens, start)
            outputs.append(n_tokens - 1)
        code = self.greedy.decode(n_tokens)
        for item, tokens in group:
            self._drafts[item.seq] = ()
            if code == 0:
                self._begin_draft(item, n)
            elif code == NO_CELLS:
                early = tokens[: -len(item.tokens)]
                self._seqs[item.seq].pending = [early] if early else []
            else:
                self._restart(item.seq, item.position)
        if code != 0:
            self._log_failure(code)
            return
        items = (item for item, _ in group)
        self._extend_drafts(list(zip(items, outputs, strict=True)), n)

    def _begin_draft(self, item: SequenceTokens, n: int) -> None:
        """Record that the item's tokens were evaluated to draft ``n`` tokens after them."""
        state = self._seqs[item.seq]
        state.last = item.position
        state.ahead = list(item.tokens)
        if self._is_hybrid and n > 1:
            state.checkpoint = item.position + len(item.tokens)
            self._memory.mark(item.seq, state.checkpoint)

    def _extend_drafts(self, outputs: list[tuple[SequenceTokens, int]], n: int) -> None:
        """Draft up to ``n`` tokens for each item, after its output: one token of all at a time."""
        while outputs:
            chosen = [(item, self.greedy.choose(output)) for item, output in outputs]
            outputs = []
            n_tokens = 0
            for item, token in chosen:
                if token < 0:  # the draft ends
                    continue
                self._drafts[item.seq] += (token,)
                if len(self._drafts[item.seq]) < n:
                    outputs.append((item, n_tokens))
                    position = item.position + len(self._seqs[item.seq].ahead)
                    n_tokens = self.greedy.put(n_tokens, item.seq, [token], position)
            if not outputs:
                return
            code = self.greedy.decode(n_tokens)
            if code != 0:
                if code != NO_CELLS:
                    for item, _ in outputs:
                        self._restart(item.seq, item.position)
                self._log_failure(code)
                return
            for item, _ in outputs:
                self._seqs[item.seq].ahead.append(self._drafts[item.seq][-1])

    # -- rows and state
    # ----------------------------------------------------------------------------------

    def load_rows(self, seq: int, first: int, spans: Sequence[BlockSpan]) -> None:
        last = spans[-1][2] if spans else first
        self.truncate(seq, first)
        are_own = all(self._is_own(block) for block, _, _ in spans)
        if self._seqs[seq].end != first or not are_own or not self._load(seq, first, spans):
            self._restart(seq, last)

    def _load(self, seq: int, first: int, spans: Sequence[BlockSpan]) -> bool:
        """Append this model's rows; return False on failure."""
        state = self._seqs[seq]
        if state.pending:  # otherwise keep a stale state: a hybrid's rows load before its state
            state = self._evaluate_pending(seq)
        if state.ahead:
            self._cut(seq, first)
        parts = [(block[SIGNATURE_BYTES:], p0, p1) for block, p0, p1 in spans]
        try:
            self._memory.load(seq, first, parts)
        except (ValueError, RuntimeError):
            return False
        state.last = spans[-1][2] if spans else first
        state.is_stale = self._is_hybrid and state.last > 0
        state.checkpoint = -1
        return True

    def state_size(self, seq: int) -> int:
        return SIGNATURE_BYTES + self._memory.state_size(seq) if self._is_hybrid else 0

    def save_state(self, seq: int, n: int, out: Block | None = None) -> Block:
        if not self._is_hybrid or self._seqs[seq].end != n or n == 0:
            return NOTHING
        state = self._evaluate_pending(seq)
        if state.ahead:
            self._cut(seq, n)
        if state.first > 0 or state.last != n or state.is_stale:
            return NOTHING
        block = allocate(self.state_size(seq)) if out is None else out
        self._memory.save_state(seq, n, block[SIGNATURE_BYTES:])
        return self._signed(block)

    def load_state(self, seq: int, n: int, block: Block) -> None:
        state = self._seqs[seq]
        if not state.is_stale or state.end != n:
            return
        if block.size != self.state_size(seq) or not self._is_own(block):
            return
        with suppress(ValueError, RuntimeError):
            self._memory.load(seq, n, [], block[SIGNATURE_BYTES:])
            state.is_stale = False

    def close(self) -> None:
        self.greedy.close()
        super().close()
