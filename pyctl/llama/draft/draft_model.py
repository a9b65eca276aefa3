"""What follows the sequences in llama.cpp and guesses how they go on, and how blocks that it saves are signed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pyctl.cache import NOTHING, Block
from pyctl.engine.backend import SequenceTokens
from pyctl.llama.library import HiddenRows, allocate

__all__ = ["SIGNATURE_BYTES", "BlockSpan", "DraftModel", "Follower", "MakeDraftModel", "is_signed", "signature"]

SIGNATURE_BYTES = 64
"""Bytes at the head of each saved block of a draft model that say who wrote it; what follows stays aligned."""


BlockSpan: TypeAlias = tuple[Block, int, int]
"""Positions [first, last) out of a block of the draft model's rows."""


class DraftModel(Protocol):
    """Follows what the model (the *trunk*) evaluates in each sequence, and drafts. Called by the backend alone.

    It may have missed anything: what it drafts is then worse, and nothing else. Its rows may therefore begin late or
    have a gap, and a block that another draft model wrote is nothing to it. Positions are token counts.
    """

    @property
    def type(self) -> str:
        """As in ``--spec-type``: ``draft-mtp`` or ``draft-simple``."""

    @property
    def needs_hidden(self) -> bool:
        """Whether `follow` needs the trunk's hidden rows."""

    def follow(self, seq: int, tokens: Sequence[int], start: int, hidden: NDArray[np.float32] | None) -> None:
        """The trunk evaluated ``tokens`` of ``seq`` from position ``start`` on.

        ``hidden``, shape (len(tokens), n_embd), are the rows that the trunk made of them; the array is the caller's
        again on return. Positions that were followed already are ignored; the work may wait until it is needed.
        """

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        """What may follow each item's tokens, none of which is evaluated yet: ``n`` tokens, or fewer.

        An item with no tokens before its position, or whose rows are gone, still gets a draft, if only a poor one.
        """

    def keep(self, seq: int, n: int) -> None:
        """The trunk holds ``n`` tokens of ``seq`` now: drop what was followed beyond them."""

    def rewind(self, seq: int, n: int) -> None:
        """Drop rows from ``n`` on; `load_state` of position ``n`` may come next."""

    def clear(self, seq: int) -> None:
        """Drop everything of ``seq``."""

    def rows_size(self, first: int, last: int) -> int:
        """Bytes of the block of rows [first, last), 0 if empty."""

    def save_rows(self, seq: int, first: int, last: int, out: Block | None = None) -> Block:
        """Rows [first, last) of ``seq``, or NOTHING where one is missing. The bytes are there after `synchronize`.

        They go to ``out``, if it is given, which has the size and is not signed yet."""

    def load_rows(self, seq: int, first: int, spans: Sequence[BlockSpan]) -> None:
        """Append rows to ``seq`` from ``first`` on; where a block is empty or another's, it goes on without them."""

    def state_size(self, seq: int) -> int:
        """Bytes of the state of any position of ``seq``."""

    def save_state(self, seq: int, n: int, out: Block | None = None) -> Block:
        """What drafting at ``n`` needs besides rows, or NOTHING if it is not known, likewise."""

    def load_state(self, seq: int, n: int, block: Block) -> None:
        """Go on at ``n`` from such a block; from one that is empty or another's, without."""

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of blocks that are being copied."""

    def synchronize(self) -> None:
        """Wait until every block that was saved is complete."""

    def close(self) -> None:
        """Free what it holds in llama.cpp; its trunk lives on."""


MakeDraftModel = Callable[[Any, Any, Callable[[int], None]], DraftModel | None]
"""Makes what drafts, from the model, its context, and what lets a further context be stopped like that one.

None where that cannot draft for this model."""


class Follower:
    """Tells ``model``, if there is one, what the context at address ``ctx`` evaluated, when that costs least.

    That is after the next evaluation was begun: a device then computes both without a wait. Where hidden rows
    cannot be copied so early, it is before that, or as soon as the model is needed.
    """

    def __init__(self, model: DraftModel | None, ctx: int) -> None:
        self.model = model
        self._hidden = HiddenRows(ctx) if model is not None and model.needs_hidden else None
        self._owed: list[tuple[SequenceTokens, int]] = []
        self._is_copied = False
        self._unsaved: list[tuple[int, Callable[[DraftModel], Block]]] = []

    def prepare(self) -> None:
        """The next evaluation is about to begin: what it would overwrite is handed over now."""
        if not self._is_copied:
            self._settle(before=False)

    def evaluated(self, items: Sequence[SequenceTokens], n: int) -> None:
        """An evaluation of ``items``, ``n`` tokens in all, has begun."""
        if self.model is None:
            return
        is_copied = self._hidden is None or (len(items) == 1 and self._hidden.start(n))
        self._settle(before=is_copied)
        firsts = accumulate((len(item.tokens) for item in items), initial=0)
        self._owed, self._is_copied = list(zip(items, firsts, strict=False)), is_copied

    def forget(self, seq: int) -> None:
        """Forget the tokens evaluated in ``seq``, but for those that are being saved."""
        if any(each == seq for each, _ in self._unsaved):
            self._settle(before=False)
        self._owed = [(item, first) for item, first in self._owed if item.seq != seq]

    def settled(self) -> DraftModel | None:
        """The model, which knows everything now."""
        self._settle(before=False)
        return self.model

    def save_rows(self, seq: int, first: int, last: int) -> Block:
        """Those of the model. What it owes is not evaluated for that while a device is busy: the block is filled later,
        at the latest when the model is needed; if that cannot be done, it stays unsigned."""
        if self.model is None or not self._may_wait:
            model = self.settled()
            return model.save_rows(seq, first, last) if model is not None else NOTHING
        block = _unsigned(self.model.rows_size(first, last))
        self._unsaved.append((seq, lambda model: model.save_rows(seq, first, last, block)))
        return block

    def save_state(self, seq: int, n: int) -> Block:
        """The same for the model's part of a state."""
        if self.model is None or not self._may_wait:
            model = self.settled()
            return model.save_state(seq, n) if model is not None else NOTHING
        block = _unsigned(self.model.state_size(seq))
        self._unsaved.append((seq, lambda model: model.save_state(seq, n, block)))
        return block

    @property
    def _may_wait(self) -> bool:
        """Whether to ask the model now would mean to wait for the device, and to let it wait afterwards."""
        return bool(self._owed) and self._is_copied and self._hidden is not None

    def close(self) -> None:
        """Free the model and what is held of the context."""
        self._owed, self._unsaved = [], []
        if self.model is not None:
            self.model.close()
        self.model = self._hidden = None

    def _settle(self, *, before: bool) -> None:
        """``before``: the hidden rows of a further evaluation were copied since."""
        owed, is_copied = self._owed, self._is_copied
        unsaved, self._unsaved = self._unsaved, []
        self._owed, self._is_copied = [], False
        if self.model is None:
            return
        hidden = None
        if self._hidden is not None and owed:
            last, first = owed[-1]
            hidden = self._hidden.finish(before) if is_copied else self._hidden.rows(first + len(last.tokens))
        for item, first in owed:
            rows = None if hidden is None else hidden[first : first + len(item.tokens)]
            self.model.follow(item.seq, item.tokens, item.position, rows)
        for _, save in unsaved:
            save(self.model)


def _unsigned(size: int) -> Block:
    block = allocate(size)
    block[:SIGNATURE_BYTES] = 0
    return block


def signature(*names: str) -> bytes:
    """The head of blocks of the draft model that ``names`` tell from all others: file, layout."""
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=32).digest()
    return digest.ljust(SIGNATURE_BYTES, b"\0")


def is_signed(block: Block, by: bytes) -> bool:
    """Whether ``block`` begins with the signature ``by``; an empty one does not."""
    return block.size > SIGNATURE_BYTES and block[:SIGNATURE_BYTES].tobytes() == by
