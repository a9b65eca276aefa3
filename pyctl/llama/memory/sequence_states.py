"""The states of a context's sequences: a class for each kind of memory.

A state is all that a sequence needs, besides its rows, to continue at its end. Why kinds differ:

  attention  Rows are all that later tokens read, so there is no state.
  hybrid     A recurrent layer folds all tokens into one cell of `llama_memory_recurrent`: a state
             has one size, whatever the number of tokens.
  windowed   Layers with a sliding window (`llama_kv_cache_iswa`) overwrite their rows as the
             sequence moves on. A state has those that they still see, fewer in a short sequence.
             Neighbouring states share most of them, so each row is saved once.
  opaque     The extension does not read this memory: `llama_state_seq_get_data_ext` writes the
             whole sequence, rows included.

The extension calls both hybrid and windowed memories ``hybrid``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from pyctl.cache.snapshot import NOTHING, Block, State
from pyctl.llama.library.native import KVState, checked
from pyctl.llama.library.pinned_memory import allocate
from pyctl.llama.memory.shared_windows import SharedWindows, WindowForm, WindowPiece, WindowRows

__all__ = [
    "AttentionStates",
    "Kind",
    "LoadedState",
    "OpaqueStates",
    "RecurrentStates",
    "SequenceStates",
    "WindowedStates",
    "states_of",
]

Kind: TypeAlias = Literal["attention", "hybrid", "opaque"]
"""The kind of a memory, as the extension names it."""

VARYING = -1
"""The size of a state that depends on its sequence (`BlockSizes.state`)."""


class LoadedState(NamedTuple):
    """The model's own part of a state in the form that the extension loads.

    Attributes:
        block: The state, without the rows in ``pieces``.
        pieces: The rows of a window in ascending order.
    """

    block: Block
    pieces: tuple[WindowPiece, ...] = ()


class SequenceStates(Protocol):
    """The model's own states of the sequences of one context, without a draft model's."""

    @property
    def kind(self) -> Kind:
        """The kind of the memory."""

    @property
    def fixed_bytes(self) -> int:
        """The bytes of each state, -1 if they differ."""

    @property
    def n_state_history(self) -> int:
        """The number of states before the last one that a rollback can return to."""

    @property
    def can_cut_drafts(self) -> bool:
        """True if the last tokens of an evaluation can be dropped without a state to go back to."""

    def n_bytes(self, seq: int, ends: Sequence[int] = ()) -> int:
        """Return the bytes that `SequenceMemory.state_size` counts."""

    def save(self, seq: int, n: int, draft: Block) -> State:
        """Save the state of ``seq``, which ends at ``n``, and add the part ``draft``. The bytes
        are complete after `KVState.finish`.
        """

    def to_load(self, state: State) -> LoadedState | None:
        """Return the part of ``state`` to load, None if this memory needs none."""

    def keep(self, seq: int, state: State) -> None:
        """Record that ``seq`` has loaded ``state``: its next states may share rows with it."""

    def forget(self, seq: int) -> None:
        """Record that ``seq`` was cut: its next states share nothing with earlier ones."""


class _SeparateStates:
    """States of which none shares rows with another."""

    can_cut_drafts = False

    def keep(self, seq: int, state: State) -> None:
        """Do nothing: states share no rows."""

    def forget(self, seq: int) -> None:
        """Do nothing: states share no rows."""


class AttentionStates(_SeparateStates):
    """States of a memory whose rows suffice: all are empty."""

    kind: Kind = "attention"
    fixed_bytes = 0
    n_state_history = 0
    can_cut_drafts = True

    def n_bytes(self, seq: int, ends: Sequence[int] = ()) -> int:
        return 0

    def save(self, seq: int, n: int, draft: Block) -> State:
        return State.from_parts(NOTHING, draft)

    def to_load(self, state: State) -> LoadedState | None:
        return None


class _SingleBlockStates(_SeparateStates):
    """States that are one block each, of the size that ``kv`` returns for a sequence now."""

    def __init__(self, kv: KVState) -> None:
        self._kv = kv

    def n_bytes(self, seq: int, ends: Sequence[int] = ()) -> int:
        return max(len(ends), 1) * self._kv.state_size(seq)

    def to_load(self, state: State) -> LoadedState | None:
        return LoadedState(state.recurrent)


class RecurrentStates(_SingleBlockStates):
    """States of one size, in ``n_state_history`` planes of `llama_memory_recurrent` besides the
    last.
    """

    kind: Kind = "hybrid"

    def __init__(self, kv: KVState, n_state_history: int) -> None:
        super().__init__(kv)
        self.n_state_history = n_state_history

    @property
    def fixed_bytes(self) -> int:
        return self._kv.state_size(0)

    def save(self, seq: int, n: int, draft: Block) -> State:
        block = allocate(self._kv.state_size(seq))
        checked(self._kv.save_state, seq, n, block)
        return State.from_parts(block, draft)


class WindowedStates:
    """States with the rows that layers with a sliding window still see.

    `KVState.save_state` writes a head, then the rows of each plane (csrc/core/layout.cpp):

        n_bytes = head + n_rows * row_bytes,  n_rows <= window

    Drafts are cut off: an evaluation overwrites only rows that its first token does not see, so
    the window of each later token is still there. With recurrent cells, whose state no cut brings
    back, a rollback returns to the mark before the drafts (`KVState.mark`).
    """

    kind: Kind = "hybrid"
    fixed_bytes = VARYING
    n_state_history = 0

    def __init__(self, kv: KVState) -> None:
        self._kv = kv
        self._form = WindowForm.from_layout(kv.layout)
        self.can_cut_drafts = not self._form.has_recurrent
        self._windows = SharedWindows(self._form)
        self._max_rows = kv.window[0]

    def n_bytes(self, seq: int, ends: Sequence[int] = ()) -> int:
        if not ends:
            return self._kv.state_size(seq)
        n_now = self._kv.n_tokens(seq)
        windows = []
        for n in ends:
            n_rows = self._n_rows(seq) if n == n_now else self._max_rows
            windows.append((max(n - n_rows, 0), n))
        n_new = self._windows.n_new(seq, windows)
        return len(ends) * self._form.head + n_new * self._form.row_bytes

    def _n_rows(self, seq: int) -> int:
        """Return the number of rows that the window of ``seq`` has now."""
        return (self._kv.state_size(seq) - self._form.head) // self._form.row_bytes

    def save(self, seq: int, n: int, draft: Block) -> State:
        head = allocate(self._form.head)
        checked(self._kv.save_state, seq, n, head)

        def copy(first: int, last: int, rows: Block) -> None:
            checked(self._kv.save_window, seq, first, last, rows)

        window = self._windows.save(seq, n - self._n_rows(seq), n, copy)
        return State.from_parts(head, draft, window)

    def to_load(self, state: State) -> LoadedState | None:
        if isinstance(state.window, WindowRows):
            return LoadedState(state.head, state.window.pieces)
        return LoadedState(state.recurrent)  # from a file: one block with all rows

    def keep(self, seq: int, state: State) -> None:
        if isinstance(state.window, WindowRows):
            self._windows.record_loaded(seq, state.window)

    def forget(self, seq: int) -> None:
        self._windows.forget(seq)


class OpaqueStates(_SingleBlockStates):
    """Whole sequences in llama.cpp's own form; their size grows with the tokens."""

    kind: Kind = "opaque"
    fixed_bytes = VARYING
    n_state_history = 0

    def save(self, seq: int, n: int, draft: Block) -> State:
        # llama.cpp writes the block itself, and must not copy across two pinned ranges.
        block = allocate(self._kv.state_size(seq), pinned=False)
        checked(self._kv.save_state, seq, n, block)
        return State.from_parts(block, draft)


def states_of(kv: KVState, n_state_history: int) -> SequenceStates:
    """Return the states of the context of ``kv``, whose recurrent cells have ``n_state_history``
    planes for rollbacks.

    Sequence 0 holds one token.
    """
    if kv.kind == "attention":
        return AttentionStates()
    if kv.kind == "opaque":
        return OpaqueStates(kv)
    has_window = kv.window[0] > 0
    return WindowedStates(kv) if has_window else RecurrentStates(kv, n_state_history)
