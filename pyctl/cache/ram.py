"""The cache of snapshots in RAM."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection
from contextlib import AbstractContextManager

from pyctl.cache.budget import Budget
from pyctl.cache.costs import Costs
from pyctl.cache.eviction import CostAwareEviction
from pyctl.cache.evictor import Evictor
from pyctl.cache.held_segments import HeldSegments
from pyctl.cache.prompt_ends import PromptEnds
from pyctl.cache.ram_budget import RamBudget
from pyctl.cache.snapshot import Block, Prefix, PromptMatch, Segment, Snapshot
from pyctl.cache.snapshot_index import SnapshotIndex

__all__ = ["RamCache"]

log = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""The least time between two warnings that something is too large."""

HALF_TURNS = 3.3
"""After so many requests without one, a conversation is half as likely to go on with the next."""


class RamCache:
    """The snapshots in RAM, and the decisions on which of them stay.

    A prefix has at most one snapshot, which holds exactly that prefix. A snapshot that is `locked`
    or pinned is never evicted; the policy chooses among the others. A new snapshot that would not
    fit together with these, and all rows that it builds on, is refused before anything is evicted.
    Rows that only the device holds take no bytes here. If they have to stay, they count as if they
    were in RAM, so that there is room when they leave the device. Not thread-safe: the engine's
    thread owns the cache.

    Three groups pay for more room, in this order: prompt ends, then copies in RAM of rows that the
    device has, since neither costs a conversation; then the snapshots of this cache and of other
    models' caches compete by worth per byte.

    Attributes:
        costs: Measured seconds of evaluating and loading.
        index: The snapshots and the facts about them.
        budget: The bytes and slots, and who pays for more.
        policy: The order of eviction.
        evictor: The evictions by this policy.
        prompt_ends: The snapshots at the very ends of prompts.
        held: The segments whose rows the device holds.
        n_refused: Snapshots that were refused since the start, being too large.
    """

    def __init__(
        self,
        n_slots: int,
        limit: int | None,
        costs: Costs | None = None,
        shared: RamBudget | None = None,
    ) -> None:
        """Start an empty cache of at most ``n_slots`` snapshots (0 for as many as fit) and
        ``limit`` bytes (None for no limit, 0 for no cache), with a new budget and new costs unless
        ``shared`` and ``costs`` are given.
        """
        self.costs = costs or Costs()
        index = SnapshotIndex()
        self.index = index
        self.budget = Budget(
            index.pool,
            index.by_prefix,
            limit,
            n_slots,
            shared=shared or RamBudget(limit),
            owner=self,
        )
        self.policy = CostAwareEviction(
            index.tree, index.pool.n_freed, lambda: index.turn, self.costs, half_life=HALF_TURNS
        )
        self.evictor = Evictor(index, self.budget, self.policy)
        self.prompt_ends = PromptEnds(index.pool, index.locks, self.budget)
        self.held = HeldSegments(index, self.budget, self.policy, self.prompt_ends, self.evictor)
        self.budget.payers = (self.prompt_ends, self.held, self.evictor)
        self.n_refused = 0
        self._quiet_until = 0.0

    @property
    def n_bytes(self) -> int:
        """The bytes of all snapshots in RAM."""
        return self.index.pool.n_bytes

    @property
    def enabled(self) -> bool:
        """True if anything is kept at all."""
        return self.budget.limit != 0

    def snapshots(self) -> list[Snapshot]:
        """Return all snapshots that a lookup can find, the oldest first."""
        return list(self.index.by_prefix.values())

    def segments(self) -> list[Segment]:
        """Return all segments that some snapshot needs, whether a lookup can find it or not."""
        return list(self.index.pool)

    # -- lookup
    # ----------------------------------------------------------------------------------

    @property
    def turn(self) -> int:
        """The policy's clock, which counts requests of all models."""
        return self.index.turn

    def next_turn(self) -> None:
        """Advance the policy's clock by one: another request starts."""
        self.index.turn = self.budget.shared.next_turn()

    def lookup(self, prompt: PromptMatch, limit: int) -> list[Snapshot]:
        """Return the snapshots that hold a prefix of ``prompt`` of at most ``limit`` tokens,
        deepest first.
        """
        matching = self.index.tree.matching(
            lambda snapshot: snapshot.n <= limit and prompt.shared(snapshot) == snapshot.n
        )
        return sorted(matching, key=lambda snapshot: -snapshot.n)

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
        return self.index.by_prefix.get(prefix)

    def conversation_ends(self) -> list[Snapshot]:
        """Return the snapshots that no deeper one builds on, the last used first."""
        ends = [node.key for node in self.index.tree if not node.children]
        return sorted(ends, key=lambda snapshot: snapshot.used, reverse=True)

    def touch(self, snapshot: Snapshot) -> None:
        """Count a hit of ``snapshot``, but not of its ancestors."""
        snapshot.hits += 1
        snapshot.used = time.monotonic()
        if (existing := self.get(snapshot.prefix)) is not None:
            self.index.tree.touch(existing, self.turn)

    # -- change
    # ----------------------------------------------------------------------------------

    def locked(self, *snapshots: Snapshot) -> AbstractContextManager[None]:
        """Evict none of ``snapshots`` within the block. A snapshot may be locked several times, and
        need not be in the cache.
        """
        return self.index.locked(*snapshots)

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
        if not self.enabled or prefix in self.index.by_prefix:
            return False
        if not self._fits(prefix, n_bytes, segment, blocks):
            return False
        return self.budget.n_free_slots > 0 or self.evictor.can_free_slot

    def add(self, snapshot: Snapshot) -> bool:
        """Enter ``snapshot``, and evict others for it; return False if `may_add` refuses it.

        Raises ValueError if it builds on rows that were dropped.
        """
        if not self.index.pool.is_whole(snapshot):
            raise ValueError("the snapshot builds on rows that were dropped")
        state = snapshot.state
        if not self.may_add(snapshot.prefix, state.own_bytes, snapshot.segment, state.shared):
            return False
        self.index.pool.add_reference(snapshot)
        if self.budget.n_free_slots <= 0:
            self.evictor.free_slot()
        turn = snapshot.facts.turn
        used = self.turn
        if turn is not None and turn + 1 < self.turn:  # of an older conversation, parked now
            used = turn
            self.held.resumes.forget()
        node = self.index.add(snapshot, used)
        node.is_turn = snapshot.is_turn
        node.own.n_opening = snapshot.facts.n_opening
        node.own.n_system = snapshot.facts.n_system
        with self.locked(snapshot):
            self.budget.make_room()
        if self.budget.room() < 0:  # another model took the room since `_fits`
            self.index.remove(snapshot)
            return False
        return True

    def drop(self, snapshot: Snapshot) -> None:
        """Remove a snapshot, such as one that failed to restore."""
        if self.get(snapshot.prefix) is snapshot:
            self.index.remove(snapshot)
        self.prompt_ends.drop(snapshot)

    def protect(self, snapshot: Snapshot) -> None:
        """Keep the bytes of ``snapshot`` until `release`, beyond the budget if necessary; no lookup
        finds it.
        """
        self.index.pool.add_reference(snapshot)
        self.index.retained.append(snapshot)
        self.budget.make_room()

    def release(self, snapshot: Snapshot) -> None:
        """End `protect` of ``snapshot``."""
        self.index.retained.remove(snapshot)
        self.index.pool.release(snapshot)

    def clear(self, *, pinned: bool = False) -> int:
        """Drop everything, pinned snapshots only with ``pinned``; return how many snapshots
        went.
        """
        self.prompt_ends.clear()
        if pinned:
            self.index.pinned.clear()
        going = [each for each in self.snapshots() if each not in self.index.pinned]
        for snapshot in going:
            self.index.remove(snapshot)
        return len(going)

    def pin(self, name: str, pinned: bool) -> bool:
        """Lock the snapshot of the prefix called ``name`` until it is unpinned, or unpin it.

        Return False if there is none, or if the budget has no room for all of it and the others
        that have to stay.
        """
        snapshot = next(
            (candidate for candidate in self.snapshots() if candidate.prefix.name == name), None
        )
        if snapshot is None:
            return False
        if not pinned:
            self.index.pinned.discard(snapshot)
            return True
        if self.budget.limit is not None:
            needed = self.index.pool.n_needed([snapshot, *self.index.fixed()])
            if needed > self.budget.limit - self.budget.fixed_by_others:
                return False
        self.index.pinned.add(snapshot)
        return True

    def evict_bytes(self, n_bytes: int, value: float) -> bool:
        """Evict snapshots of less than ``value``, seconds per byte, until ``n_bytes`` are free, for
        another cache of the same budget; return whether any was evicted. Prompt ends go first.
        """
        n_before = self.n_bytes
        n_after = n_before - n_bytes
        self.index.turn = self.budget.shared.turn
        self.prompt_ends.shrink(n_after)
        self.evictor.evict_below(value, n_after)
        return self.n_bytes < n_before

    # -- inside
    # ----------------------------------------------------------------------------------

    def _fits(
        self, prefix: Prefix, n_bytes: int, segment: Segment | None, blocks: Collection[Block] = ()
    ) -> bool:
        """Return whether ``n_bytes`` fit into the budget together with ``segment``, its ancestors,
        ``blocks`` of a window, and all that has to stay.

        The states alone often show that there is room. Otherwise the sum over all chains is needed,
        which visits every segment of the snapshots that stay.
        """
        limit = self.budget.limit
        if limit is None:
            return True
        fixed = self.index.fixed()
        if not fixed and self._frees(n_bytes + self.index.pool.n_new(segment, blocks)):
            return True
        staying = [
            snapshot
            for snapshot in (*self.prompt_ends, *self.snapshots())
            if snapshot in self.index.locks
        ]
        n_bytes += self.index.pool.n_needed(fixed, staying, segment, blocks)
        elsewhere = self.budget.fixed_by_others
        if n_bytes <= limit - elsewhere:
            return True
        if n_bytes <= limit:  # loaded models evict for the next one
            self.budget.take_from_others(n_bytes + elsewhere - limit, math.inf)
        self.n_refused += 1
        self._warn_too_large(prefix, n_bytes / 2**20, limit / 2**20)
        return False

    def _warn_too_large(self, prefix: Prefix, mib: float, limit_mib: float) -> None:
        """Log that a snapshot of ``prefix`` needs ``mib``, unless that was logged just before."""
        if time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + QUIET_SECONDS
        log.warning(
            "no snapshot at %d tokens: with its parents and all locked snapshots it needs "
            "%.1f MiB, --cache-ram is %.1f MiB; shorter prefixes stay cached",
            prefix.n,
            mib,
            limit_mib,
        )

    def _frees(self, n_bytes: int) -> bool:
        """Return whether evicting only the states of unlocked snapshots would free ``n_bytes``.

        The loop ends as soon as it has enough, so it mostly looks at one snapshot.
        """
        room = self.budget.room(n_bytes)
        others = (
            snapshot
            for snapshot in (*self.prompt_ends, *self.snapshots())
            if snapshot not in self.index.locks
        )
        while room < 0 and (snapshot := next(others, None)) is not None:
            room += snapshot.state.own_bytes
        return room >= 0
