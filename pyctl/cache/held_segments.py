"""Segments whose rows the device holds: their order of eviction, and their room in RAM."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping

from pyctl.cache.budget import Budget
from pyctl.cache.eviction import CostAwareEviction
from pyctl.cache.evictor import Evictor
from pyctl.cache.prompt_ends import PromptEnds
from pyctl.cache.snapshot import Segment, Snapshot, needed_by
from pyctl.cache.snapshot_index import SnapshotIndex

__all__ = ["ExpectedResumes", "HeldSegments"]


class ExpectedResumes:
    """The number of prompts that are expected to resume on the rows of each segment.

    It is computed once for each turn, since all segments are visited for it.
    """

    def __init__(
        self, policy: CostAwareEviction[Snapshot], ends: PromptEnds, index: SnapshotIndex
    ) -> None:
        self._policy = policy
        self._ends = ends
        self._index = index
        self._turn_of_values = -1
        self._values: Mapping[Segment, float] = {}

    def by_segment(self) -> Mapping[Segment, float]:
        """Return the expected prompts of this turn; a segment that came since has none yet."""
        if self._turn_of_values != self._index.turn:
            ends = {segment: 0.0 for end in self._ends for segment in end.chain}
            self._values = {**ends, **self._policy.expected_resumes()}
            self._turn_of_values = self._index.turn
        return self._values

    def on(self, segment: Segment) -> float:
        """Return the expected prompts on ``segment``, infinite if it is new."""
        return self.by_segment().get(segment, math.inf)

    def forget(self) -> None:
        """Compute the numbers of this turn again."""
        self._turn_of_values = -1


class HeldSegments:
    """The segments of a RAM cache whose rows the device holds, as long as it has cells for them.

    Rows that only the device has take no bytes in RAM. Before they leave the device, `make_room`
    decides whether they are worth their bytes there.

    Attributes:
        resumes: The prompts that are expected to resume on each segment.
        pool: The segments of all snapshots.
        budget: The room for their rows in RAM.
        n_lost: Segments that left the device since the start without room in RAM.
    """

    def __init__(
        self,
        index: SnapshotIndex,
        budget: Budget,
        policy: CostAwareEviction[Snapshot],
        ends: PromptEnds,
        evictor: Evictor,
    ) -> None:
        self.resumes = ExpectedResumes(policy, ends, index)
        self.n_lost = 0
        self.pool = index.pool
        self.budget = budget
        self._index = index
        self._policy = policy
        self._ends = ends
        self._evictor = evictor

    def only_held(self) -> list[Segment]:
        """Return the segments whose rows only the device has, the ones first on which the most
        prompts are expected to resume.
        """
        only = [segment for segment in self.pool if segment.device_only_bytes]
        return sorted(only, key=self.resumes.on, reverse=True)

    def eviction_order(self, n_freed: Callable[[Segment], int]) -> Iterator[Segment]:
        """Yield the segments that the device may evict, by the prompts expected to resume there.

        Copies of rows in RAM are the first: they lose least. ``n_freed`` is how many cells become
        free now; a segment that frees none is left out. Segments of locked snapshots are evicted
        only if RAM has them, and after the others.
        """
        staying = needed_by(self._index.locks)
        ranked: list[tuple[bool, bool, float, int, Segment]] = []
        for number, segment in enumerate(self.pool):
            has_copy = bool(segment.rows.size)
            is_locked = segment in staying
            if segment.held is not None and (has_copy or not is_locked):
                n_resumes = self.resumes.on(segment)
                ranked.append((not has_copy, is_locked, n_resumes, number, segment))
        heapq.heapify(ranked)  # mostly few of them are evicted
        while ranked:
            segment = heapq.heappop(ranked)[-1]
            if segment.held is not None and n_freed(segment) > 0:
                yield segment

    def pay(self, n_bytes: int) -> None:
        """Drop copies in RAM of rows that the device has, the fewest expected prompts first, until
        ``n_bytes`` more fit. No conversation loses anything.
        """
        if self.budget.room(n_bytes) >= 0:
            return
        for segment in sorted(self.pool.copies(), key=self.resumes.on):
            self.pool.drop_ram_copy(segment)
            if self.budget.room(n_bytes) >= 0:
                return

    def make_room(self, segment: Segment, n_bytes: int, *, only_if_free: bool = False) -> bool:
        """Evict snapshots of lower worth until the rows of ``segment``, ``n_bytes``, which only the
        device has, fit.

        Return False, evicting nothing, if the victims are worth more than all that is lost without
        these rows, and with ``only_if_free`` if there are any. Pinned and retained rows fit, if
        need be beyond the budget.
        """
        index = self._index
        if segment not in self.pool:
            return False
        with index.locked(*self._ends.through(segment)):
            self._ends.pay(n_bytes)
            room = self.budget.room(n_bytes)
            if room >= 0:
                return True
            if only_if_free:
                return False
            if not index.is_fixed(segment) and not self._is_worth(segment, int(-room)):
                return False
            best = max(index.needing(segment), key=self._policy.value, default=None)
            staying = [best] if best is not None else []
            with index.locked(*staying):
                self.budget.make_room(n_bytes)
            return True

    def _is_worth(self, segment: Segment, n_missing: int) -> bool:
        """Return whether the victims for ``n_missing`` bytes are worth less than all snapshots
        that need the rows of ``segment``.

        Without the rows, the states of these snapshots go too, so victims pay for that many bytes
        more. A victim that frees more than is left to pay counts in proportion, since the next
        rows take the rest: otherwise an old conversation of some GiB outlasts young ones, each of
        which is worth less than all of it.
        """
        # Copies of rows on the device go first, and lose nothing.
        n_bytes = n_missing - sum(int(each.rows.nbytes) for each in self.pool.copies())
        if n_bytes <= 0:
            return True
        needing = self._index.needing(segment)
        lost = self._policy.combined_value(needing)
        best = max(needing, key=self._policy.value, default=None)
        n_unpaid = n_bytes + sum(snapshot.state.own_bytes for snapshot in needing)
        for snapshot in self._policy.rank():
            if n_unpaid <= 0:
                break
            if snapshot is not best and self._index.is_evictable(snapshot):
                n_freed = max(self.pool.n_freed(snapshot, without_copies=True), 1)
                lost -= self._policy.value(snapshot) * min(n_unpaid / n_freed, 1.0)
                n_bytes -= n_freed
                n_unpaid -= n_freed
        return n_bytes <= 0 and lost > 0

    def evict_dependents(self, segment: Segment) -> None:
        """Evict all snapshots that need ``segment``, whose rows leave the device and find no room
        in RAM.

        Raises ValueError if one of them has to stay; only prompt ends have been evicted then.
        """
        for end in self._ends.through(segment):
            self._ends.drop(end)
        if self._index.is_fixed(segment):
            raise ValueError("something that has to stay needs these rows")
        deepest_first = sorted(self._index.needing(segment), key=lambda snapshot: -snapshot.n)
        for snapshot in deepest_first:
            self._evictor.evict(snapshot)
        self.n_lost += 1
