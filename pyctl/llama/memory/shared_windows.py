"""Rows of sliding windows: each is kept once for all states of a sequence that see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ref

import msgspec
import numpy as np
from numpy.typing import NDArray

from pyctl.cache.snapshot import Block
from pyctl.llama.library.pinned_memory import allocate

__all__ = ["SharedWindows", "WindowForm", "WindowRows"]

BLOCK_HEADER = 64
"""Bytes before the contents of a block (csrc/core/block.h)."""


class WindowForm(msgspec.Struct, frozen=True):
    """The layout of the rows of a window in a state's block: after ``head`` bytes, plane after
    plane.

    A plane of n rows is ``planes[i][0]`` runs of n pieces of ``planes[i][1]`` bytes.
    """

    head: int
    planes: tuple[tuple[int, int], ...]

    @classmethod
    def from_layout(cls, layout: str) -> WindowForm:
        """Parse the layout's text (csrc/core/layout.cpp); there are no planes without a window."""
        text, _, state = layout.partition(" state=")
        _, _, window = text.partition(" window=")
        planes = tuple(
            (int(runs), int(row)) for row, runs in re.findall(r"\d+:(\d+)x(\d+),", window)
        )
        n_recurrent = sum(map(int, re.findall(r"\d+", state)))
        return cls(BLOCK_HEADER + n_recurrent, planes)

    @property
    def has_recurrent(self) -> bool:
        """True if the head has the state of a recurrent cell."""
        return self.head > BLOCK_HEADER

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(runs * row for runs, row in self.planes)

    def n_rows(self, rows: Block) -> int:
        """Return the number of rows in ``rows``, a block without a head."""
        return int(rows.size) // self.row_bytes

    def views(self, rows: Block) -> Iterator[NDArray[np.uint8]]:
        """Yield the planes of ``rows`` as views of shape (runs, rows, bytes)."""
        offset = 0
        n = self.n_rows(rows)
        for runs, row in self.planes:
            end = offset + runs * n * row
            yield rows[offset:end].reshape(runs, n, row)
            offset = end


class WindowPiece(NamedTuple):
    """A block that ends with row ``last`` - 1, and of which rows [first, last) count."""

    block: Block
    first: int
    last: int


@dataclass(frozen=True, eq=False)
class WindowRows:
    """The rows of a window in pieces, one after the other."""

    form: WindowForm
    pieces: tuple[WindowPiece, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, some of which other states also hold."""
        return tuple(piece.block for piece in self.pieces)

    def joined(self, head: Block) -> Block:
        """Return the state's block that starts with ``head``, shape (size,), as one array."""
        first = self.pieces[0].first
        last = self.pieces[-1].last
        block = np.empty(head.size + (last - first) * self.form.row_bytes, np.uint8)
        block[: head.size] = head
        wholes = list(self.form.views(block[head.size :]))
        for piece in self.pieces:
            for whole, part in zip(wholes, self.form.views(piece.block), strict=True):
                whole[:, piece.first - first : piece.last - first] = part[
                    :, piece.first - piece.last :
                ]
        return block


class SharedWindows:
    """The windows of all sequences, of which only the rows are saved that no living state has.

    A block lives as long as some state holds it. Its rows belong to the sequence until the sequence
    is cut, which the owner announces by `forget`. The copy of a block may still run.
    """

    def __init__(self, form: WindowForm) -> None:
        self.form = form
        self._known: dict[
            int, list[tuple[ref[Block], int, int]]
        ] = {}  # by sequence: blocks, first and last row

    def save(
        self, seq: int, first: int, n: int, copy: Callable[[int, int, Block], None]
    ) -> WindowRows:
        """Return the window [first, n) of ``seq``, which ends at ``n``; ``copy`` starts to copy
        rows [start, end) into a block.
        """
        pieces: list[WindowPiece] = []
        for block, start, end in self._parts(seq, first, n):
            if block is None:
                block = allocate((end - start) * self.form.row_bytes)
                copy(start, end, block)
            pieces.append(WindowPiece(block, start, end))
        window = WindowRows(self.form, tuple(pieces))
        self.record_loaded(seq, window)
        return window

    def n_new(self, seq: int, windows: Sequence[tuple[int, int]]) -> int:
        """Return how many rows `save` would copy of the windows (first, n) of ``seq``, if they were
        saved one after the other in ascending order.
        """
        n_new = 0
        saved = -1
        for first, n in windows:
            parts = self._parts(seq, first, n) if saved < 0 else [(None, max(first, saved), n)]
            n_new += sum(end - start for block, start, end in parts if block is None)
            saved = n
        return n_new

    def _parts(self, seq: int, first: int, n: int) -> Iterator[tuple[Block | None, int, int]]:
        """Yield the window [first, n) of ``seq`` in parts [start, end), each with the block that
        has its rows, or None.
        """
        position = first
        for known, start, end in self._known.get(seq, ()):
            shared = known()
            if shared is not None and position < end <= n:
                if position < start:
                    yield None, position, start
                yield shared, max(start, position), end
                position = end
        if position < n:
            yield None, position, n

    def record_loaded(self, seq: int, window: WindowRows) -> None:
        """Record that ``seq`` has the rows of ``window``, which were loaded."""
        n_rows = self.form.n_rows
        self._known[seq] = [
            (ref(block), last - n_rows(block), last) for block, _, last in window.pieces
        ]

    def forget(self, seq: int) -> None:
        """Record that ``seq`` was cut: its next rows may be different ones."""
        self._known.pop(seq, None)
