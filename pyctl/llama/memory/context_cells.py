"""The cells of a llama_context: rows of its sequences, and rows that are held for the cache."""

from __future__ import annotations

from dataclasses import dataclass

from pyctl.cache.snapshot import Block, HeldRows
from pyctl.errors import StateError
from pyctl.llama.library.native import KVState, checked
from pyctl.llama.library.pinned_memory import allocate

__all__ = ["ContextCells", "DeviceRows"]


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


class ContextCells:
    """The `DeviceCells` of a model's context, which `close` and `open` may replace.

    Between the two nothing is held, and rows that were held before are gone.
    """

    def __init__(self) -> None:
        self._kv: KVState | None = None
        self._n_cells = 0
        self._n_seqs = 0
        self._handles: set[int] = set()

    def open(self, kv: KVState, n_cells: int, n_seqs: int) -> None:
        """Attach to the ``n_cells`` cells of a context, which its ``n_seqs`` sequences share."""
        self._kv = kv
        self._n_cells = n_cells
        self._n_seqs = n_seqs
        self._handles = set()

    def close(self) -> None:
        """Detach from the context."""
        self._kv = None

    # -- held rows
    # ----------------------------------------------------------------------------------

    def hold_rows(self, seq: int, first: int, last: int) -> DeviceRows:
        kv = self._open_context()
        handle = checked(kv.hold, seq, first, last)
        self._handles.add(handle)
        return DeviceRows(handle, n_cells=last - first, n_bytes=kv.rows_size(first, last))

    def release(self, held: HeldRows) -> None:
        handle = handle_of(held)
        if self._kv is not None and handle in self._handles:
            self._handles.remove(handle)
            self._kv.release(handle)

    def release_all(self) -> None:
        while self._handles:
            self._open_context().release(self._handles.pop())

    def fetch(self, held: HeldRows, first: int, last: int) -> Block:
        kv = self._open_context()
        block = allocate(checked(kv.rows_size, first, last))
        checked(kv.fetch, handle_of(held), first, last, block)
        return block

    def n_exclusive_cells(self, held: HeldRows, first: int, last: int) -> int:
        return int(checked(self._open_context().n_own, handle_of(held), first, last))

    @property
    def n_held_cells(self) -> int:
        return self._kv.n_held if self._kv is not None and self._kv.can_hold else 0

    # -- cells of sequences
    # ----------------------------------------------------------------------------------

    @property
    def n_free(self) -> int:
        """Cells used by neither sequences nor held rows."""
        kv = self._open_context()
        if kv.can_hold:
            return kv.n_free
        return self._n_cells - sum(kv.n_tokens(seq) for seq in range(self._n_seqs))

    def reserve(self, n: int, *, in_parts: bool = False) -> None:
        """Free cells of held rows for the next ``n`` tokens; OutOfCellsError if there are too few.

        ``in_parts``: llama.cpp may split them, which can require twice as many.
        """
        if self._kv is not None:
            checked(self._kv.reserve, n, in_parts)

    def position(self, seq: int, n: int) -> int:
        """Return llama.cpp's position of token ``n`` of ``seq``, or of the next token."""
        return self._kv.position(seq, n) if self._kv is not None else n

    def n_tokens(self, seq: int) -> int:
        """Return the number of tokens in ``seq``."""
        return self._open_context().n_tokens(seq)

    def _open_context(self) -> KVState:
        if self._kv is None:
            raise StateError("the device of these rows is lost")
        return self._kv


def handle_of(held: HeldRows) -> int:
    """Return the number of ``held`` in the extension. Raises StateError for rows of another
    memory.
    """
    if not isinstance(held, DeviceRows):
        raise StateError("these rows are already held")
    return held.handle
