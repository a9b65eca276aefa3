"""The memory of a llama_context: rows and states of its sequences, copied by the extension.

Each object here has one subject; `ContextMemory` keeps them in step:

  sequence_states.py  the states, by the kind of memory
  context_cells.py    the cells, and the rows held in them for the cache
  rollbacks.py        how far drafts can be taken back
  draft_mirror.py     the draft model's part of rows and states
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.ports import MemoryShape
from pyctl.cache.resume_points import NOWHERE
from pyctl.cache.snapshot import (
    NOTHING,
    BlockBytes,
    Rows,
    Span,
    State,
)
from pyctl.engine.backend import BackendFacts
from pyctl.engine.pool_plan import PoolPlan
from pyctl.errors import OutOfCellsError, StateError
from pyctl.llama.draft.draft_mirror import DraftMirror
from pyctl.llama.library.bindings import api
from pyctl.llama.library.extension import unfit
from pyctl.llama.library.native import HostBuffer, KVState, RowStore, checked
from pyctl.llama.library.pinned_memory import allocate
from pyctl.llama.memory.context_cells import ContextCells, handle_of
from pyctl.llama.memory.memory_check import find_resume_points
from pyctl.llama.memory.rollbacks import Rollbacks
from pyctl.llama.memory.sequence_states import (
    AttentionStates,
    Kind,
    LoadedState,
    SequenceStates,
    states_of,
)

__all__ = ["ContextMemory"]


class ContextMemory:
    """The `SequenceMemory` of a model's context, which `close` and `open` may replace.

    Attributes:
        kv: The extension's view of the context, None without one.
        store: The rows of the only sequence, which also evaluates; None without a ``pool``.
        pool: The plan of the store.
        cells: The cells of the context.
        rollbacks: The rollbacks of drafts.
        drafts: The mirror of evaluations to the draft model. The owner sets it.
        identity: The fingerprint of saved bytes. The owner sets it.
        kind: The kind of the memory.
        shape: The capabilities of the memory.
    """

    def __init__(self, pool: PoolPlan | None, *, marks: bool) -> None:
        """Make a memory without a context. ``marks`` lets hybrids roll back long drafts, for one
        more state per sequence.
        """
        self.kv: Any = None
        self.store: RowStore | None = None
        self.pool = pool
        self.cells = ContextCells()
        self.rollbacks = Rollbacks()
        self.drafts = DraftMirror(None, 0)
        self.identity = ""
        self.kind: Kind = "opaque"
        self.shape = MemoryShape(NOWHERE, BlockSizes(0, 0, 0))
        self._marks = marks
        self._states: SequenceStates = AttentionStates()

    def open(self, ctx: Any, facts: BackendFacts) -> None:
        """Attach to ``ctx``, read its layout from the one token of sequence 0, and drop that token.

        RuntimeError or ValueError on failure. Call `measure` once the draft model is open."""
        address = ctypes.cast(ctx, ctypes.c_void_p).value or 0
        kv = KVState(address, 0, marks=self._marks, defers=self.pool is None, unfit=unfit)
        self.attach(kv, facts, n_state_history=int(api.llama_n_rs_seq(ctx)))
        self.store = None
        if self.pool is not None:
            plan = self.pool
            self.store = RowStore(self.kv, plan.n_rows, plan.resident, plan.n_stages)
        self.clear(0)
        has_rows = bool(kv.can_hold)
        points = self.shape.resume_points
        is_first_open = not self.identity
        if is_first_open:
            points = find_resume_points(self.kv, facts.n_cells)
        self.shape = MemoryShape(
            resume_points=points,
            sizes=self.shape.sizes,
            cut_anywhere=self.kind == "attention" or getattr(self.kv, "can_cut", False),
            has_rows=has_rows,
            can_hold=has_rows,
            is_pool=self.pool is not None,
        )
        self.rollbacks.can_cut = self.shape.cut_anywhere or self._states.can_cut_drafts

    def attach(self, kv: Any, facts: BackendFacts, n_state_history: int) -> None:
        """Use ``kv`` as the view of the context, whose recurrent cells have ``n_state_history``
        planes. Sequence 0 holds one token.
        """
        self.kv = kv
        self.kind = kv.kind
        self._states = states_of(kv, n_state_history)
        self.cells.open(kv, facts.n_cells, facts.n_seqs)
        n_reachable = self._states.n_state_history if kv.can_hold else 0
        self.rollbacks = Rollbacks(kv, n_state_history=n_reachable, n_ubatch=facts.n_ubatch)

    def measure(self) -> None:
        """Measure the block sizes of the memory and of the draft model."""
        own = RowSizes()
        if self.shape.has_rows:
            own = RowSizes.measured(self.kv)
        draft = RowSizes()
        draft_state = 0
        if self.drafts.model is not None:
            draft = RowSizes.measured(self.drafts.model)
            draft_state = self.drafts.model.state_size(0)
        sizes = BlockSizes(
            base=own.base,
            row=own.row,
            state=self._states.fixed_bytes,
            draft_base=draft.base,
            draft_row=draft.row,
            draft_state=draft_state,
        )
        self.shape = replace(self.shape, sizes=sizes)

    def disable_saving(self) -> None:
        """Disable saving, since restored sequences do not reproduce the same bits."""
        can_cut = self.shape.cut_anywhere and self.shape.has_rows
        self.shape = replace(self.shape, resume_points=NOWHERE, cut_anywhere=can_cut)
        if not self.shape.has_rows:
            self.rollbacks.can_cut = False

    def close(self, *, is_lost: bool = False) -> None:
        """Detach from the context, before the owner frees it, and free device memory.

        A context that ``is_lost`` is no longer called, and stays until the process ends.
        """
        if is_lost:
            # References keep the destructors from calling the device.
            self._lost = self.kv, self.store, self.drafts
            self.drafts = DraftMirror(None, 0)
            self.shape = replace(self.shape, can_hold=False)
        self.drafts.close()
        # The extension's view is freed with its last reference, before the context.
        self.cells.close()
        self.rollbacks = Rollbacks()
        self._states = AttentionStates()
        self.store = None
        self.kv = None

    @property
    def layout(self) -> str:
        """The layout of rows and states as text."""
        return str(self.kv.layout)

    def synchronize(self) -> None:
        if self.kv is not None:
            self.kv.finish()
        if drafts := self.drafts.settled():
            drafts.synchronize()

    def block_bytes(self) -> BlockBytes:
        in_flight = self.kv.in_flight_bytes if self.kv is not None else 0
        in_flight += self.drafts.model.in_flight_bytes if self.drafts.model is not None else 0
        return BlockBytes(HostBuffer.used(), HostBuffer.held(), in_flight)

    # -- saving
    # ----------------------------------------------------------------------------------

    def state_size(self, seq: int, ends: Sequence[int] = ()) -> int:
        n_states = max(len(ends), 1)
        return self._states.n_bytes(seq, ends) + n_states * self.shape.sizes.draft_state

    def save_rows(self, seq: int, first: int, last: int, *, hold: bool = False) -> Rows:
        draft = self.drafts.save_rows(seq, first, last)
        if hold:
            return Rows(self.cells.hold_rows(seq, first, last), draft)
        if not self.shape.has_rows:
            return Rows(NOTHING, draft)
        block = allocate(self.kv.rows_size(first, last))
        checked(self.kv.save_rows, seq, first, last, block)
        return Rows(block, draft)

    def save_state(self, seq: int, n: int) -> State:
        return self._states.save(seq, n, self.drafts.save_state(seq, n))

    # -- restoring
    # ----------------------------------------------------------------------------------

    def restore(
        self, seq: int, first: int, spans: Sequence[Span], state: State | None = None
    ) -> None:
        """Restore the model's own rows and state, then the draft model's."""
        end = spans[-1][2] if spans else first
        own_state = self._states.to_load(state) if state is not None else None
        self.rollbacks.forget(seq)
        self._states.forget(seq)
        if self.shape.has_rows:
            self._load_rows(seq, first, end, spans, own_state)
        elif own_state is not None:
            self._load_whole(seq, end, own_state)
        if state is not None and own_state is not None:
            self._states.keep(seq, state)
        drafts = self.drafts.settled()
        if drafts is None:
            return
        if spans:
            drafts.load_rows(seq, first, [(rows.draft, at, last) for rows, at, last in spans])
        # A memory of rows alone saves no state, but a draft model may have one.
        has_state = own_state is not None or (state is not None and bool(state.parts))
        if state is not None and has_state:
            drafts.load_state(seq, end, state.draft)

    def _load_rows(
        self, seq: int, first: int, end: int, spans: Sequence[Span], state: LoadedState | None
    ) -> None:
        """Load the model's rows [``first``, ``end``) and the state at ``end``, without the draft
        model's.
        """
        sources = [
            (rows.block if rows.held is None else handle_of(rows.held), start, last)
            for rows, start, last in spans
        ]
        if not sources and state is None:
            return
        block = state.block if state is not None else None
        pieces = state.pieces if state is not None else ()
        # The extension takes the position of the first row, without rows the position of the state.
        start = first if sources else end
        checked(self.kv.load, seq, start, sources, block, pieces)

    def _load_whole(self, seq: int, end: int, state: LoadedState) -> None:
        """Load the state at ``end``, which includes all rows. Raises OutOfCellsError where
        llama.cpp would only report a failure.
        """
        if end - self.cells.n_tokens(seq) > self.cells.n_free:
            raise OutOfCellsError
        checked(self.kv.load, seq, end, [], state.block, state.pieces)

    # -- cutting
    # ----------------------------------------------------------------------------------

    def rollback(self, seq: int, n: int) -> int:
        end = self.cells.n_tokens(seq)
        n_kept = self.rollbacks.roll_back(seq, n, end)
        if n_kept is None:
            self.clear(seq)
            raise StateError(f"cannot roll back from {end} to {n} tokens")
        if n_kept < end and (drafts := self.drafts.settled()):
            drafts.truncate(seq, n_kept)
        return n_kept

    def rewind(self, seq: int, n: int) -> None:
        self.rollbacks.forget(seq)
        self._states.forget(seq)
        checked(self.kv.rewind, seq, n)
        if drafts := self.drafts.settled():
            drafts.rewind(seq, n)

    def clear(self, seq: int) -> None:
        self.rollbacks.forget(seq)
        self._states.forget(seq)
        self.kv.clear(seq)
        self.drafts.forget(seq)
        if self.drafts.model is not None:
            self.drafts.model.clear(seq)


class HasRows(Protocol):
    """A memory that saves rows in blocks: a `KVState` or a draft model."""

    def rows_size(self, first: int, last: int, /) -> int:
        """Return the bytes of a block of rows [first, last)."""


class RowSizes(NamedTuple):
    """The sizes of blocks of rows: ``base`` bytes, and ``row`` bytes for each row."""

    base: int = 0
    row: int = 0

    @classmethod
    def measured(cls, memory: HasRows) -> RowSizes:
        """Return the sizes of the blocks of ``memory``, which grow by equal steps."""
        one = memory.rows_size(0, 1)
        row = memory.rows_size(0, 2) - one
        return cls(base=one - row, row=row)
