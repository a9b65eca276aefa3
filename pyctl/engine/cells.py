"""The cells of the context, which all sequences share, and who has to leave when they run out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pyctl.cache.snapshot import Snapshot
from pyctl.engine.sequence import LiveSequence

__all__ = ["CellPool"]


class CellPool:
    """``n_cells`` cells, of which each token of each of ``sequences`` takes one.

    ``park`` empties a sequence that nobody uses, and keeps in the cache what is worth it, at the cost of no snapshot of
    those that it is given.
    """

    def __init__(
        self,
        sequences: Sequence[LiveSequence],
        n_cells: int,
        park: Callable[[LiveSequence, Collection[Snapshot]], None],
    ) -> None:
        self.n_cells = n_cells
        self._sequences, self._park = sequences, park

    @property
    def n_used(self) -> int:
        """Cells that are taken, or are being taken by a restore."""
        return sum(max(seq.n, seq.n_expected) for seq in self._sequences)

    def make_room(self, n: int, protected: Collection[Snapshot] = ()) -> bool:
        """Have ``n`` cells free: sequences that nobody uses are parked, the least recently used first.

        False if those that are in use leave too few; ``protected`` stay in the cache.
        """
        while self.n_used + n > self.n_cells:
            idle = self._idle()
            if not idle:
                return False
            self._park(min(idle, key=lambda seq: (seq.busy, seq.used)), protected)
        return True

    def clear_idle(self, protected: Collection[Snapshot] = (), *, named: bool = True) -> bool:
        """Park all sequences that nobody uses, those that clients call by number only with ``named``.

        Returns whether one of them held anything.
        """
        idle = [seq for seq in self._idle() if named or not seq.named]
        for seq in idle:
            self._park(seq, protected)
        return bool(idle)

    def _idle(self) -> list[LiveSequence]:
        return [seq for seq in self._sequences if seq.n and (not seq.busy or seq.left_over)]
