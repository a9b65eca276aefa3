"""The sizes of a model's saved blocks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BlockSizes"]


@dataclass(frozen=True)
class BlockSizes:
    """The bytes of a model's blocks.

    Attributes:
        base: The bytes of a block of rows without its rows.
        row: The bytes of a row.
        state: The bytes of a state, -1 if states differ.
        draft_base: As ``base``, of the draft model; 0 without one.
        draft_row: As ``row``, of the draft model; 0 without one.
        draft_state: As ``state``, of the draft model; 0 without one.
    """

    base: int
    row: int
    state: int
    draft_base: int = 0
    draft_row: int = 0
    draft_state: int = 0

    def rows(self, first: int, last: int) -> int:
        """Return the bytes of the model's own rows [first, last) in RAM; 0 if it has none."""
        return self.base + (last - first) * self.row if first < last else 0

    def draft_rows(self, first: int, last: int) -> int:
        """Return the bytes of the draft model's rows [first, last)."""
        if not self.draft_row or first >= last:
            return 0
        return self.draft_base + (last - first) * self.draft_row

    def n_bytes(self, n: int, covered: int) -> int:
        """Return about how many bytes a state at ``n`` has, with the rows that are not
        ``covered``.
        """
        return max(self.state, 0) + max(n - covered, 0) * self.row
