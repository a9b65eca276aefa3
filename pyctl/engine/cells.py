"""The cells of the context, which all sequences share, and who has to leave when they run out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pyctl.cache.snapshot import Snapshot
from pyctl.engine.device_tier import DeviceTier
from pyctl.engine.sequence import LiveSequence

__all__ = ["CellPool"]


LEAST_FREE = 256
"""Cells that held rows leave free beside those that are needed, at most, for batches that are taken apart."""


class CellPool:
    """``n_cells`` cells, of which each token of each of ``sequences`` takes one, and ``held`` rows some of the others.

    ``park`` empties a sequence that nobody uses, and keeps in the cache what is worth it, at the cost of no snapshot of
    those that it is given.
    """

    def __init__(
        self,
        sequences: Sequence[LiveSequence],
        n_cells: int,
        park: Callable[[LiveSequence, Collection[Snapshot]], None],
        device: DeviceTier,
    ) -> None:
        self.n_cells = n_cells
        self._sequences, self._park, self._device = sequences, park, device

    @property
    def n_used(self) -> int:
        """Cells that sequences take, or are taking by a restore."""
        return sum(max(seq.n, seq.n_expected) for seq in self._sequences)

    def make_room(self, n: int, protected: Collection[Snapshot] = (), n_ready: int = 0) -> bool:
        """Have ``n`` cells free for a sequence, or held for it in ``n_ready`` of them already.

        Held rows leave the device for it, the least valuable first; only where that is not enough, sequences that
        nobody uses are parked, the least recently used first. False if those that are in use, and what only the device
        has of ``protected``, leave too few; ``protected`` stay in the cache.
        """
        while (most := self.n_cells - self.n_used - n) < 0:
            idle = self._idle()
            if not idle:
                return False
            self._park(min(idle, key=lambda seq: (seq.busy, seq.used)), protected)
        # A batch of several sequences may be taken apart, and each part looks for its cells anew.
        beside = min(n, LEAST_FREE) if len(self._sequences) > 1 else 0
        return self._device.shrink(max(most + n_ready - beside, 0), protected)

    def empty(self, protected: Collection[Snapshot] = ()) -> bool:
        """Take out of the context whatever is not in use; returns whether that gave cells.

        Of ``protected``, what only the device has goes last.
        """
        n_held, parked = self._device.n_cells, self.clear_idle(protected)
        if not self._device.shrink(0, protected) and not parked and self._device.n_cells == n_held:
            self._device.shrink(0)
        return parked or self._device.n_cells < n_held

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
