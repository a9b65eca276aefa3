"""Idle sequences that give up their cells for a check, and get them back."""

from __future__ import annotations

import logging

from pyctl.cache.condemned import Condemned
from pyctl.cache.ports import SequenceMemory
from pyctl.cache.prefix_cache import PrefixCache
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import Snapshot
from pyctl.engine.schedule.admission import Occupancy
from pyctl.errors import EngineError
from pyctl.prompt import as_tokens

__all__ = ["SetAside"]

log = logging.getLogger(__name__)

NOTHING_CONDEMNED = Condemned()


class SetAside:
    """The sequences of ``occupancy`` that are moved out of the context while a check has all cells:
    attention sums in cell order, so the cells of other sequences change bits.

    An empty sequence takes the place of each, so that every reader finds the contents of the
    context. Afterwards all have the same tokens and bits as before.
    """

    def __init__(self, occupancy: Occupancy, prefix_cache: PrefixCache) -> None:
        self._occupancy = occupancy
        self._cache = prefix_cache.cache
        self._saver = prefix_cache.saver
        self._device = prefix_cache.device
        self._memory: SequenceMemory = prefix_cache.memory
        self._kept: list[tuple[LiveSequence, Snapshot]] = []

    def move_all(self) -> bool:
        """Move all sequences out; return False, and move none, if RAM has no room unless it evicts
        a conversation.
        """
        moving = [seq for seq in self._occupancy.sequences if seq.n]
        if any(seq.in_image for seq in moving):
            return False  # an image continues only where its rows are
        if moving and self._memory.shape.is_pool:
            return False  # each row has one certain cell, which the check needs
        if self._room() < sum(map(self._n_bytes, moving)):
            return False
        for seq in moving:
            try:
                kept = self._saver.suspend(seq, frees_cells=False)
            except (EngineError, MemoryError) as error:
                log.debug("no check: %s", error)
                self.bring_back()
                return False
            self._kept.append((seq, kept))
            self._occupancy.sequences[seq.id] = LiveSequence(seq.id, seq.capacity)
        return True

    def bring_back(self, condemned: Condemned = NOTHING_CONDEMNED) -> None:
        """Restore all sequences, but those with rows that are ``condemned``: these are empty."""
        while self._kept:
            seq, kept = self._kept.pop(0)
            self._occupancy.sequences[seq.id] = seq
            if condemned.includes(kept):
                self._cache.release(kept)
                seq.reset(as_tokens([]))
                continue
            self._bring_back(seq, kept)

    def _bring_back(self, seq: LiveSequence, kept: Snapshot) -> None:
        """Restore ``seq`` from ``kept``. A failure empties it, and costs its next request time."""
        if seq.shares or not self._memory.shape.resume_points.contains(seq.n):
            seq.batch_ends = []  # its rows lie in other cells now, or its window has other rows
        try:
            self._saver.resume(seq, kept)
        except EngineError as error:
            log.warning("cannot return a sequence after a check: %s", error)
            self._cache.release(kept)
            self._memory.clear(seq.id)
            seq.reset(as_tokens([]))

    def _room(self) -> float:
        """Return the free bytes of RAM, and the bytes of prompt ends and of copies of rows on the
        device: they pay first, and cost no conversation.
        """
        copies = sum(int(segment.rows.nbytes) for segment in self._cache.index.pool.copies())
        return self._cache.budget.room() + self._cache.prompt_ends.n_bytes + copies

    def _n_bytes(self, seq: LiveSequence) -> int:
        """Return the bytes that RAM needs for ``seq`` while it is aside; the device holds rows."""
        first = seq.covered.alive().n
        n_new = seq.tokens[first:].nbytes + self._device.rows_size(first, seq.n)
        return n_new + self._memory.state_size(seq.id)
