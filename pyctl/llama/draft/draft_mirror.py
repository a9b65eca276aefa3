"""The mirror that passes the model's evaluations on to a draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pyctl.cache.snapshot import NOTHING, Block
from pyctl.engine.backend import SequenceTokens
from pyctl.errors import ModelError
from pyctl.llama.draft.draft_model import SIGNATURE_BYTES, DraftModel
from pyctl.llama.library.native import HiddenRows
from pyctl.llama.library.pinned_memory import allocate

__all__ = ["DraftMirror", "LayerRows"]


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
        """Return `HiddenRows.rows` of all layers side by side: shape (n, layers * n_embd)."""
        return _hstack([part.rows(n) for part in self._parts])

    def start(self, n: int) -> bool:
        """Start the copies of all layers (`HiddenRows.start`); return False unless all have."""
        started = [part.start(n) for part in self._parts]  # each, whether one before it failed
        return all(started)

    def finish(self, before: bool = False) -> NDArray[np.float32]:
        return _hstack([part.finish(before) for part in self._parts])


def _hstack(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


class DraftMirror:
    """The link that passes the evaluations of the context at address ``ctx`` to ``model``, if any,
    with a delay.

    The best time is after the start of the next evaluation: the device then computes both without a
    wait. If hidden rows cannot be copied by then, it is before that start, or on the next use of
    the model. ``make_rows`` returns the rows of layers. Raises ModelError, and closes the model, if
    llama.cpp does not give the rows that it needs.
    """

    def __init__(
        self,
        model: DraftModel | None,
        ctx: int,
        make_rows: Callable[[int, Sequence[int]], LayerRows] = LayerRows,
    ) -> None:
        self.model = model
        self.hidden: LayerRows | None = None
        if model is not None and model.layers:
            try:
                self.hidden = make_rows(ctx, model.layers)
            except ModelError:
                self.close()
                raise
        self._pending: list[tuple[SequenceTokens, int]] = []
        self._is_copied = False
        self._unsaved: list[tuple[int, Callable[[DraftModel], Block]]] = []

    def pass_on_rows(self) -> None:
        """Pass on hidden rows that the next evaluation would overwrite. Call it before each
        evaluation.
        """
        if self.model is not None and not self._is_copied:
            self._pass_on(before=False)

    def evaluated(self, items: Sequence[SequenceTokens], n: int) -> None:
        """Record the start of an evaluation of ``items``, ``n`` tokens in total."""
        if self.model is None:
            return
        is_copied = self.hidden is None or (len(items) == 1 and self.hidden.start(n))
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
        would_stall = self._pending and self._is_copied and self.hidden is not None
        if self.model is None or not would_stall:
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
        self.model = None
        self.hidden = None

    def _pass_on(self, *, before: bool) -> None:
        """Pass on pending evaluations; ``before``: the copy of another evaluation's hidden rows has
        started since.
        """
        pending = self._pending
        unsaved = self._unsaved
        is_copied = self._is_copied
        self._pending = []
        self._unsaved = []
        self._is_copied = False
        if self.model is None:
            return
        hidden = None
        if self.hidden is not None and pending:
            last, first = pending[-1]
            n = first + len(last.tokens)
            hidden = self.hidden.finish(before) if is_copied else self.hidden.rows(n)
        for item, first in pending:
            rows = None if hidden is None else hidden[first : first + len(item.tokens)]
            self.model.follow(item.seq, item.tokens, item.position, rows)
        for _, save in unsaved:
            save(self.model)
