"""The RAM cache: index of snapshots, eviction, and the count of bytes."""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from pyctl.cache.costs import Costs
from pyctl.cache.eviction import CostAwareEviction
from pyctl.cache.prefix_tree import PrefixTree
from pyctl.cache.ram_budget import RamBudget
from pyctl.cache.segment_pool import SegmentPool
from pyctl.cache.snapshot import Block, Prefix, PromptMatch, Segment, Snapshot, needed_by
from pyctl.settings.limit import limit

__all__ = ["MAX_ENDS", "RamCache"]

log = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""The least time between two warnings that something is too large."""

HALF_TURNS = 8.0
"""After so many requests without one, a conversation is half as likely to go on with the next."""


MAX_ENDS = limit(8, "prompt ends", "the least recently used are evicted", "memory")


class RamCache:
    """The snapshots in RAM, and the decisions on which of them stay.

    A prefix has at most one snapshot, which holds exactly that prefix. A snapshot that is `locked`
    or pinned is never evicted; the policy chooses among the others. A new snapshot that would not
    fit together with these, and all rows that it builds on, is refused before anything is evicted.
    Rows that only the device holds take no bytes here. If they have to stay, they count as if they
    were in RAM, so that there is room when they leave the device. Not thread-safe: the engine's
    thread owns the cache.

    Attributes:
        n_slots: The maximum number of snapshots, 0 for as many as there is room for.
        budget: The maximum of bytes, None for no limit, 0 for no cache.
        shared: The budget that this cache has together with the caches of other models.
        costs: Measured seconds of evaluating and loading.
        pool: The segments that the snapshots share, with the count of bytes.
        on_evict: The function that gets each snapshot before its eviction, all its rows still
            there, and the seconds that it was expected to save. It may not change the cache.
        n_evicted: Snapshots that were evicted since the start.
        n_refused: Snapshots that were refused since the start, being too large.
        n_lost: Segments that left the device since the start without room in RAM.
        tree: The snapshots by continuation.
        turn: The clock of the policy, which counts requests of all models.
        policy: The order of eviction.
        pinned: The snapshots that a client has pinned.
        retained: The snapshots of suspended sequences, which no lookup finds.
        locks: How often each snapshot is locked now.
        ends: The snapshots at the very ends of prompts.
    """

    def __init__(
        self,
        n_slots: int,
        budget: int | None,
        costs: Costs | None = None,
        shared: RamBudget | None = None,
    ) -> None:
        """Start an empty cache, with a new budget and new costs unless ``shared`` and ``costs`` are
        given.
        """
        self.n_slots = n_slots
        self.budget = budget
        self.shared = shared or RamBudget(budget)
        self.costs = costs or Costs()
        self.pool = SegmentPool()
        self.on_evict: Callable[[Snapshot, float], None] = lambda snapshot, worth: None
        self.n_evicted = self.n_refused = self.n_lost = 0
        self.tree: PrefixTree[Snapshot] = PrefixTree()
        self.turn = 0
        self.policy = CostAwareEviction(
            self.tree, self.pool.n_freed, lambda: self.turn, self.costs, half_life=HALF_TURNS
        )
        self.pinned: set[Snapshot] = set()
        self.retained: list[Snapshot] = []
        self.locks: Counter[Snapshot] = Counter()
        self.ends = PromptEnds(self)
        self._snapshots: dict[Prefix, Snapshot] = {}
        self._likely: tuple[int, dict[Segment, float]] = -1, {}  # and the turn that they are of
        self._quiet_until = 0.0

    @property
    def n_bytes(self) -> int:
        """The bytes of all snapshots in RAM."""
        return self.pool.n_bytes

    @property
    def enabled(self) -> bool:
        """True if anything is kept at all."""
        return self.budget != 0

    def snapshots(self) -> list[Snapshot]:
        """Return all snapshots that a lookup can find, the oldest first."""
        return list(self._snapshots.values())

    def segments(self) -> list[Segment]:
        """Return all segments that some snapshot needs, whether a lookup can find it or not."""
        return list(self.pool)

    # -- lookup
    # ----------------------------------------------------------------------------------

    def next_turn(self) -> None:
        """Advance the policy's clock by one: another request starts."""
        self.turn = self.shared.next_turn()

    def lookup(self, prompt: PromptMatch, limit: int) -> list[Snapshot]:
        """Return the snapshots that hold a prefix of ``prompt`` of at most ``limit`` tokens,
        deepest first.
        """
        found = self.tree.matching(
            lambda snapshot: snapshot.n <= limit and prompt.shared(snapshot) == snapshot.n
        )
        return sorted(found, key=lambda snapshot: -snapshot.n)

    def overlap(self, prompt: PromptMatch) -> tuple[Snapshot | None, int]:
        """Return the snapshot that shares the most leading tokens with ``prompt``, and their
        number.
        """
        best: tuple[Snapshot | None, int] = (None, 0)
        for snapshot in self.snapshots():
            shared = prompt.shared(snapshot)
            if shared > best[1]:
                best = snapshot, shared
        return best

    def get(self, prefix: Prefix) -> Snapshot | None:
        """Return the snapshot of exactly ``prefix``, None if there is none."""
        return self._snapshots.get(prefix)

    def conversation_ends(self) -> list[Snapshot]:
        """Return the snapshots that no deeper one builds on, the last used first."""
        ends = [node.key for node in self.tree if not node.children]
        return sorted(ends, key=lambda snapshot: snapshot.used, reverse=True)

    def touch(self, snapshot: Snapshot) -> None:
        """Count a hit of ``snapshot``, but not of its ancestors."""
        snapshot.hits += 1
        snapshot.used = time.monotonic()
        if (kept := self.get(snapshot.prefix)) is not None:
            self.tree.touch(kept, self.turn)

    # -- change
    # ----------------------------------------------------------------------------------

    @contextmanager
    def locked(self, *snapshots: Snapshot) -> Iterator[None]:
        """Evict none of ``snapshots`` within the block. A snapshot may be locked several times, and
        need not be in the cache.
        """
        self.locks.update(snapshots)
        try:
            yield
        finally:
            self.locks.subtract(snapshots)
            for snapshot in snapshots:
                if not self.locks[snapshot]:
                    del self.locks[snapshot]

    def may_add(
        self,
        prefix: Prefix,
        n_bytes: int,
        segment: Segment | None = None,
        blocks: Collection[Block] = (),
    ) -> bool:
        """Return whether there would be room for a snapshot of ``prefix``: ``n_bytes`` besides the
        rows of ``segment`` and the ``blocks`` of a window. Evicts nothing before `add`.

        False when the prefix is here already, or the budget or the number of snapshots leaves no
        room for it beyond snapshots that stay.
        """
        if not self.enabled or prefix in self._snapshots:
            return False
        if not self._fits(prefix, n_bytes, segment, blocks):
            return False
        if self._n_places > 0:
            return True
        return self.policy.choose_victim(self._may_go, per_byte=False) is not None

    def add(self, snapshot: Snapshot) -> bool:
        """Enter ``snapshot``, and evict others for it; return False if `may_add` refuses it.

        Raises ValueError if it builds on rows that were dropped.
        """
        if not self.pool.is_whole(snapshot):
            raise ValueError("the snapshot builds on rows that were dropped")
        state = snapshot.state
        if not self.may_add(snapshot.prefix, state.own_bytes, snapshot.segment, state.shared):
            return False
        self.pool.retain(snapshot)
        if self._n_places <= 0:
            victim = self.policy.choose_victim(self._may_go, per_byte=False)
            if victim is not None:
                self._evict(victim)
        self._snapshots[snapshot.prefix] = snapshot
        turn = snapshot.facts.turn
        used = self.turn
        if turn is not None and turn + 1 < self.turn:  # of an older conversation, parked now
            used = turn
            self._likely = -1, {}
        node = self.tree.add(snapshot, snapshot.n, snapshot.links(), used, snapshot.hits)
        node.is_turn = snapshot.is_turn
        node.own.n_opening = snapshot.facts.n_opening
        with self.locked(snapshot):
            self._shrink()
        if self._room() < 0:  # another model took the room since `_fits`
            self._remove(snapshot)
            return False
        return True

    def drop(self, snapshot: Snapshot) -> None:
        """Remove a snapshot, such as one that failed to restore."""
        if self.get(snapshot.prefix) is snapshot:
            self._remove(snapshot)
        self.ends.drop(snapshot)

    def retain(self, snapshot: Snapshot) -> None:
        """Keep the bytes of ``snapshot`` until `release`, beyond the budget if necessary; no lookup
        finds it.
        """
        self.pool.retain(snapshot)
        self.retained.append(snapshot)
        self._shrink()

    def release(self, snapshot: Snapshot) -> None:
        """End `retain` of ``snapshot``."""
        self.retained.remove(snapshot)
        self.pool.release(snapshot)

    def clear(self, *, pinned: bool = False) -> int:
        """Drop everything, pinned snapshots only with ``pinned``; return how many snapshots
        went.
        """
        self.ends.clear()
        if pinned:
            self.pinned.clear()
        going = [each for each in self.snapshots() if each not in self.pinned]
        for snapshot in going:
            self._remove(snapshot)
        return len(going)

    def pin(self, name: str, pinned: bool) -> bool:
        """Lock the snapshot of the prefix called ``name`` until it is unpinned, or unpin it.

        Return False if there is none, or if the budget has no room for all of it and the others
        that have to stay.
        """
        snapshot = next((each for each in self.snapshots() if each.prefix.name == name), None)
        if snapshot is None:
            return False
        if not pinned:
            self.pinned.discard(snapshot)
            return True
        if self.budget is not None:
            needed = self.pool.n_needed([snapshot, *self._fixed()])
            if needed > self.budget - self.shared.fixed_by_others(self):
                return False
        self.pinned.add(snapshot)
        return True

    # -- rows that the device holds
    # ----------------------------------------------------------------------------------

    def make_room_for_rows(
        self, segment: Segment, n_bytes: int, *, only_if_free: bool = False
    ) -> bool:
        """Evict snapshots of lower worth until the rows of ``segment``, ``n_bytes``, which only the
        device has, fit.

        Return False, evicting nothing, if the victims are worth more than all that is lost without
        these rows, and with ``only_if_free`` if there are any. Pinned and retained rows fit, if
        need be beyond the budget.
        """
        if segment not in self.pool:
            return False
        with self.locked(*self.ends.through(segment)):
            self.ends.fit(n_bytes)
            room = self._room(n_bytes)
            if room >= 0:
                return True
            if only_if_free:
                return False
            if not self._is_fixed(segment):
                # Copies of rows on the device go first, and lose nothing.
                n_missing = -room - sum(int(each.rows.nbytes) for each in self.pool.copies())
                if n_missing > 0 and not self._deserves(segment, n_missing):
                    return False
            best = max(self._needing(segment), key=self.policy.value, default=None)
            staying = [best] if best is not None else []
            with self.locked(*staying):
                self._shrink(n_bytes)
            return True

    def evict_dependents(self, segment: Segment) -> None:
        """Evict all snapshots that need ``segment``, whose rows leave the device and find no room
        in RAM.

        Raises ValueError if one of them has to stay; only prompt ends have been evicted then.
        """
        for end in self.ends.through(segment):
            self.ends.drop(end)
        if self._is_fixed(segment):
            raise ValueError("something that has to stay needs these rows")
        for snapshot in sorted(self._needing(segment), key=lambda snapshot: -snapshot.n):
            self._evict(snapshot)
        self.n_lost += 1

    def device_eviction_order(self, n_freed: Callable[[Segment], int]) -> Iterator[Segment]:
        """Yield the segments that the device may evict, by the prompts expected to resume there.

        Copies of rows in RAM are the first: they lose least. ``n_freed`` is how many cells become
        free now; a segment that frees none is left out. Segments of locked snapshots are evicted
        only if RAM has them, and after the others.
        """
        staying = needed_by(self.locks)
        likely = self.likely()
        ranked: list[tuple[bool, bool, float, int, Segment]] = []
        for number, each in enumerate(self.pool):
            has_copy = bool(each.rows.size)
            if each.held is not None and (has_copy or each not in staying):
                n_resumes = likely.get(each, math.inf)
                ranked.append((not has_copy, each in staying, n_resumes, number, each))
        heapq.heapify(ranked)  # mostly few of them are evicted
        while ranked:
            segment = heapq.heappop(ranked)[-1]
            if segment.held is not None and n_freed(segment) > 0:
                yield segment

    def only_held(self) -> list[Segment]:
        """Return the segments whose rows only the device has, the ones first on which the most
        prompts are expected to resume.
        """
        likely = self.likely()
        only = [segment for segment in self.pool if segment.only_held_bytes]
        return sorted(only, key=lambda segment: likely.get(segment, math.inf), reverse=True)

    # -- inside
    # ----------------------------------------------------------------------------------

    @property
    def _n_places(self) -> float:
        """The number of further snapshots that may come before one is evicted, whatever their
        bytes; infinite without `n_slots`.
        """
        return (self.n_slots or math.inf) - len(self._snapshots)

    def _may_go(self, snapshot: Snapshot) -> bool:
        return snapshot not in self.pinned and snapshot not in self.locks

    def _needing(self, segment: Segment) -> list[Snapshot]:
        return [node.key for node in self.tree.through(segment)]

    def _fixed(self) -> list[Snapshot]:
        """Return the snapshots whose rows stay in RAM, if need be beyond the budget."""
        return [*self.pinned, *self.retained]

    def _is_fixed(self, segment: Segment) -> bool:
        """Return whether the rows of ``segment`` stay in RAM."""
        return any(segment in snapshot.chain for snapshot in self._fixed())

    def _fits(
        self, prefix: Prefix, n_bytes: int, segment: Segment | None, blocks: Collection[Block] = ()
    ) -> bool:
        """Return whether ``n_bytes`` fit into the budget together with ``segment``, its ancestors,
        ``blocks`` of a window, and all that has to stay.

        The states alone often show that there is room. Otherwise the sum over all chains is needed,
        which visits every segment of the snapshots that stay.
        """
        if self.budget is None:
            return True
        fixed = self._fixed()
        if not fixed and self._frees(n_bytes + self.pool.n_new(segment, blocks)):
            return True
        staying = [each for each in (*self.ends, *self.snapshots()) if each in self.locks]
        n_bytes += self.pool.n_needed(fixed, staying, segment, blocks)
        elsewhere = self.shared.fixed_by_others(self)
        if n_bytes <= self.budget - elsewhere:
            return True
        if n_bytes <= self.budget:  # loaded models evict for the next one
            self.shared.take(self, n_bytes + elsewhere - self.budget, math.inf)
        self.n_refused += 1
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + QUIET_SECONDS
            log.warning(
                "no snapshot at %d tokens: with its parents and all locked snapshots it needs "
                "%.1f MiB, "
                "--cache-ram is %.1f MiB; shorter prefixes stay cached",
                *(prefix.n, n_bytes / 2**20, self.budget / 2**20),
            )
        return False

    def _frees(self, n_bytes: int) -> bool:
        """Return whether evicting only the states of unlocked snapshots would free ``n_bytes``.

        The loop ends as soon as it has enough, so it mostly looks at one snapshot.
        """
        room = self._room(n_bytes)
        others = (each for each in (*self.ends, *self.snapshots()) if each not in self.locks)
        while room < 0 and (each := next(others, None)) is not None:
            room += each.state.own_bytes
        return room >= 0

    def _room(self, n_bytes: int = 0) -> float:
        """Return the bytes that would be left of the budget after ``n_bytes`` more, negative if it
        is exceeded.
        """
        if self.budget is None:
            return math.inf
        return self.budget - self.n_bytes - self.shared.used_by_others(self) - n_bytes

    def _shrink(self, n_bytes: int = 0) -> None:
        """Make room for ``n_bytes``, as far as anything may be evicted.

        Prompt ends go first, then copies in RAM of rows that the device has: neither costs a
        conversation. Then the snapshots of this cache and of other models' caches compete by worth
        per byte.
        """
        self.ends.fit(n_bytes)
        if self._room(n_bytes) >= 0:
            return
        copies = self.pool.copies()
        likely = self.likely() if copies else {}
        for segment in sorted(copies, key=lambda each: likely.get(each, math.inf)):
            self.pool.drop_ram_copy(segment)
            if self._room(n_bytes) >= 0:
                return
        while (room := self._room(n_bytes)) < 0:
            victim = self.policy.choose_victim(self._may_go)
            worth = math.inf if victim is None else self.policy.value(victim, per_byte=True)
            if self.shared.take(self, int(-room), worth):
                continue
            if victim is None:
                return
            self._evict(victim)

    def evict_bytes(self, n_bytes: int, worth: float) -> bool:
        """Evict snapshots of less than ``worth``, seconds per byte, until ``n_bytes`` are free, for
        another cache of the same budget; return whether any was evicted. Prompt ends go first.
        """
        before = self.n_bytes
        minimum = self.n_bytes - n_bytes
        self.turn = self.shared.turn
        for end in list(self.ends):
            if self.n_bytes > minimum and end not in self.locks:
                self.ends.drop(end)
        while self.n_bytes > minimum:
            victim = self.policy.choose_victim(self._may_go)
            if victim is None or self.policy.value(victim, per_byte=True) >= worth:
                break
            self._evict(victim)
        return self.n_bytes < before

    def _deserves(self, segment: Segment, n_bytes: float) -> bool:
        """Return whether the victims for ``n_bytes`` of ``segment`` are worth less than all
        snapshots that need its rows.

        Copies of rows that the device has count as free: the caller drops them before it evicts
        anything.
        """
        needing = self._needing(segment)
        lost = self.policy.combined_value(needing)
        best = max(needing, key=self.policy.value, default=None)
        for each in self.policy.rank():
            if n_bytes <= 0:
                break
            if each is not best and self._may_go(each):
                lost -= self.policy.value(each)
                n_bytes -= self.pool.n_freed(each, without_copies=True)
        return n_bytes <= 0 and lost > 0

    def likely(self) -> dict[Segment, float]:
        """Return the number of prompts that are expected to resume on the rows of each segment,
        computed once for each turn.
        """
        if self._likely[0] != self.turn:
            ends = {segment: 0.0 for end in self.ends for segment in end.chain}
            self._likely = self.turn, {**ends, **self.policy.expected_resumes()}
        return self._likely[1]

    def _evict(self, snapshot: Snapshot) -> None:
        self.on_evict(snapshot, self.policy.value(snapshot))
        self._remove(snapshot)
        self.n_evicted += 1

    def _remove(self, snapshot: Snapshot) -> None:
        self.tree.remove(snapshot)
        del self._snapshots[snapshot.prefix]
        self.pinned.discard(snapshot)
        self.pool.release(snapshot)


class PromptEnds:
    """The snapshots at the very ends of prompts, each with a state and the output there, for equal
    prompts and longer raw ones.

    Conversations continue elsewhere. So ``cache`` evicts these before all others, the least
    recently used first, but none that is locked.
    """

    def __init__(self, cache: RamCache) -> None:
        self._cache = cache
        self._ends: OrderedDict[Prefix, Snapshot] = OrderedDict()

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self._ends.values())

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def _n_places(self) -> float:
        return min(self._cache._n_places, MAX_ENDS)

    @property
    def n_bytes(self) -> int:
        """The bytes of their states: the minimum that becomes free when all of them are evicted."""
        return sum(end.state.own_bytes for end in self)

    def touch(self, snapshot: Snapshot) -> None:
        """Make ``snapshot`` the most recently used, if it is here."""
        if self._ends.get(snapshot.prefix) is snapshot:
            self._ends.move_to_end(snapshot.prefix)

    def through(self, segment: Segment) -> list[Snapshot]:
        """Return the prompt ends that need ``segment``."""
        return [end for end in self if segment in end.chain]

    def may_add(self, n_bytes: int, *, is_wanted: bool) -> bool:
        """Return whether a prompt end that adds ``n_bytes`` can stay. Unless it ``is_wanted``, it
        evicts only other prompt ends.
        """
        return self._n_places > 0 and (is_wanted or self._cache._room(n_bytes) + self.n_bytes >= 0)

    def add(self, snapshot: Snapshot, *, is_wanted: bool) -> bool:
        """Add ``snapshot``, which the caller has locked, in place of an older one of its prompt;
        return False if there is no room for it.

        Raises ValueError if it builds on rows that were dropped.
        """
        if not self._cache.pool.is_whole(snapshot):
            raise ValueError("the snapshot builds on rows that were dropped")
        self._cache.pool.retain(snapshot)
        if (older := self._ends.get(snapshot.prefix)) is not None:
            self.drop(older)
        self._ends[snapshot.prefix] = snapshot
        self.fit()
        if is_wanted:
            self._cache._shrink()
        if self._cache._room(0) < 0 or len(self) > self._n_places:
            self.drop(snapshot)
            return False
        return True

    def drop(self, snapshot: Snapshot) -> None:
        """Drop ``snapshot``, if it is here."""
        if self._ends.get(snapshot.prefix) is snapshot:
            del self._ends[snapshot.prefix]
            self._cache.pool.release(snapshot)

    def fit(self, n_bytes: int = 0) -> None:
        """Drop unlocked prompt ends, the oldest first, until ``n_bytes`` more fit and no place is
        exceeded.
        """
        for end in list(self):
            if self._cache._room(n_bytes) >= 0 and len(self) <= self._n_places:
                return
            if end not in self._cache.locks:
                self.drop(end)

    def drop_descendants(self, snapshot: Snapshot) -> None:
        """Drop the ends of all prompts that start with the tokens of ``snapshot``."""
        for end in list(self):
            if any(
                each is snapshot.segment and last >= snapshot.n for each, last in end.chain.items()
            ):
                self.drop(end)

    def clear(self) -> None:
        """Drop all prompt ends."""
        for end in list(self):
            self.drop(end)
