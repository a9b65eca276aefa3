"""The model's own head that guesses further tokens (MTP, a "nextn" block): its rows, and what it drafts from."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from pyctl.cache.snapshot import NOTHING, Block, Span
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.llama.draft_model import SIGNATURE_BYTES, is_signed, signature
from pyctl.engine.llama.library import KVState, NextnHead, allocate
from pyctl.errors import ModelError, UnavailableError
from pyctl.limit import limit

__all__ = ["MtpHead"]

ABORTED = 2
"""What llama_decode returns when `Pulse` stopped it."""

MOST_OWED = limit(16, "rows that a head for drafts owes", "they are evaluated together", "memory", "rows of a sequence")

log = logging.getLogger(__name__)


@dataclass
class _Followed:
    """What is known of one sequence, which the trunk holds up to ``end``.

    Row p of the head belongs to the token at p and the trunk's hidden row before it. Rows [first, last) are there; the
    one at ``end`` may be, too, for the token ``ahead`` that was to follow. ``tokens`` are the latest before ``end``, at
    least those of rows that are owed, and ``hidden`` the trunk's rows of these and of the token before them.
    """

    hidden: NDArray[np.float32]
    first: int = 0
    last: int = 0
    end: int = 0
    tokens: list[int] = field(default_factory=list)
    ahead: int = -1
    is_known: bool = True  # the last of ``hidden``; else it stands for one that was lost

    @property
    def n_owed(self) -> int:
        return self.end - self.last


class MtpHead:
    """Drafts ``n_max`` tokens at a time on ``ctx``, a context of type MTP beside its trunk's, of which it is the owner.

    Rows of small batches are owed until the next draft, which evaluates them with its first token. A GPU loads the
    weights for one row as for many, so each call there evaluates ``n_max`` + 1 rows, some once more: then one graph
    serves all calls. ``p_min``: no token that is less likely is drafted. ``model``, if the head is in a file of its
    own, belongs to it, too, and ``identity`` tells that file from others.
    """

    type = "draft-mtp"
    needs_hidden = True

    def __init__(
        self,
        ctx: Any,
        n_max: int,
        *,
        model: Any = None,
        p_min: float = 0.0,
        identity: str = "",
        attach: Callable[[int], None] = lambda address: None,
    ) -> None:
        address = ctypes.cast(ctx, ctypes.c_void_p).value or 0
        attach(address)
        self._ctx, self._model, self._window = ctx, model, n_max + 1
        self._cells = api.llama_get_memory(ctx)
        self._n_batch = int(api.llama_n_ubatch(ctx))
        self._width = int(api.llama_model_n_embd_out(api.llama_get_model(ctx)))
        self._none = np.zeros((1, self._width), np.float32)
        self._seqs = [_Followed(self._none) for _ in range(int(api.llama_n_seq_max(ctx)))]
        self._head = NextnHead(address, p_min)
        if self._head.evaluate(0, 0, [0], self._none) != 0:
            raise ModelError("the model's head for drafts cannot be evaluated")
        self._memory = KVState(address, 0)
        self._n_rows = self._window if self._memory.is_async else 1  # in each call
        if self._memory.is_async:  # a device loads now what large batches and drafts need, and not while somebody waits
            self._head.evaluate(0, 1, [0] * self._n_batch, np.zeros((self._n_batch, self._width), np.float32))
            self._head.draft([(0, self._n_batch + 1, [0], self._none)], n_max, self._n_rows)
        self._memory.clear(0)
        self._signature = signature(self.type, identity, self._memory.layout)
        self._is_saving = False

    # -- following ---------------------------------------------------------------------------------------------------

    def follow(self, seq: int, tokens: Sequence[int], start: int, hidden: NDArray[np.float32] | None) -> None:
        assert hidden is not None
        if start > self._seqs[seq].end:
            self._lose(seq, start)
        at = self._seqs[seq]
        n_past = at.end - start
        new = [int(token) for token in tokens[n_past:]]
        if not new:
            return
        if at.last > at.end and at.ahead != new[0]:  # another token was to follow
            self._cut(seq, at.end)
        at.tokens += new
        at.hidden = np.concatenate((at.hidden, hidden[n_past:]))
        at.end += len(new)
        at.is_known = True
        if at.n_owed >= max(self._window, MOST_OWED):
            self._pay(seq)
            at = self._seqs[seq]
        # After a prompt's batch there is only what a snapshot would bring; later, what is left when drafts were wrong.
        n_before = self._n_rows - 1 + self._window if self._n_rows > 1 and len(new) <= self._window else 0
        self._forget_all_but(at, max(at.n_owed, n_before))

    def keep(self, seq: int, n: int) -> None:
        at = self._seqs[seq]
        n_wrong = at.end - n
        if n_wrong <= 0:
            return
        if n_wrong <= len(at.tokens):
            del at.tokens[-n_wrong:]
            at.hidden = at.hidden[:-n_wrong]
        else:
            at.tokens, at.hidden, at.is_known = [], self._none, n == 0
        at.end = n
        if at.last > n:
            self._cut(seq, n)

    def rewind(self, seq: int, n: int) -> None:
        self.keep(seq, n)

    def clear(self, seq: int) -> None:
        self._memory.clear(seq)
        self._seqs[seq] = _Followed(self._none)

    def _lose(self, seq: int, n: int) -> None:
        """Go on at ``n`` with nothing of what was before."""
        self.clear(seq)
        at = self._seqs[seq]
        at.first = at.last = at.end = n
        at.is_known = n == 0

    def _cut(self, seq: int, n: int) -> None:
        """Drop the rows from ``n`` on."""
        self._settle()
        api.llama_memory_seq_rm(self._cells, seq, n, -1)
        at = self._seqs[seq]
        at.first, at.last = min(at.first, n), n

    def _pay(self, seq: int) -> None:
        """Evaluate the rows that are owed; what fails leaves none."""
        at = self._seqs[seq]
        while at.n_owed > 0:
            first, n = len(at.tokens) - at.n_owed, min(at.n_owed, self._n_batch)
            code = self._head.evaluate(seq, at.last, at.tokens[first : first + n], at.hidden[first : first + n])
            if code != 0:
                self._lose(seq, at.end)
                self._check(code)
                return
            at.last += n

    @staticmethod
    def _forget_all_but(at: _Followed, n: int) -> None:
        """Keep the latest ``n`` tokens, with their hidden rows and the one before."""
        if len(at.tokens) > n:
            at.tokens = at.tokens[len(at.tokens) - n :]
            at.hidden = at.hidden[len(at.hidden) - n - 1 :].copy()

    @staticmethod
    def _check(code: int) -> None:
        if code == ABORTED:
            raise UnavailableError("the evaluation was stopped")
        if code != 0:
            log.debug("the head for drafts gave up: llama_decode returned %d", code)

    # -- drafting ----------------------------------------------------------------------------------------------------

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        drafts: list[tuple[int, ...]] = []
        n_together = max(self._n_batch // self._window, 1)
        for first in range(0, len(items), n_together):
            drafts += self._draft(items[first : first + n_together], n)
        return drafts

    def _draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        self._settle()
        jobs = []
        for item in items:
            at = self._seqs[item.seq]
            if at.end > item.position:
                self.keep(item.seq, item.position)
            elif at.end < item.position:
                self._lose(item.seq, item.position)
                at = self._seqs[item.seq]
            if at.n_owed >= self._window:
                self._pay(item.seq)
                at = self._seqs[item.seq]
            n_before = max(min(len(at.tokens), self._n_rows - 1), at.n_owed)
            tokens = [*at.tokens[len(at.tokens) - n_before :], *item.tokens]
            jobs.append((item.seq, at.end - n_before, tokens, at.hidden[len(at.hidden) - n_before - 1 :]))
        drafts, code = self._head.draft(jobs, n, self._n_rows)
        for item, (seq, start, _, _) in zip(items, jobs, strict=True):
            at = self._seqs[seq]
            if code == 0:
                at.last, at.ahead = at.end + 1, item.tokens[0]
            else:
                n_held = int(api.llama_memory_seq_pos_max(self._cells, seq)) + 1
                at.first, at.last = (at.first, min(n_held, at.end)) if n_held else (start, start)
        self._check(code)
        return [tuple(draft) for draft in drafts]

    # -- rows and hidden state ---------------------------------------------------------------------------------------

    def rows_size(self, first: int, last: int) -> int:
        return SIGNATURE_BYTES + self._memory.rows_size(first, last) if first < last else 0

    def save_rows(self, seq: int, first: int, last: int) -> Block:
        at = self._seqs[seq]
        if at.n_owed > 0:
            self._pay(seq)
            at = self._seqs[seq]
        if not at.first <= first < last <= at.last:
            return NOTHING
        block = allocate(self.rows_size(first, last))
        block[:SIGNATURE_BYTES] = np.frombuffer(self._signature, np.uint8)
        try:
            self._memory.save_rows(seq, first, last, block[SIGNATURE_BYTES:])
        except (ValueError, RuntimeError) as error:
            log.debug("rows of the head for drafts were not saved: %s", error)
            return NOTHING
        self._is_saving = True
        return block

    def load_rows(self, seq: int, first: int, spans: Sequence[Span]) -> None:
        at = self._seqs[seq]
        if at.n_owed > 0:
            self._pay(seq)
            at = self._seqs[seq]
        if at.last > first:
            self._cut(seq, first)
        n_own = sum(1 for _ in takewhile(lambda span: is_signed(span[0], self._signature), reversed(spans)))
        own, last = spans[len(spans) - n_own :], spans[-1][2] if spans else first
        if not (at.end == at.last == first and n_own == len(spans)):  # what comes before those is not known
            self._lose(seq, own[0][1] if own else last)
        if own and not self._append(seq, own):
            self._lose(seq, last)
        at = self._seqs[seq]
        at.tokens, at.hidden, at.is_known = [], self._none, last == 0

    def _append(self, seq: int, spans: Sequence[Span]) -> bool:
        """Append rows of its own; False if something is wrong with them."""
        at, blocks = self._seqs[seq], [(block[SIGNATURE_BYTES:], first, last) for block, first, last in spans]
        # Rows can be appended to others alone, so where there are none before them there is one in between.
        begins_late = at.first == at.last > 0
        if begins_late and self._head.evaluate(seq, at.last - 1, [0], self._none) != 0:
            return False
        try:
            self._memory.load_rows(seq, at.last, blocks)
        except (ValueError, RuntimeError):
            return False
        if begins_late:
            api.llama_memory_seq_rm(self._cells, seq, at.last - 1, at.last)
        at.last = at.end = spans[-1][2]
        return True

    def state_size(self, seq: int) -> int:
        return SIGNATURE_BYTES + self._none.nbytes

    def save_state(self, seq: int, n: int) -> Block:
        at = self._seqs[seq]
        if at.end != n or not at.is_known:
            return NOTHING
        block = np.empty(self.state_size(seq), np.uint8)
        block[:SIGNATURE_BYTES] = np.frombuffer(self._signature, np.uint8)
        block[SIGNATURE_BYTES:] = at.hidden[-1].view(np.uint8)
        return block

    def load_state(self, seq: int, n: int, block: Block) -> None:
        at = self._seqs[seq]
        if at.end > n:
            self.keep(seq, n)
        elif at.end < n:
            self._lose(seq, n)
            at = self._seqs[seq]
        if block.size != self.state_size(seq) or not is_signed(block, self._signature):
            return
        if at.n_owed > 0:
            self._pay(seq)
            at = self._seqs[seq]
        at.tokens, at.is_known = [], True
        at.hidden = np.array(block[SIGNATURE_BYTES:]).view(np.float32)[None]

    @property
    def in_flight_bytes(self) -> int:
        return self._memory.in_flight_bytes

    def synchronize(self) -> None:
        self._memory.finish()
        self._is_saving = False

    def _settle(self) -> None:
        """Rows that are still being copied must not be evaluated again meanwhile."""
        if self._is_saving:
            self.synchronize()

    def close(self) -> None:
        self._memory.finish()
        del self._memory  # what it holds on the device goes before the context
        self._head.close()
        api.llama_free(self._ctx)
        if self._model is not None:
            api.llama_model_free(self._model)
