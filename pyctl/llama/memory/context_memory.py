"""The memory of a llama_context: rows and states of its sequences, copied by the extension."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.ports import MemoryShape
from pyctl.cache.resume_points import NOWHERE
from pyctl.cache.snapshot import (
    NOTHING,
    Block,
    BlockBytes,
    HeldRows,
    Rows,
    Span,
    State,
)
from pyctl.engine.backend import BackendFacts, SequenceTokens
from pyctl.engine.pool_plan import PoolPlan
from pyctl.errors import OutOfCellsError, StateError
from pyctl.llama.draft.draft_mirror import DraftMirror
from pyctl.llama.library.bindings import api
from pyctl.llama.library.extension import unfit
from pyctl.llama.library.native import HostBuffer, KVState, RowStore, checked
from pyctl.llama.library.pinned_memory import allocate
from pyctl.llama.memory.memory_check import resume_points_of
from pyctl.llama.memory.shared_windows import SharedWindows, WindowForm, WindowRows

__all__ = ["ContextMemory", "DeviceRows"]


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Held rows of a context.

    Attributes:
        handle: The number of the rows in the extension.
        n_cells: The number of rows, each in a cell.
        n_bytes: The bytes that the rows would take as a block.
    """

    handle: int
    n_cells: int
    n_bytes: int


class ContextMemory:
    """The `SequenceMemory` of a model's context, which `close` and `open` may replace.

    ``kv`` is the extension's view of the context, None without one. ``drafts`` mirrors evaluations
    to the draft model. The owner sets ``identity``, the fingerprint of saved bytes, and ``n_ctx``,
    the limit of one sequence. ``marks`` lets hybrids roll back long drafts, for one more state per
    sequence. With a ``pool`` the only sequence's rows are there, and ``store`` evaluates; else it
    is None.
    """

    def __init__(self, pool: PoolPlan | None, *, marks: bool) -> None:
        self.kv: Any = None
        self.store: RowStore | None = None
        self.drafts = DraftMirror(None, 0)
        self.identity = ""
        self.n_ctx = 0
        self.kind: Literal["attention", "hybrid", "opaque"] = "opaque"
        self.shape = MemoryShape(NOWHERE, BlockSizes(0, 0, 0))
        self.pool = pool
        self._marks = marks
        self._windows = SharedWindows(WindowForm(0, ()))
        self._handles: set[int] = set()  # of held rows
        # By sequence, the minimum counts to which `rollback` may return: by cutting, and by its
        # mark.
        self._rollback_floors: dict[int, tuple[int, int]] = {}

    def open(self, ctx: Any, facts: BackendFacts) -> None:
        """Attach to ``ctx``, read its layout from the one token of sequence 0, and drop that token.

        RuntimeError or ValueError on failure. Call `measure` once the draft model is open."""
        address = ctypes.cast(ctx, ctypes.c_void_p).value or 0
        self._facts = facts
        self._n_planes = int(api.llama_n_rs_seq(ctx))
        self._handles = set()
        self._rollback_floors = {}
        self.kv = KVState(address, 0, marks=self._marks, defers=self.pool is None, unfit=unfit)
        self.store = None
        if (plan := self.pool) is not None:
            self.store = RowStore(self.kv, plan.n_rows, plan.resident, plan.n_stages)
        self.kind = self.kv.kind
        self._windows = SharedWindows(WindowForm.of(self.layout))
        self.clear(0)
        points = self.shape.resume_points
        if not self.identity:  # otherwise known from the first `open`
            points = resume_points_of(self.kv, facts.n_cells)
        self.shape = MemoryShape(
            resume_points=points,
            sizes=self.shape.sizes,
            cut_anywhere=self.kind == "attention" or getattr(self.kv, "can_cut", False),
            has_rows=bool(self.kv.can_hold),
            can_hold=bool(self.kv.can_hold),
            is_pool=self.pool is not None,
        )

    @property
    def _slides(self) -> bool:
        """Return whether the state has the rows that layers with a window still see, fewer in a
        short sequence.
        """
        return self.kind == "hybrid" and self.kv.window[0] > 0

    def measure(self) -> None:
        """Measure the block sizes of the memory and of the draft model."""
        one, two = (self.kv.rows_size(0, n) if self.shape.has_rows else 0 for n in (1, 2))
        sizes = [
            2 * one - two,
            two - one,
            -1 if self._slides or self.kind == "opaque" else self.kv.state_size(0),
        ]
        if (drafts := self.drafts.model) is not None:
            one = drafts.rows_size(0, 1)
            two = drafts.rows_size(0, 2)
            sizes += [2 * one - two, two - one, drafts.state_size(0)]
        self.shape = replace(self.shape, sizes=BlockSizes(*sizes))

    def disable_saving(self) -> None:
        """Disable saving, since restored sequences do not reproduce the same bits."""
        can_cut = self.shape.cut_anywhere and self.shape.has_rows
        self.shape = replace(self.shape, resume_points=NOWHERE, cut_anywhere=can_cut)

    def close(self, *, is_lost: bool = False) -> None:
        """Detach from the context, before the owner frees it, and free device memory.

        A context that ``is_lost`` is no longer called, and stays until the process ends.
        """
        if is_lost:
            self._lost = self.kv, self.store, self.drafts
            self.drafts = DraftMirror(None, 0)
            self.shape = replace(self.shape, can_hold=False)
        self.drafts.close()
        self.kv = self.store = None

    @property
    def layout(self) -> str:
        """The layout of rows and states as text."""
        return str(self.kv.layout)

    def state_size(self, seq: int, ends: Sequence[int] = ()) -> int:
        size = int(self.kv.state_size(seq))
        draft = self.shape.sizes.draft_state
        if not ends or not self._slides:
            return max(len(ends), 1) * (size + draft)
        form = self._windows.form
        n_now = self.n_tokens(seq)
        maximum = int(self.kv.window[0])
        n_seen = (size - form.head) // form.row_bytes
        spans = [(n - n_seen if n == n_now else max(n - maximum, 0), n) for n in ends]
        return len(ends) * (form.head + draft) + self._windows.n_new(seq, spans) * form.row_bytes

    def synchronize(self) -> None:
        if self.kv is not None:
            self.kv.finish()
        if drafts := self.drafts.settled():
            drafts.synchronize()

    def block_bytes(self) -> BlockBytes:
        in_flight = self.kv.in_flight_bytes if self.kv is not None else 0
        in_flight += self.drafts.model.in_flight_bytes if self.drafts.model is not None else 0
        return BlockBytes(HostBuffer.used(), HostBuffer.held(), in_flight)

    def save_rows(self, seq: int, first: int, last: int, *, hold: bool = False) -> Rows:
        draft = self.drafts.save_rows(seq, first, last)
        if hold:
            return Rows(self.hold(seq, first, last), draft)
        if not self.shape.has_rows:
            return Rows(NOTHING, draft)
        block = allocate(self.kv.rows_size(first, last))
        checked(self.kv.save_rows, seq, first, last, block)
        return Rows(block, draft)

    def save_state(self, seq: int, n: int) -> State:
        draft = self.drafts.save_state(seq, n)
        if self.kind == "attention":
            return State.of(NOTHING, draft)
        form = self._windows.form
        size = int(self.kv.state_size(seq))
        # llama.cpp writes `opaque` states itself, and must not copy across two pinned ranges.
        block = allocate(form.head if self._slides else size, pinned=self.kind != "opaque")
        checked(self.kv.save_state, seq, n, block)
        if not self._slides:
            return State.of(block, draft)
        first = n - (size - form.head) // form.row_bytes
        window = self._windows.save(seq, first, n, partial(checked, self.kv.save_window, seq))
        return State.of(block, draft, window)

    # -- held rows
    # ----------------------------------------------------------------------------------

    def hold(self, seq: int, first: int, last: int) -> DeviceRows:
        held = DeviceRows(
            checked(self.kv.hold, seq, first, last),
            last - first,
            self.shape.sizes.rows(first, last),
        )
        self._handles.add(held.handle)
        return held

    def release(self, held: HeldRows) -> None:
        if self.kv is not None and _handle(held) in self._handles:
            self._handles.remove(_handle(held))
            self.kv.release(_handle(held))

    def release_all(self) -> None:
        while self._handles:
            self.kv.release(self._handles.pop())

    def fetch(self, held: HeldRows, first: int, last: int) -> Block:
        if self.kv is None:
            raise StateError("the device of these rows is lost")
        block = allocate(self.shape.sizes.rows(first, last))
        checked(self.kv.fetch, _handle(held), first, last, block)
        return block

    def n_own(self, held: HeldRows, first: int, last: int) -> int:
        return int(checked(self.kv.n_own, _handle(held), first, last))

    @property
    def n_held(self) -> int:
        return int(self.kv.n_held) if self.shape.can_hold else 0

    @property
    def n_free(self) -> int:
        """Cells used by neither sequences nor held rows."""
        if self.shape.can_hold:
            return int(self.kv.n_free)
        return self._facts.n_cells - sum(map(self.n_tokens, range(self._facts.n_seqs)))

    def reserve(self, n: int, *, in_parts: bool = False) -> None:
        """Free cells of held rows for the next ``n`` tokens; OutOfCellsError if there are too few.

        ``in_parts``: llama.cpp may split them, which can require twice as many."""
        if self.kv is not None:
            checked(self.kv.reserve, n, in_parts)

    def position(self, seq: int, n: int) -> int:
        """Return llama.cpp's position of token ``n`` of ``seq``, or of the next token."""
        return int(self.kv.position(seq, n)) if self.kv is not None else n

    # -- rollback
    # ----------------------------------------------------------------------------------

    @property
    def n_rollback(self) -> int:
        """See `BackendFacts`."""
        if self.shape.cut_anywhere:
            return self.n_ctx
        return self._n_planes if self.shape.has_rows and not self._slides else 0

    @property
    def max_drafts(self) -> int:
        """See `BackendFacts`."""
        return self._facts.n_ubatch - 1 if self.kv.has_marks else self.n_rollback

    def mark(self, items: Sequence[SequenceTokens]) -> dict[int, int]:
        """Mark the starts of ``items`` whose drafts require it, before their evaluation.

        Returns by sequence the minimum count to which a rollback may use the mark, -1 for none.
        """
        marks = {item.seq: -1 for item in items}
        for item in items:
            if self.n_rollback < item.n_drafts <= self.max_drafts:
                checked(self.kv.mark, item.seq, item.position)
                marks[item.seq] = item.position + item.n_sure
        return marks

    def evaluated(
        self, items: Sequence[SequenceTokens] = (), marks: Mapping[int, int] = MappingProxyType({})
    ) -> None:
        """Record an evaluation of ``items`` with drafts and ``marks``: `rollback` applies to these
        only.
        """
        bounds = self._bounds(items) if items else {}
        self._rollback_floors = {
            seq: (bounds.get(seq, -1), marked) for seq, marked in marks.items()
        }

    def _bounds(self, items: Sequence[SequenceTokens]) -> dict[int, int]:
        """Return by sequence the minimum count to which the last evaluation can be rolled back
        without a mark.

        llama.cpp reports success even if it cannot roll back. The planes of a recurrent cell hold
        the states after its last tokens of this evaluation. With unequal token counts llama.cpp
        splits the batch, and each part may move the cells of others without their planes.
        """
        if self.shape.cut_anywhere:
            return {item.seq: item.position + item.n_sure for item in items}
        if not self.n_rollback or len({len(item.tokens) for item in items}) > 1:
            return {}
        ends = {item: item.position + len(item.tokens) for item in items}
        return {
            item.seq: max(item.position + item.n_sure, end - self._n_planes)
            for item, end in ends.items()
        }

    def rollback(self, seq: int, n: int) -> int:
        end = self.n_tokens(seq)
        minimum, marked = self._rollback_floors.pop(seq, (-1, -1))
        if n == end:
            return n
        held = n
        if not 0 < minimum <= n < end or not checked(self.kv.cut, seq, n):
            if not 0 < marked <= n < end:
                self.clear(seq)
                raise StateError(f"cannot roll back from {end} to {n} tokens")
            held = checked(self.kv.reset, seq)
        if drafts := self.drafts.settled():
            drafts.keep(seq, held)
        return held

    # -- restoring
    # ----------------------------------------------------------------------------------

    def restore(
        self, seq: int, first: int, spans: Sequence[Span], state: State | None = None
    ) -> None:
        n = spans[-1][2] if spans else first
        if self.kind == "attention" and state is not None and not state.parts:
            state = None
        self._load_own(seq, first, n, spans, state)
        if drafts := self.drafts.settled():
            if spans:
                drafts.load_rows(seq, first, [(rows.draft, at, last) for rows, at, last in spans])
            if state is not None:
                drafts.load_state(seq, n, state.draft)

    def _load_own(
        self, seq: int, first: int, n: int, spans: Sequence[Span], state: State | None
    ) -> None:
        """Load the model's own rows [``first``, ``n``) and the state at ``n``, without the draft
        model's.
        """
        self._rollback_floors.pop(seq, None)
        self._windows.forget(seq)
        state = state if self.kind != "attention" else None
        window = (
            state.window if state is not None and isinstance(state.window, WindowRows) else None
        )
        block = None if state is None else state.head if window is not None else state.recurrent
        if not self.shape.has_rows:
            if block is not None and n - self.n_tokens(seq) > self.n_free:
                # the state includes all rows; llama.cpp would report only a failure
                raise OutOfCellsError
            spans = ()
        sources = [
            (rows.block if rows.held is None else _handle(rows.held), at, last)
            for rows, at, last in spans
        ]
        if sources or block is not None:
            pieces = window.pieces if window is not None else ()
            checked(self.kv.load, seq, first if sources else n, sources, block, pieces)
        if window is not None:
            self._windows.keep(seq, window)

    def n_tokens(self, seq: int) -> int:
        """Return the number of tokens in ``seq``."""
        return int(self.kv.n_tokens(seq))

    def rewind(self, seq: int, n: int) -> None:
        self._rollback_floors.pop(seq, None)
        self._windows.forget(seq)
        checked(self.kv.rewind, seq, n)
        if drafts := self.drafts.settled():
            drafts.rewind(seq, n)

    def clear(self, seq: int) -> None:
        self._rollback_floors.pop(seq, None)
        self._windows.forget(seq)
        self.kv.clear(seq)
        self.drafts.forget(seq)
        if self.drafts.model is not None:
            self.drafts.model.clear(seq)


def _handle(held: HeldRows) -> int:
    if not isinstance(held, DeviceRows):
        raise StateError("these rows are already held")
    return held.handle
