"""The cells of the context, which all sequences share, and which sequence is parked when they run out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from pyctl.cache import LiveSequence, PrefixCache, RamCache, SequenceMemory
from pyctl.engine.schedule.admission import Occupancy
from pyctl.prompt import Prompt

__all__ = ["CellPool", "SequenceWorth"]

LEAST_FREE = 256
"""Cells that held rows leave free in addition to those that are needed, for batches that are divided."""


class SequenceWorth:
    """The worth of idle sequences in expected seconds, by the policy of ``cache``.

    A prompt that continues a live sequence has its tokens at once. Otherwise rows and state come from RAM, or are
    evaluated if that takes less or RAM does not have them.
    """

    def __init__(self, memory: SequenceMemory, cache: RamCache, occupancy: Occupancy) -> None:
        self._memory, self._cache, self._occupancy = memory, cache, occupancy

    def likely(self, seq: LiveSequence) -> float:
        """How many prompts to expect that resume in ``seq``."""
        return self._cache.policy.likely_within(seq.facts.asked)

    def left(self, seq: LiveSequence, n: int = 0) -> float:
        """The seconds that are lost when only its first ``n`` tokens stay."""
        if n >= seq.n:
            return 0.0
        seconds = self._cache.costs.evaluate(n if self._memory.shape.cut_anywhere else 0, seq.n)
        if self._cache.enabled and seq.facts.cached:
            seconds = min(seconds, self._load(seq, n, seq.n))
        return self.likely(seq) * seconds

    def best(self, idle: Iterable[LiveSequence], prompt: Prompt, *, clears: bool) -> LiveSequence:
        """The sequence of ``idle`` for ``prompt``: the highest gain, less the worth of the tokens that it replaces.

        Nothing is lost where the conversation continues after its last prompt, however it is written now. Where all are
        as good, it is the one that shares most, then the one that was not used for longest. With ``clears`` all make
        way anyway but those that clients call by number.
        """

        def rank(seq: LiveSequence) -> tuple[float, int, int]:
            shared = seq.shared(prompt.tokens)
            is_lost = shared < seq.facts.n_header and (seq.id in self._occupancy.named or not clears)
            return (
                self._gained(seq, prompt, shared) - is_lost * self.left(seq, shared),
                shared,
                -self._occupancy.used(seq),
            )

        return max(idle, key=rank)

    def leaving(self, idle: Collection[LiveSequence], n: int) -> LiveSequence:
        """Which of ``idle`` makes way for ``n`` cells: least is lost by it, for each cell where one is not enough.

        Those that a request is about to have go last.
        """
        used = self._occupancy.used
        free = [seq for seq in idle if self._occupancy.owner(seq) is None] or idle
        if enough := [seq for seq in free if seq.n >= n]:
            return min(enough, key=lambda seq: (self.left(seq), used(seq)))
        return min(free, key=lambda seq: (self.left(seq) / seq.n, used(seq)))

    def _gained(self, seq: LiveSequence, prompt: Prompt, shared: int) -> float:
        """Seconds by which ``prompt`` is ready sooner than in an empty sequence.

        Rows that many conversations share are kept for all of them: no sequence is taken for these alone.
        """
        if not shared:
            return 0.0
        _, n_saved = seq.saved()
        goes_on = shared == seq.n
        n_only = max(shared - n_saved, 0) if goes_on or self._memory.shape.cut_anywhere else 0
        seconds = self._cache.costs.evaluate(shared - n_only, shared)
        in_common = prompt.boundaries[1] if len(prompt.boundaries) > 1 else seq.n // 2
        if goes_on:
            return seconds + self._load(seq, 0, shared)
        return seconds + (
            self._cache.costs.load(self._memory.shape.sizes.rows(0, shared)) if shared >= in_common else 0.0
        )

    def _load(self, seq: LiveSequence, first: int, last: int) -> float:
        n_bytes = self._memory.shape.sizes.rows(first, last) + self._memory.state_size(seq.id)
        return self._cache.costs.load(n_bytes)


class CellPool:
    """``n_cells`` cells, of which each token of each sequence takes one, and held rows some of the others.

    A sequence that makes room is parked: the cache keeps it if it is worth it.
    """

    def __init__(self, occupancy: Occupancy, n_cells: int, prefix_cache: PrefixCache) -> None:
        self.n_cells = n_cells
        self.worth = SequenceWorth(prefix_cache.memory, prefix_cache.cache, occupancy)
        self._occupancy, self._park, self._device = occupancy, prefix_cache.park, prefix_cache.device

    @property
    def n_used(self) -> int:
        """Cells that sequences take, or are taking by a restore."""
        return sum(max(seq.n, seq.n_expected) for seq in self._occupancy.sequences)

    def make_room(self, n: int, n_ready: int = 0) -> bool:
        """Have ``n`` cells free for a sequence, or held for it in ``n_ready`` of them already.

        Held rows leave the device for it. Idle sequences are parked where held rows are not enough, or are likelier to
        be of use. False if those that are in use, and what only the device has of locked snapshots, leave
        too few.
        """
        if self._device.is_pool:
            self._device.vacate(self.n_used, self.n_used + n)
            return self.n_used + n <= self.n_cells
        # A batch of several sequences may be taken apart, and each part looks for its cells anew.
        extra = min(n, LEAST_FREE) if len(self._occupancy.sequences) > 1 else 0
        while True:
            idle, most = self._occupancy.to_park(), self.n_cells - self.n_used - n
            if most < 0:
                if not idle:
                    return False
                self._park(self.worth.leaving(idle, -most))
                continue
            most = max(most + n_ready - extra, 0)
            free = (seq for seq in idle if self._occupancy.owner(seq) is None)
            least = min(free, key=self.worth.likely, default=None)
            if least is None or self._device.can_shrink(most, self.worth.likely(least)):
                return self._device.shrink(most)
            self._park(least)

    def empty(self) -> bool:
        """Take out of the context whatever is not in use; returns whether that gave cells."""
        n_held, parked = self._device.n_cells, self.clear_idle()
        self._device.shrink(0)
        return parked or self._device.n_cells < n_held

    def clear_idle(self, *, named: bool = True) -> bool:
        """Park all idle sequences, those that clients call by number only with ``named``.

        Returns whether one of them held anything.
        """
        idle = [seq for seq in self._occupancy.to_park() if named or seq.id not in self._occupancy.named]
        for seq in idle:
            self._park(seq)
        return bool(idle)
