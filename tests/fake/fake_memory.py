"""The sequences of a backend without a model: rows in cells, a state, and a draft model's part of
both.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.ports import MemoryShape
from pyctl.cache.resume_points import ANYWHERE
from pyctl.cache.snapshot import NOTHING, Block, BlockBytes, HeldRows, Rows, Span, State
from pyctl.errors import OutOfCellsError, StateError
from tests.fake.fake_cells import HEADER, ROW, FakeCells, FakeHeldRows

__all__ = ["FakeMemory", "FakeSequence", "hash_of"]


def hash_of(*parts: bytes) -> bytes:
    """ROW bytes that depend on all of ``parts``."""
    return hashlib.blake2b(b"|".join(parts), digest_size=ROW).digest()


@dataclass
class FakeSequence:
    """Rows in ``cells``, the state at ``at``, and what can be taken back."""

    memory: FakeCells
    cells: list[int] = field(default_factory=list)
    state: bytes = bytes(ROW)
    at: int = 0
    n_min: int = -1  # what can be taken back of the last evaluation: everything from here on, once
    states: list[bytes] = field(
        default_factory=list
    )  # the planes: those of the last tokens, the end's last
    mark: tuple[int, bytes] | None = None
    draft_rows: list[bytes] = field(
        default_factory=list
    )  # as many as rows, or fewer; empty ones are missing
    hidden: bytes = (
        b""  # the row that the draft model's next one is made of, empty if it is missing
    )

    @property
    def rows(self) -> list[bytes]:
        """The content of its cells."""
        return list(map(self.memory.rows.__getitem__, self.cells))

    def cut(self, n: int) -> None:
        """Leave the cells from position ``n`` on."""
        self.memory.leave(self.cells[n:])
        del self.cells[n:]

    def cut_drafts(self, n: int, hidden: bytes = b"") -> None:
        """Leave the draft model ``n`` rows, none of them new, and ``hidden``."""
        self.draft_rows = self.draft_rows[:n] + [b""] * (n - len(self.draft_rows))
        self.hidden = hidden


class FakeMemory:
    """The `SequenceMemory` of `FakeBackend`, and what its outputs depend on; tests look at ``seqs``
    and ``outputs``.
    """

    def __init__(
        self,
        kind: Literal["attention", "hybrid", "opaque"],
        n_seqs: int,
        n_cells: int,
        draft_type: str,
        can_hold: bool,
        is_pool: bool,
    ) -> None:
        """Make the memory of ``n_seqs`` sequences in ``n_cells`` cells; ``draft_type`` names the
        model that drafts, if there is one.
        """
        self.kind: Literal["attention", "hybrid", "opaque"] = kind
        self.n_seqs = n_seqs
        self.draft_type = draft_type
        self.can_hold = can_hold and kind != "opaque"
        self.is_pool = is_pool
        self.resume_points = ANYWHERE
        self.fail_loads = self.n_loaded = 0
        self._used = 0
        self._on_the_way: list[tuple[Block, bytes]] = []
        self._empty(n_cells)

    def _empty(self, n_cells: int) -> None:
        self._cells = FakeCells(n_cells, fixed=self.is_pool)
        self.seqs = [FakeSequence(self._cells) for _ in range(self.n_seqs)]

    @property
    def n_cells(self) -> int:
        return self._cells.n

    @n_cells.setter
    def n_cells(self, n: int) -> None:
        self._cells.n = n

    def digest(self, seq: int) -> bytes:
        """Return the inputs of the logits at the end of ``seq``: all its rows and its state."""
        return self._digest(self.seqs[seq].rows, self.seqs[seq].state)

    def _digest(self, rows: list[bytes], state: bytes) -> bytes:
        return hash_of(*rows, state if self.kind != "attention" else b"")

    def draft_digest(self, seq: int) -> bytes:
        """Return the inputs of the drafts at the end of ``seq``: the draft model's rows and
        state.
        """
        held = self.seqs[seq]
        return hash_of(*held.draft_rows, held.hidden)

    @property
    def shape(self) -> MemoryShape:
        has_rows = self.kind != "opaque"
        state = {"attention": 0, "hybrid": HEADER.size + ROW, "opaque": -1}[self.kind]
        rows = (HEADER.size, ROW) if has_rows else (0, 0)
        drafts = (HEADER.size + ROW, ROW, HEADER.size + 2 * ROW) if self.draft_type else (0, 0, 0)
        sizes = BlockSizes(*rows, state, *drafts)
        return MemoryShape(
            self.resume_points,
            sizes,
            self.kind == "attention",
            has_rows,
            self.can_hold,
            self.is_pool,
        )

    def state_size(self, seq: int, ends: Sequence[int] = ()) -> int:
        rows = len(self.seqs[seq].cells) * ROW if self.kind == "opaque" else 0
        own = 0 if self.kind == "attention" else HEADER.size + ROW + rows
        return max(len(ends), 1) * (own + self.shape.sizes.draft_state)

    def save_rows(self, seq: int, first: int, last: int, *, hold: bool = False) -> Rows:
        draft = self._save_drafts(seq, first, last)
        if hold:
            return Rows(self.hold_rows(seq, first, last), draft)
        if self.kind == "opaque":
            return Rows(NOTHING, draft)
        rows = self.seqs[seq].rows[first:last]
        if len(rows) != last - first:
            raise StateError(f"rows [{first}, {last}) are not there")
        return Rows(self._later(HEADER.pack(b"ROWS", first, last) + b"".join(rows)), draft)

    @property
    def cells(self) -> FakeMemory:
        """The `DeviceCells`: this object itself, so that a test replaces methods in one place."""
        return self

    @property
    def n_free(self) -> int:
        """Cells that neither a sequence nor held rows take."""
        return self._cells.n_free

    @property
    def n_held_cells(self) -> int:
        return self._cells.n_held_cells

    def hold_rows(self, seq: int, first: int, last: int) -> FakeHeldRows:
        cells = self.seqs[seq].cells[first:last]
        if not self.can_hold or len(cells) != last - first:
            raise StateError(f"rows [{first}, {last}) cannot be held")
        return self._cells.hold_rows(first, cells)

    def release(self, held: HeldRows) -> None:
        self._cells.release(_own(held))

    def release_all(self) -> None:
        self._cells.release_all()

    def fetch(self, held: HeldRows, first: int, last: int) -> Block:
        self._cells.check(_own(held))
        rows = [self._cells.rows[cell] for cell in _own(held).within(first, last)]
        return self._later(HEADER.pack(b"ROWS", first, last) + b"".join(rows))

    def n_exclusive_cells(self, held: HeldRows, first: int, last: int) -> int:
        return self._cells.n_exclusive_cells(_own(held), first, last)

    def save_state(self, seq: int, n: int) -> State:
        """Return the state of ``seq`` at its end, ``n`` tokens, with that of the model that drafts.
        Raises StateError at another position.
        """
        held = self.seqs[seq]
        has_drafts = bool(self.draft_type and held.hidden)
        draft = (
            self._later(HEADER.pack(b"DSTA", 0, n) + self._author + held.hidden)
            if has_drafts
            else NOTHING
        )
        if self.kind == "attention":
            return State.from_parts(NOTHING, draft)
        if held.at != n:
            raise StateError(f"the state stands at {held.at}, not {n}")
        data = (
            HEADER.pack(b"STAT", 0, n)
            + held.state
            + (b"".join(held.rows) if self.kind == "opaque" else b"")
        )
        return State.from_parts(self._later(data), draft)

    @property
    def _author(self) -> bytes:
        return hash_of(self.draft_type.encode())

    def _save_drafts(self, seq: int, first: int, last: int) -> Block:
        rows = self.seqs[seq].draft_rows[first:last]
        if not self.draft_type or not all(rows):
            return NOTHING
        return self._later(HEADER.pack(b"DRFT", first, last) + self._author + b"".join(rows))

    def restore(
        self, seq: int, first: int, spans: Sequence[Span], state: State | None = None
    ) -> None:
        self.synchronize()
        self.n_loaded += spans[-1][2] - first if spans else 0
        if spans and self.kind != "opaque":
            self._load_rows(seq, first, spans)
        if spans:
            self._load_drafts(seq, first, spans)
        if state is not None and (state.parts or self.kind != "attention"):
            self.load_state(seq, spans[-1][2] if spans else first, state)

    def _load_drafts(self, seq: int, first: int, spans: Sequence[Span]) -> None:
        """Load the draft rows of ``spans`` from position ``first`` on; those of another model that
        drafts stay empty. Raises StateError for rows that do not continue the sequence.
        """
        held = self.seqs[seq]
        held.cut_drafts(first)
        for saved, start, stop in spans:
            data = saved.draft.tobytes()
            rows = [b""] * (stop - start)
            if data[HEADER.size :][:ROW] == self._author:
                magic, p0, p1 = HEADER.unpack(data[: HEADER.size])
                if (
                    magic != b"DRFT"
                    or not p0 <= start < stop <= p1
                    or start != len(held.draft_rows)
                ):
                    raise StateError(
                        f"draft rows [{start}, {stop}) do not continue at {len(held.draft_rows)}"
                    )
                at = [HEADER.size + ROW + (i - p0) * ROW for i in range(start, stop)]
                rows = [data[i : i + ROW] for i in at]
            held.draft_rows += rows

    def synchronize(self) -> None:
        for block, data in self._on_the_way:
            block[:] = np.frombuffer(data, np.uint8)
        self._on_the_way.clear()

    def block_bytes(self) -> BlockBytes:
        return BlockBytes(
            self._used, self._used, sum(block.nbytes for block, _ in self._on_the_way)
        )

    def _load_rows(self, seq: int, first: int, spans: Sequence[Span]) -> None:
        self._maybe_fail()
        held = self.seqs[seq]
        if len(held.cells) != first:
            raise StateError(f"rows end at {len(held.cells)}, not {first}")
        sources: list[bytes | int] = []
        for rows, start, stop in spans:
            if start != first + len(sources):
                raise StateError(
                    f"rows [{start}, {stop}) do not continue at {first + len(sources)}"
                )
            if rows.held is None:
                sources += _rows_of(rows.block, start, stop)
            else:
                self._cells.check(_own(rows.held))
                sources += _own(rows.held).within(start, stop)
        held.cells += self._cells.load(sources)

    def load_state(self, seq: int, n: int, state: State) -> None:
        """Load a state at ``n`` tokens. Raises StateError if it is of another position, or does not
        fit the rows of the sequence.
        """
        self._maybe_fail()
        held = self.seqs[seq]
        block = state.recurrent
        draft = state.draft.tobytes()
        is_own = draft[HEADER.size :][:ROW] == self._author
        if is_own and HEADER.unpack(draft[: HEADER.size])[2] != n:
            raise StateError("a draft model's state of another position")
        held.cut_drafts(n, draft[HEADER.size + ROW :] if is_own else b"")
        if self.kind == "attention":
            return
        magic, _, at = HEADER.unpack(block[: HEADER.size].tobytes())
        data = block[HEADER.size :].tobytes()
        if magic != b"STAT" or at != n or (self.kind == "hybrid" and len(held.cells) != n):
            raise StateError(f"a state at {at} does not belong to {n}")
        if self.kind == "opaque":
            self._check_cells(n - len(held.cells))
        held.state = data[:ROW]
        held.at = n
        held.n_min = -1
        held.states = []
        held.mark = None
        if self.kind == "opaque":
            held.cut(0)
            held.cells = self._cells.take([data[i : i + ROW] for i in range(ROW, len(data), ROW)])

    def rewind(self, seq: int, n: int) -> None:
        if self.kind == "opaque" and n:
            raise StateError("nothing can be rewound")
        held = self.seqs[seq]
        held.cut_drafts(n, held.hidden if n == len(held.cells) else b"")
        held.cut(n)
        held.n_min = -1
        held.states = []
        held.mark = None
        if n == 0:
            self.clear(seq)

    def clear(self, seq: int) -> None:
        self.seqs[seq].cut(0)
        self.seqs[seq] = FakeSequence(self._cells)

    def _check_cells(self, n: int) -> None:
        if n > self.n_free:
            raise OutOfCellsError

    def _later(self, data: bytes) -> Block:
        """Return a block that gets its bytes only at the first wait for them."""
        block = np.zeros(len(data), np.uint8)
        self._used += block.nbytes
        weakref.finalize(block, self._freed, block.nbytes)
        self._on_the_way.append((block, data))
        return block

    def _freed(self, n_bytes: int) -> None:
        self._used -= n_bytes

    def _maybe_fail(self) -> None:
        if self.fail_loads > 0:
            self.fail_loads -= 1
            raise StateError("made to fail")


def _rows_of(block: Block, start: int, stop: int) -> list[bytes]:
    magic, p0, p1 = HEADER.unpack(block[: HEADER.size].tobytes().ljust(HEADER.size))
    if magic != b"ROWS" or not p0 <= start < stop <= p1:
        raise StateError(f"rows [{start}, {stop}) are not in the block")
    data = block[HEADER.size :].tobytes()
    return [data[(i - p0) * ROW : (i - p0 + 1) * ROW] for i in range(start, stop)]


def _own(held: HeldRows) -> FakeHeldRows:
    assert isinstance(held, FakeHeldRows)
    return held
