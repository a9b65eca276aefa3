"""The interface of draft models, the `DraftMirror` that updates them, and signatures of their saved
blocks.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pyctl.cache import NOTHING, Block
from pyctl.engine.backend import SequenceTokens
from pyctl.errors import ModelError
from pyctl.llama.library import HiddenRows, allocate

__all__ = [
    "SIGNATURE_BYTES",
    "BlockSpan",
    "DraftMirror",
    "DraftModel",
    "MakeDraftModel",
    "is_signed",
    "signature",
]

log = logging.getLogger(__name__)

SIGNATURE_BYTES = 64
"""Bytes of the signature at the start of a draft model's saved blocks; keeps the data aligned."""


BlockSpan: TypeAlias = tuple[Block, int, int]
"""A block of the draft model's rows, and the range [first, last) of its positions."""


class DraftModel(Protocol):
    """Follows the evaluations of the model (the *trunk*) in each sequence, and drafts. Only the
    backend calls it.

    Missed tokens only lower the quality of drafts. Therefore its rows may start late or have gaps,
    and it ignores blocks of other draft models. Positions are token counts. ``type`` is its name in
    ``--spec-type``; `follow` needs the input rows of the trunk's ``layers``, side by side, -1 for
    the output of the last. A subclass sets ``_memory``, what holds its rows, and the ``_signature``
    of its blocks.
    """

    type: str
    layers: tuple[int, ...]
    _memory: Any
    _signature: bytes

    def follow(
        self, seq: int, tokens: Sequence[int], start: int, hidden: NDArray[np.float32] | None
    ) -> None:
        """Follow the trunk's evaluation of ``tokens`` of ``seq`` from position ``start`` on.

        ``hidden``, shape (len(tokens), len(layers) * n_embd), are the trunk's rows, valid during
        the call. Positions followed before are ignored. The model may defer its evaluation.
        """

    def draft(self, items: Sequence[SequenceTokens], n: int) -> list[tuple[int, ...]]:
        """Return up to ``n`` drafts after each item's tokens, which are not evaluated yet.

        Items without rows before their position also get drafts, of lower quality.
        """

    def keep(self, seq: int, n: int) -> None:
        """Drop rows beyond the trunk's ``n`` tokens of ``seq``."""

    def rewind(self, seq: int, n: int) -> None:
        """Drop rows from ``n`` on; `load_state` of position ``n`` may come next."""
        self.keep(seq, n)

    def clear(self, seq: int) -> None:
        """Drop everything of ``seq``."""

    def rows_size(self, first: int, last: int) -> int:
        """Return the bytes of the block of rows [first, last), 0 if empty."""
        return SIGNATURE_BYTES + int(self._memory.rows_size(first, last)) if first < last else 0

    def save_rows(self, seq: int, first: int, last: int, out: Block | None = None) -> Block:
        """Save rows [first, last) of ``seq``; NOTHING if one is missing. The block is complete
        after `synchronize`.

        ``out``, if given, is an unsigned block of the right size to fill.
        """

    def load_rows(self, seq: int, first: int, spans: Sequence[BlockSpan]) -> None:
        """Append rows to ``seq`` from ``first`` on; skip blocks that are empty or of other draft
        models.
        """

    def state_size(self, seq: int) -> int:
        """Return the bytes of a state of ``seq`` at any position."""

    def save_state(self, seq: int, n: int, out: Block | None = None) -> Block:
        """Save the state for drafting at ``n``, NOTHING if unknown; otherwise as `save_rows`."""

    def load_state(self, seq: int, n: int, block: Block) -> None:
        """Continue at ``n`` from a saved state; without it if ``block`` is empty or of another
        draft model.
        """

    @property
    def in_flight_bytes(self) -> int:
        """Bytes of blocks with copies in progress."""
        return int(self._memory.in_flight_bytes)

    def synchronize(self) -> None:
        """Wait until all saved blocks are complete."""
        self._memory.finish()

    def close(self) -> None:
        """Free the draft model, not its trunk."""

    def _signed(self, block: Block) -> Block:
        """Sign ``block``, which is filled then."""
        block[:SIGNATURE_BYTES] = np.frombuffer(self._signature, np.uint8)
        return block

    @staticmethod
    def _note(code: int) -> None:
        """Log a failed evaluation, which costs only drafts. Fatal errors also fail the trunk, which
        reports them.
        """
        if code != 0:
            log.debug("the draft model failed: llama_decode returned %d", code)


MakeDraftModel = Callable[[Any, Any, Callable[[int], None]], DraftModel | None]
"""Creates the draft model from the model, its context, and a function that attaches `Pulse` to
another context; None if it cannot draft for this model.
"""


class LayerRows:
    """`HiddenRows` of several ``layers`` of the context at address ``ctx``, side by side, with the
    same methods.

    Raises ModelError if llama.cpp does not give them.
    """

    def __init__(self, ctx: int, layers: Sequence[int]) -> None:
        try:
            self._parts = [HiddenRows(ctx, layer) for layer in layers]
        except ValueError as error:
            raise ModelError(str(error)) from error

    def rows(self, n: int) -> NDArray[np.float32]:
        """As `HiddenRows.rows`, of all layers side by side: shape (n, layers * n_embd)."""
        return _beside([part.rows(n) for part in self._parts])

    def start(self, n: int) -> bool:
        """As `HiddenRows.start`; False unless all layers are copied."""
        return sum(part.start(n) for part in self._parts) == len(self._parts)  # each has to start

    def finish(self, before: bool = False) -> NDArray[np.float32]:
        return _beside([part.finish(before) for part in self._parts])


def _beside(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


class DraftMirror:
    """Passes the evaluations of the context at address ``ctx`` to ``model``, if any, with a delay.

    The best time is after the start of the next evaluation: the device then computes both without a
    wait. If hidden rows cannot be copied by then, it is before that start, or on the next use of
    the model. Raises ModelError, and closes the model, if llama.cpp does not give the rows that it
    needs.
    """

    def __init__(self, model: DraftModel | None, ctx: int) -> None:
        self.model = model
        self._hidden = None
        try:
            self._hidden = (
                LayerRows(ctx, model.layers) if model is not None and model.layers else None
            )
        except ModelError:
            self.close()
            raise
        self._pending: list[tuple[SequenceTokens, int]] = []
        self._is_copied = False
        self._unsaved: list[tuple[int, Callable[[DraftModel], Block]]] = []

    def prepare(self) -> None:
        """Pass on hidden rows that the next evaluation would overwrite. Call it before each
        evaluation.
        """
        if not self._is_copied:
            self._pass_on(before=False)

    def evaluated(self, items: Sequence[SequenceTokens], n: int) -> None:
        """Record the start of an evaluation of ``items``, ``n`` tokens in total."""
        if self.model is None:
            return
        is_copied = self._hidden is None or (len(items) == 1 and self._hidden.start(n))
        self._pass_on(before=is_copied)
        firsts = accumulate((len(item.tokens) for item in items), initial=0)
        self._pending = list(zip(items, firsts, strict=False))
        self._is_copied = is_copied

    def forget(self, seq: int) -> None:
        """Drop the pending tokens of ``seq``, except for pending saves."""
        if any(each == seq for each, _ in self._unsaved):
            self._pass_on(before=False)
        self._pending = [(item, first) for item, first in self._pending if item.seq != seq]

    def settled(self) -> DraftModel | None:
        """Pass on all pending evaluations and return the model."""
        self._pass_on(before=False)
        return self.model

    def save_rows(self, seq: int, first: int, last: int) -> Block:
        """Save the model's rows."""
        return self._save(
            seq,
            lambda m: m.rows_size(first, last),
            lambda m, out: m.save_rows(seq, first, last, out),
        )

    def save_state(self, seq: int, n: int) -> Block:
        """Save the model's state."""
        return self._save(
            seq, lambda m: m.state_size(seq), lambda m, out: m.save_state(seq, n, out)
        )

    def _save(
        self,
        seq: int,
        size: Callable[[DraftModel], int],
        save: Callable[[DraftModel, Block | None], Block],
    ) -> Block:
        """Save by the model. If that would stall the device, at its next use: the block is unsigned
        until then.
        """
        if self.model is None or not (
            self._pending and self._is_copied and self._hidden is not None
        ):
            model = self.settled()
            return save(model, None) if model is not None else NOTHING
        block = allocate(size(self.model))
        block[:SIGNATURE_BYTES] = 0
        self._unsaved.append((seq, lambda model: save(model, block)))
        return block

    def close(self) -> None:
        """Free the model and the hidden rows."""
        self._pending = []
        self._unsaved = []
        if self.model is not None:
            self.model.close()
        self.model = self._hidden = None

    def _pass_on(self, *, before: bool) -> None:
        """Pass on pending evaluations; ``before``: the copy of another evaluation's hidden rows has
        started since.
        """
        pending = self._pending
        is_copied = self._is_copied
        unsaved = self._unsaved
        self._unsaved = []
        self._pending = []
        self._is_copied = False
        if self.model is None:
            return
        hidden = None
        if self._hidden is not None and pending:
            last, first = pending[-1]
            hidden = (
                self._hidden.finish(before)
                if is_copied
                else self._hidden.rows(first + len(last.tokens))
            )
        for item, first in pending:
            rows = None if hidden is None else hidden[first : first + len(item.tokens)]
            self.model.follow(item.seq, item.tokens, item.position, rows)
        for _, save in unsaved:
            save(self.model)


def signature(*names: str) -> bytes:
    """Return the signature for blocks of the draft model identified by ``names``: type, file,
    layout.
    """
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=32).digest()
    return digest.ljust(SIGNATURE_BYTES, b"\0")


def is_signed(block: Block, by: bytes) -> bool:
    """Whether ``block`` starts with the signature ``by``; False if empty."""
    return block.size > SIGNATURE_BYTES and block[:SIGNATURE_BYTES].tobytes() == by
