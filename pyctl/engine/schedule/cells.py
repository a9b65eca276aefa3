"""The shared cells of the context, and the choice of sequences to park when cells run out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pyctl.cache.plan import MIN_BATCH
from pyctl.cache.ports import SequenceMemory
from pyctl.cache.prefix_cache import PrefixCache
from pyctl.cache.ram import RamCache
from pyctl.cache.sequence import LiveSequence
from pyctl.engine.schedule.admission import Occupancy
from pyctl.prompt import Prompt

__all__ = ["CellPool", "SequenceValues"]

MIN_FREE = 256
"""Cells kept free of held rows in addition to the needed ones, since llama.cpp may split batches.
"""


class SequenceValues:
    """The worth of idle sequences in expected seconds, by the policy of ``cache``.

    A prompt that continues a live sequence costs nothing up to its end. Otherwise its rows and
    state are loaded from RAM, or evaluated if RAM lacks them or evaluation is faster.
    """

    def __init__(self, memory: SequenceMemory, cache: RamCache, occupancy: Occupancy) -> None:
        self._memory = memory
        self._cache = cache
        self._occupancy = occupancy

    def expected_resumes(self, seq: LiveSequence) -> float:
        """Return the expected number of prompts that resume in ``seq``."""
        return self._cache.policy.expected_resumes_at_end(seq.facts.turn)

    def loss_if_truncated(self, seq: LiveSequence, n: int = 0) -> float:
        """Return the expected seconds lost if ``seq`` keeps only its first ``n`` tokens."""
        if n >= seq.n:
            return 0.0
        n_kept = 0
        if self._memory.shape.cut_anywhere:
            n_kept = n
        seconds = self._cache.costs.evaluate(n_kept, seq.n)
        if self._cache.enabled and seq.facts.cached:
            load_seconds = self._load(seq, n, seq.n)
            seconds = min(seconds, load_seconds)
        return self.expected_resumes(seq) * seconds

    def best(
        self,
        idle: Iterable[LiveSequence],
        prompt: Prompt,
        *,
        clears: bool,
        in_blocks: bool = False,
    ) -> LiveSequence:
        """Return the sequence of ``idle`` for ``prompt`` with the highest gain minus the worth of
        the replaced tokens.

        Replacing a reply loses nothing if the prompt shares the whole previous prompt. Ties go to
        the longest shared prefix, then to the least recently used. With ``clears`` only sequences
        that clients named by number have worth, since the others are parked anyway. With
        ``in_blocks`` only whole blocks of MIN_BATCH shared tokens count, or all tokens of a
        sequence: the number of the sequence would give a client a single token of another's text.
        """

        def rank(seq: LiveSequence) -> tuple[float, int, int]:
            shared = seq.shared(prompt.tokens)
            if in_blocks and shared < seq.n:
                shared -= shared % MIN_BATCH
            seconds = self._gained(seq, prompt, shared)
            has_worth = seq.id in self._occupancy.named or not clears
            if has_worth and shared < seq.facts.n_header:
                seconds -= self.loss_if_truncated(seq, shared)
            return seconds, shared, -self._occupancy.used(seq)

        return max(idle, key=rank)

    def pick_to_park(self, idle: Collection[LiveSequence], n: int) -> LiveSequence:
        """Return the sequence of ``idle`` to park for ``n`` cells: the least worth, per cell if
        none is large enough.

        Sequences assigned to a request go last.
        """

        def rank(seq: LiveSequence) -> tuple[float, int]:
            loss = self.loss_if_truncated(seq)
            return loss, self._occupancy.used(seq)

        def rank_per_cell(seq: LiveSequence) -> tuple[float, int]:
            loss = self.loss_if_truncated(seq)
            return loss / seq.n, self._occupancy.used(seq)

        free = [seq for seq in idle if self._occupancy.owner(seq) is None] or idle
        enough = [seq for seq in free if seq.n >= n]
        if enough:
            return min(enough, key=rank)
        return min(free, key=rank_per_cell)

    def _gained(self, seq: LiveSequence, prompt: Prompt, shared: int) -> float:
        """Return the seconds saved for ``prompt`` compared with an empty sequence.

        Rows common to many conversations gain nothing: snapshots hold them for all sequences.
        """
        if not shared:
            return 0.0
        goes_on = shared == seq.n
        n_only = 0  # tokens that no snapshot covers
        if goes_on or self._memory.shape.cut_anywhere:
            n_covered = seq.covered.alive().n
            n_only = max(shared - n_covered, 0)
        seconds = self._cache.costs.evaluate(shared - n_only, shared)
        if goes_on:
            return seconds + self._load(seq, 0, shared)
        n_common = seq.n // 2
        if len(prompt.boundaries) > 1:
            n_common = prompt.boundaries[1]
        if shared < n_common:
            return seconds
        n_row_bytes = self._memory.shape.sizes.rows(0, shared)
        return seconds + self._cache.costs.load(n_row_bytes)

    def _load(self, seq: LiveSequence, first: int, last: int) -> float:
        n_row_bytes = self._memory.shape.sizes.rows(first, last)
        n_state_bytes = self._memory.state_size(seq.id)
        return self._cache.costs.load(n_row_bytes + n_state_bytes)


class CellPool:
    """``n_cells`` cells: each token of a sequence takes one, held rows take some of the others.

    To free cells, sequences are parked; the cache keeps their snapshots by worth.
    """

    def __init__(self, occupancy: Occupancy, n_cells: int, prefix_cache: PrefixCache) -> None:
        self.n_cells = n_cells
        self.values = SequenceValues(prefix_cache.memory, prefix_cache.cache, occupancy)
        self._occupancy = occupancy
        self._park = prefix_cache.park
        self._device = prefix_cache.device

    @property
    def n_used(self) -> int:
        """Cells that sequences use, including restores in progress."""
        n_used = 0
        for seq in self._occupancy.sequences:
            n_used += max(seq.n, seq.n_expected)
        return n_used

    def make_room(self, n: int, n_ready: int = 0) -> bool:
        """Free ``n`` cells for a sequence, of which ``n_ready`` already hold its rows.

        Evicts held rows from the device. Parks idle sequences if that is not enough, or if held
        rows are likelier to be used. False if running requests and locked snapshots without a copy
        leave too few cells.
        """
        if self._device.is_pool:
            self._device.vacate(self.n_used, self.n_used + n)
            return self.n_used + n <= self.n_cells
        # llama.cpp may split a batch of several sequences, and allocates the cells of each part
        # separately.
        n_extra = 0
        if len(self._occupancy.sequences) > 1:
            n_extra = min(n, MIN_FREE)
        while True:
            n_left = self.n_cells - self.n_used - n
            n_held = max(n_left + n_ready - n_extra, 0)  # held rows that may stay
            if n_left >= 0 and self._device.n_cells <= n_held:
                return True  # as for almost every token
            idle = self._occupancy.to_park()
            if n_left < 0:
                if not idle:
                    return False
                least = self.values.pick_to_park(idle, -n_left)
                self._park(least)
                continue
            free = (seq for seq in idle if self._occupancy.owner(seq) is None)
            coldest = min(free, key=self.values.expected_resumes, default=None)
            if coldest is None:
                return self._device.shrink(n_held)
            likely = self.values.expected_resumes(coldest)
            if self._device.can_shrink(n_held, likely):
                return self._device.shrink(n_held)
            self._park(coldest)

    def empty(self) -> bool:
        """Remove all unused rows from the context; return whether that freed cells."""
        n_held = self._device.n_cells
        parked = self.clear_idle()
        self._device.shrink(0)
        return parked or self._device.n_cells < n_held

    def clear_idle(self, *, named: bool = True) -> bool:
        """Park all idle sequences, those that clients named only with ``named``; return whether any
        had tokens.
        """
        idle = self._occupancy.to_park()
        if not named:
            idle = [seq for seq in idle if seq.id not in self._occupancy.named]
        for seq in idle:
            self._park(seq)
        return bool(idle)
