"""The cells of a context without a model: their content, their sequences, and the held rows."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pyctl.errors import OutOfCellsError, StateError

__all__ = ["HEADER", "ROW", "FakeCells", "FakeHeldRows"]

ROW = 16
"""Bytes of a row."""

HEADER = struct.Struct("<4sqq")
"""The header of each block: its kind and two positions."""

GONE = b"gone"
"""The content of a free cell: a sequence that still reads it gets other outputs."""


@dataclass(eq=False)
class FakeHeldRows:
    """Held rows from position ``first`` on, each in one of ``cells``."""

    first: int
    cells: list[int]

    @property
    def n_cells(self) -> int:
        """The number of rows, each in a cell."""
        return len(self.cells)

    @property
    def n_bytes(self) -> int:
        """Bytes of a block that holds them."""
        return HEADER.size + ROW * len(self.cells)

    def within(self, first: int, last: int) -> list[int]:
        """Return the cells of rows [first, last); StateError if they are not held."""
        if not self.first <= first <= last <= self.first + len(self.cells):
            raise StateError(f"rows [{first}, {last}) are not held")
        return self.cells[first - self.first : last - self.first]


class FakeCells:
    """``n`` cells. A sequence takes the lowest that no sequence has; held rows there move to the
    highest free ones, or are in the way if all are ``fixed``.
    """

    def __init__(self, n: int, *, fixed: bool = False) -> None:
        self.n = n
        self._fixed = fixed
        self.rows = [GONE] * n
        self.taken = np.zeros(n, bool)
        self._n_held = np.zeros(n, np.int32)
        self._held: dict[FakeHeldRows, None] = {}

    def copy(self, n: int) -> FakeCells:
        """Return the same rows in ``n`` more cells, all of them taken but the new ones."""
        other = FakeCells(self.n + n)
        other.rows[: self.n] = self.rows[: self.n]
        other.taken[: self.n] = True
        return other

    @property
    def n_free(self) -> int:
        """Cells that neither a sequence nor held rows take."""
        return self.n - int(np.count_nonzero(self.taken | (self._n_held > 0)))

    @property
    def n_held_cells(self) -> int:
        """Cells that held rows alone take."""
        return int(np.count_nonzero(~self.taken & (self._n_held > 0)))

    def take(self, rows: Sequence[bytes]) -> list[int]:
        """Write ``rows`` into free cells; OutOfCellsError leaves everything as it is."""
        if len(rows) > self.n_free:
            raise OutOfCellsError
        chosen = np.flatnonzero(~self.taken[: self.n])[: len(rows)]
        displaced = chosen[self._n_held[chosen] > 0].tolist()
        if displaced and self._fixed:
            raise OutOfCellsError
        self.taken[chosen] = True
        if displaced:
            free = np.flatnonzero(~(self.taken | (self._n_held > 0))[: self.n])[::-1]
            self._move(dict(zip(displaced, free.tolist(), strict=False)))
        cells: list[int] = chosen.tolist()
        for cell, row in zip(cells, rows, strict=True):
            self.rows[cell] = row
        return cells

    def leave(self, cells: Sequence[int]) -> None:
        """Free ``cells``, which a sequence gives up."""
        self.taken[list(cells)] = False
        self._forget(cells)

    def hold_rows(self, first: int, cells: Sequence[int]) -> FakeHeldRows:
        """Keep what lies in ``cells``, rows from position ``first`` on."""
        held = FakeHeldRows(first, list(cells))
        self._held[held] = None
        self._n_held[held.cells] += 1
        return held

    def release(self, held: FakeHeldRows) -> None:
        """Keep it no longer."""
        if held in self._held:
            del self._held[held]
            self._n_held[held.cells] -= 1
            self._forget(held.cells)

    def release_all(self) -> None:
        """Keep nothing any longer."""
        for held in tuple(self._held):
            self.release(held)

    def check(self, held: FakeHeldRows) -> None:
        """Raise StateError if these rows are not held."""
        if held not in self._held:
            raise StateError("these rows are held no longer")

    def n_exclusive_cells(self, held: FakeHeldRows, first: int, last: int) -> int:
        """Return cells of held rows [first, last) that neither a sequence nor other held rows
        have.
        """
        cells = held.within(first, last) if held in self._held else []
        return int(np.count_nonzero(~self.taken[cells] & (self._n_held[cells] == 1)))

    def load(self, sources: Sequence[bytes | int]) -> list[int]:
        """Give a sequence a row each for bytes, or for what is held in a cell and lies in the
        sequence's afterwards.
        """
        rows = [source if isinstance(source, bytes) else self.rows[source] for source in sources]
        # Where only held rows lie is as good as free, since they will lie where the sequence has
        # them.
        moving = {each for each in sources if isinstance(each, int) and not self.taken[each]}
        counts = {cell: int(self._n_held[cell]) for cell in moving}
        places = [
            (held, i) for held in self._held for i, cell in enumerate(held.cells) if cell in moving
        ]
        before = [held.cells[i] for held, i in places]
        self._n_held[list(moving)] = 0
        try:
            cells = self.take(rows)
        except OutOfCellsError:
            for cell, count in counts.items():
                self._n_held[cell] = count
            raise
        now = {
            source: cell
            for source, cell in zip(sources, cells, strict=True)
            if isinstance(source, int)
        }
        for (held, i), cell in zip(places, before, strict=True):
            held.cells[i] = now[cell]
        for cell, count in counts.items():
            self._n_held[now[cell]] += count
        self._forget(moving)
        return cells

    def _move(self, targets: dict[int, int]) -> None:
        """Let held rows lie somewhere else."""
        for held in self._held:
            held.cells = [targets.get(cell, cell) for cell in held.cells]
        for cell, target in targets.items():
            self.rows[target] = self.rows[cell]
            self.rows[cell] = GONE
            self._n_held[target] = self._n_held[cell]
            self._n_held[cell] = 0

    def _forget(self, cells: Sequence[int] | set[int]) -> None:
        for cell in cells:
            if not self.taken[cell] and not self._n_held[cell]:
                self.rows[cell] = GONE
