"""Drafts from a separate small model that follows the large one in every sequence."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from pyctl.cache import NOTHING, Block
from pyctl.engine.backend import SequenceTokens
from pyctl.errors import ModelError
from pyctl.llama.draft.draft_model import (
    SIGNATURE_BYTES,
    BlockSpan,
    DraftModel,
    is_signed,
    signature,
)
from pyctl.llama.draft.greedy import Greedy
from pyctl.llama.library import KVState, allocate, unfit

__all__ = ["SeparateModel"]

NO_CELLS = 1
"""llama_decode's result for lack of cells; the context is unchanged."""

SMALL = 32
"""Batches of fewer tokens wait for the next draft and join its first batch."""


@dataclass
class _SequenceState:
    """The draft model's state of a sequence, in which the trunk has ``end`` tokens.

    The context holds the trunk's tokens [first, held), then ``ahead``: the unconfirmed tokens
    evaluated for ``draft``. ``pending`` are the trunk's tokens from ``held`` on, by batch. A
    recurrent state cannot be cut: there is a copy at ``mark``; the state is stale if it does not
    belong to the last held row.
    """

    first: int = 0
    held: int = 0
    pending: list[list[int]] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    draft: tuple[int, ...] = ()
    mark: int = -1
    is_stale: bool = False

    @property
    def end(self) -> int:
        return self.held + sum(map(len, self.pending))


class SeparateModel(DraftModel):
    """Drafts on ``ctx``, a context of ``model`` with the trunk's number of sequences; owns both
    once constructed.

    `Greedy` decides where a draft ends, by the trunk's ``n_vocab`` and by ``p_min``. ``identity``
    identifies the file. ``attach`` attaches `Pulse` to the context at an address. Raises ModelError
    for a model that cannot draft.
    """

    type = "draft-simple"
    layers: tuple[int, ...] = ()

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
        self._model = model
        self._ctx = ctx
        self._n_batch = int(api.llama_n_ubatch(ctx))
        self._greedy = Greedy(ctx, n_vocab, p_min)
        self._seqs = [_SequenceState() for _ in range(int(api.llama_n_seq_max(ctx)))]
        try:
            address = ctypes.cast(ctx, ctypes.c_void_p).value or 0
            attach(address)
            if self._greedy.decode(self._greedy.put(0, 0, [0], 0)) != 0:
                raise ModelError("cannot evaluate the draft model")
            self._memory = KVState(address, 0, marks=True, unfit=unfit)
            self._memory.clear(0)
            if not self._memory.can_hold or self._memory.window[0]:
                raise ModelError("the memory of the draft model has no rollback")
            self._is_hybrid = self._memory.kind == "hybrid"
            self._signature = signature(self.type, identity, self._memory.layout)
            self._greedy.sample_on_device()
        except BaseException:
            self._let_go()
            raise

    # -- following
    # ----------------------------------------------------------------------------------

    def follow(
        self, seq: int, tokens: Sequence[int], start: int, hidden: NDArray[np.float32] | None
    ) -> None:
        at = self._seqs[seq]
        if start > at.end:
            self._restart(seq, start)
        new = [int(token) for token in tokens[at.end - start :]]
        if not new:
            return
        joined = at.pending and len(at.pending[-1]) + len(new) < 2 * SMALL
        if at.pending and not joined:
            self._evaluate_pending(seq)
        if joined:
            at.pending[-1] += new
        else:
            at.pending.append(new)

    def keep(self, seq: int, n: int) -> None:
        at = self._seqs[seq]
        if n < at.first:
            self._restart(seq, n)
        elif n < at.held:
            self._cut(seq, n)
            at.pending = []
        elif n < at.end:
            at.pending = [list(itertools.chain(*at.pending))[: n - at.held]] if n > at.held else []

    def clear(self, seq: int) -> None:
        self._memory.clear(seq)
        at = self._seqs[seq]
        at.first = at.held = 0
        at.pending = []
        at.ahead = []
        at.mark = -1
        at.is_stale = False

    def _restart(self, seq: int, n: int) -> None:
        """Restart at ``n`` without earlier rows."""
        self.clear(seq)
        self._seqs[seq].first = self._seqs[seq].held = n

    def _cut(self, seq: int, n: int) -> None:
        """Cut the context to [first, n)."""
        at = self._seqs[seq]
        if self._is_hybrid and at.mark == n:
            self._memory.reset(seq)
        else:
            self._memory.rewind(seq, n)
            at.is_stale = self._is_hybrid
        at.held = n
        at.ahead = []
        at.mark = -1

    def _confirm(self, seq: int) -> None:
        """Compare ``ahead`` with the trunk's tokens and keep the common prefix."""
        at = self._seqs[seq]
        pending = list(itertools.chain(*at.pending))
        if at.ahead:
            pairs = enumerate(zip(at.ahead, pending, strict=False))
            n_same = next(
                (i for i, (mine, true) in pairs if mine != true), min(len(at.ahead), len(pending))
            )
            held = at.held + n_same
            if n_same == len(at.ahead):
                at.held = held
                at.ahead = []
                at.mark = -1
            else:
                if self._is_hybrid and at.held <= at.mark <= held:
                    held = at.mark
                n_same = held - at.held
                self._cut(seq, held)
            at.pending = [pending[n_same:]] if n_same < len(pending) else []
        if at.is_stale:
            batches = at.pending
            self._restart(seq, at.held)
            at.pending = batches

    def _evaluate_pending(self, seq: int) -> None:
        """Evaluate the pending tokens in their original batches; on failure drop all rows."""
        self._confirm(seq)
        at = self._seqs[seq]
        end = at.end
        n = self._n_batch
        parts = [
            tokens[first : first + n] for tokens in at.pending for first in range(0, len(tokens), n)
        ]
        at.pending = []
        for part in parts:
            code = self._greedy.decode(self._greedy.put(0, seq, part, at.held, n_outputs=0))
            if code != 0:
                self._restart(seq, end)
                return self._note(code)
            at.held += len(part)

    # -- drafting
    # ----------------------------------------------------------------------------------

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        group: list[tuple[SequenceTokens, list[int]]] = []
        n_tokens = 0
        for item in items:
            if self._has_drafted(item, n):
                continue
            tokens = self._prepare(item)
            if n_tokens + len(tokens) > self._n_batch:
                self._draft(group, n)
                group = []
                n_tokens = 0
            group.append((item, tokens))
            n_tokens += len(tokens)
        if group:
            self._draft(group, n)
        return [self._seqs[item.seq].draft[:n] for item in items]

    def _has_drafted(self, item: SequenceTokens, n: int) -> bool:
        """Whether the last draft is for the same tokens and unused, for example for lack of
        cells.
        """
        at = self._seqs[item.seq]
        is_same = (
            at.end == at.held == item.position
            and tuple(at.ahead[: len(item.tokens)]) == item.tokens
        )
        return is_same and len(at.draft) >= n

    def _prepare(self, item: SequenceTokens) -> list[int]:
        """Evaluate pending tokens that do not fit into one batch with ``item``; return that
        batch.
        """
        at = self._seqs[item.seq]
        if at.end < item.position:
            self._restart(item.seq, item.position)
        else:
            self.keep(item.seq, item.position)
        self._confirm(item.seq)
        last = at.pending.pop() if at.pending and len(at.pending[-1]) < SMALL else []
        self._evaluate_pending(item.seq)
        tokens = [*last, *item.tokens]
        n_early = max(len(tokens) - self._n_batch, 0)
        if n_early:
            at.pending = [tokens[:n_early]]
            self._evaluate_pending(item.seq)
        return tokens[n_early:]

    def _draft(self, group: Sequence[tuple[SequenceTokens, list[int]]], n: int) -> None:
        """Draft after the tokens of each item; together they are one batch."""
        outputs = []
        n_tokens = 0
        for item, tokens in group:
            n_tokens = self._greedy.put(
                n_tokens, item.seq, tokens, item.position + len(item.tokens) - len(tokens)
            )
            outputs.append(n_tokens - 1)
        code = self._greedy.decode(n_tokens)
        for item, tokens in group:
            at = self._seqs[item.seq]
            at.draft = ()
            if code == 0:
                at.held = item.position
                at.ahead = list(item.tokens)
                if self._is_hybrid and n > 1:
                    at.mark = item.position + len(item.tokens)
                    self._memory.mark(item.seq, at.mark)
            elif code == NO_CELLS:
                at.pending = [early] if (early := tokens[: -len(item.tokens)]) else []
            else:
                self._restart(item.seq, item.position)
        self._note(code)
        going = list(zip((item for item, _ in group), outputs, strict=True)) if code == 0 else []
        while going:
            chosen = [(item, self._greedy.choose(output)) for item, output in going]
            going = []
            n_tokens = 0
            for item, token in chosen:
                at = self._seqs[item.seq]
                if token < 0:
                    continue
                at.draft += (token,)
                if len(at.draft) < n:
                    going.append((item, n_tokens))
                    n_tokens = self._greedy.put(
                        n_tokens, item.seq, [token], item.position + len(at.ahead)
                    )
            if going and (code := self._greedy.decode(n_tokens)) != 0:
                for item, _ in going if code != NO_CELLS else ():
                    self._restart(item.seq, item.position)
                return self._note(code)
            for item, _ in going:
                at = self._seqs[item.seq]
                at.ahead.append(at.draft[-1])

    # -- rows and state
    # ----------------------------------------------------------------------------------

    def save_rows(self, seq: int, first: int, last: int, out: Block | None = None) -> Block:
        at = self._seqs[seq]
        self._evaluate_pending(seq)
        if not at.first <= first < last <= at.held:
            return NOTHING
        block = allocate(self.rows_size(first, last)) if out is None else out
        self._memory.save_rows(seq, first, last, block[SIGNATURE_BYTES:])
        return self._signed(block)

    def load_rows(self, seq: int, first: int, spans: Sequence[BlockSpan]) -> None:
        at = self._seqs[seq]
        last = spans[-1][2] if spans else first
        self.keep(seq, first)
        if at.end == first and all(is_signed(block, self._signature) for block, _, _ in spans):
            if at.pending:  # otherwise keep a stale state: a hybrid's rows load before its state
                self._evaluate_pending(seq)
            if at.ahead:
                self._cut(seq, first)
            with suppress(ValueError, RuntimeError):
                self._memory.load(
                    seq, first, [(block[SIGNATURE_BYTES:], p0, p1) for block, p0, p1 in spans]
                )
                at.held = last
                at.is_stale = self._is_hybrid and last > 0
                at.mark = -1
                return
        self._restart(seq, last)

    def state_size(self, seq: int) -> int:
        return SIGNATURE_BYTES + self._memory.state_size(seq) if self._is_hybrid else 0

    def save_state(self, seq: int, n: int, out: Block | None = None) -> Block:
        at = self._seqs[seq]
        if not self._is_hybrid or at.end != n or n == 0:
            return NOTHING
        self._evaluate_pending(seq)
        if at.ahead:
            self._cut(seq, n)
        if at.first > 0 or at.held != n or at.is_stale:
            return NOTHING
        block = allocate(self.state_size(seq)) if out is None else out
        self._memory.save_state(seq, n, block[SIGNATURE_BYTES:])
        return self._signed(block)

    def load_state(self, seq: int, n: int, block: Block) -> None:
        at = self._seqs[seq]
        if (
            not at.is_stale
            or at.end != n
            or block.size != self.state_size(seq)
            or not is_signed(block, self._signature)
        ):
            return
        with suppress(ValueError, RuntimeError):
            self._memory.load(seq, n, [], block[SIGNATURE_BYTES:])
            at.is_stale = False

    def close(self) -> None:
        self._let_go()
        api.llama_free(self._ctx)
        api.llama_model_free(self._model)

    def _let_go(self) -> None:
        """Free the memory view and the samplers before the context."""
        if hasattr(self, "_memory"):
            self._memory.finish()
            del self._memory
        self._greedy.close()
