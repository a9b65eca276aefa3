"""The prefix cache as a request meets it: lookup, restore, plan, and writes to disk.

It evaluates nothing (`engine` does), and decides nothing about eviction (`RamCache`) or files (the
disk).

The steps of a request have an order. `PrefixCache.lookup` compares the prompt with recent ones
before it becomes recent itself, and finds candidates before anything changes.
`PrefixCache.park_previous` saves the previous conversation before the restore replaces its rows; it
locks the snapshots of the candidates, which saving could otherwise evict. `PrefixCache.plan`
follows the restore, since cuts lie after the restored position. `PrefixCache.persist` comes last,
when the snapshots that it writes exist.

The restore is a generator that yields while the disk reads, and the scheduler runs other requests
meanwhile. A snapshot may be evicted during such a wait, so each candidate is checked again when its
turn comes (`Candidate.recheck`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from pyctl.cache.cache_stats import CacheStats, Divergence, RequestStats
from pyctl.cache.device_tier import DeviceTier, MakeRoom
from pyctl.cache.interim import InterimSnapshots
from pyctl.cache.lookup import CacheLookup, CachePlan, may_use_disk
from pyctl.cache.plan import MIN_SHARED, choose_cuts, next_turn, snapshot_ends
from pyctl.cache.ports import CacheOptions, CacheRequest, SequenceMemory, Store
from pyctl.cache.positions import last_end
from pyctl.cache.prefetch import Prefetch
from pyctl.cache.prompt_comparison import compare_prompts
from pyctl.cache.ram import RamCache
from pyctl.cache.reads import Reading
from pyctl.cache.recent import ClosestPrompt, RecentPrompts
from pyctl.cache.restorer import Restorer
from pyctl.cache.saved_time import SavedTime
from pyctl.cache.saver import Saver
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import PromptFacts, PromptMatch, Snapshot
from pyctl.cache.write_back import WriteBack
from pyctl.prompt import as_tokens

__all__ = ["PrefixCache"]

PARK_MIN = 64
"""Fewer new tokens than this are not worth a snapshot when a live sequence is given away."""


class PrefixCache:
    """The cache of one model: ``cache`` in RAM with its device tier, and ``disk``, for all
    sequences of ``memory``.

    A request passes `lookup`, `park_previous`, `restore`, `plan`, then `Saver.save` at each cut,
    and `persist`. A failure of the cache is a miss or a missing snapshot, never an error of the
    request. A request that has to give its cells to others passes `Saver.suspend` and
    `Saver.resume` in between. The engine's thread calls everything.
    """

    def __init__(
        self, memory: SequenceMemory, cache: RamCache, settings: CacheOptions, disk: Store | None
    ) -> None:
        """Connect the parts of the cache. With a ``disk``, snapshots that ``cache`` evicts go to
        it.
        """
        self.memory = memory
        self.cache = cache
        self.device = DeviceTier(memory, cache, settings.device)
        self.disk = disk
        self.settings = settings
        self.recent = disk.recent if disk is not None else RecentPrompts()
        self.totals = CacheStats()
        self.saved_time = SavedTime()
        exact = settings.exact
        self.write_back = WriteBack(memory, cache, self.device.copies, disk)
        self.saver = Saver(memory, cache, self.device, self.write_back, exact=exact)
        self.prefetch = Prefetch(memory, cache, disk, exact=exact)
        self._restorer = Restorer(memory, cache, self.device, disk, self.totals, exact=exact)
        if disk is not None:
            disk.costs = cache.costs
            cache.evictor.on_evict = partial(disk.evict, rows_of=self.device.copies.fetch_rows)

    def lookup(
        self, request: CacheRequest, ends: Sequence[int], seq: LiveSequence, stats: RequestStats
    ) -> CacheLookup:
        """Find where the prompt of ``request``, whose batches end at ``ends``, can resume in
        ``seq``; note a client's prompt as recent.
        """
        with stats.timed("lookup_ms"):
            prompt = request.prompt
            if request.cache_prompt and request.after is None:
                self.cache.next_turn()
            match = PromptMatch(prompt.tokens, is_raw=prompt.is_raw)
            lookup = CacheLookup(request, match, ends, self._facts(request))
            if not request.cache_prompt:
                return lookup
            lookup = self._restorer.find(lookup, seq)
            if request.after is not None:
                return lookup  # a next turn that is prepared: no client sent it yet
            if not request.may_save:
                return lookup  # nothing of it stays, also not for comparisons
            recent = self.recent.compare(prompt)
            stats.comparison = compare_prompts(
                prompt, recent, may_read_prompts=request.may_read_prompts
            )
            # Drafts from a planted text would show in the pace of replies to others whether it
            # holds a piece of theirs.
            is_heard = request.may_read_prompts
            self.recent.add(prompt, recent, for_disk=lookup.facts.for_disk, is_heard=is_heard)
            return replace(lookup, recent=recent)

    def park_previous(self, seq: LiveSequence, lookup: CacheLookup, stats: RequestStats) -> None:
        """Park the conversation of ``seq`` unless the new prompt continues it; for a background
        request, whatever would be lost of it.
        """
        with stats.timed("restore_ms"):
            n_shared = seq.shared(lookup.match.tokens) if lookup.facts.cached else 0
            minimum = PARK_MIN
            best = lookup.candidates[0] if lookup.candidates else None
            stays = best is not None and best.n_kept >= seq.n and self.memory.shape.cut_anywhere
            if lookup.request.background and not stays:
                n_shared = 0
                minimum = 1
            with self.cache.locked(*lookup.snapshots):
                self._park(seq, n_shared, stats, minimum)
            seq.facts = lookup.facts

    def restore(
        self,
        lookup: CacheLookup,
        seq: LiveSequence,
        stats: RequestStats,
        make_room: MakeRoom = lambda n, n_ready: True,
    ) -> Reading[tuple[Snapshot, ...]]:
        """Bring ``seq`` to the deepest position of the prompt that can be restored, as
        `Restorer.restore_prefix` does, and return the snapshot that it came from, if any.
        """
        with stats.timed("restore_ms"):
            return (yield from self._restorer.restore_prefix(lookup, seq, stats, make_room))

    def plan(
        self,
        lookup: CacheLookup,
        restored: tuple[Snapshot, ...],
        seq: LiveSequence,
        stats: RequestStats,
        *,
        may_branch: bool = False,
    ) -> CachePlan:
        """Return where to take snapshots of the rest to evaluate, and which prefixes belong on
        disk.

        With ``may_branch`` also where raw text leaves another prompt, since it was edited or its
        last token has grown, if that takes a state.
        """
        recent = lookup.recent
        if recent is None:
            return CachePlan(lookup.match, restored=restored)
        self.cache.evictor.evicted.count_wanted(lookup.match, seq.n, stats.source)
        prompt = lookup.request.prompt
        nearest = recent.closest()
        n_common = nearest.common if nearest is not None else 0
        seq.n_overlap = 0
        if nearest is not None:
            self._note_branch(nearest, lookup, seq, stats)
        disk_positions: tuple[int, ...] = ()
        if self.disk is not None:
            disk_positions = self.disk.select(recent, seq.n, lookup.request.disk_policy)
        points = self.memory.shape.resume_points
        places = snapshot_ends(prompt, lookup.batch_ends, points)
        cuts = choose_cuts(
            prompt, places, seq.n, self.settings.min_step, (n_common, *disk_positions)
        )
        if may_branch and self._has_branch(lookup, seq.n, n_common):
            cuts = sorted({*cuts, *points.filter([n_common])})
        # Positions for the disk have to be among those at which snapshots are taken.
        persist = tuple(last_end(places, n) for n in disk_positions)
        turn = last_end(places, next_turn(prompt, n_common))
        return CachePlan(lookup.match, tuple(cuts), persist, restored, turn)

    def _note_branch(
        self, nearest: ClosestPrompt, lookup: CacheLookup, seq: LiveSequence, stats: RequestStats
    ) -> None:
        """Note in ``seq`` and ``stats`` that the prompt parts from the ``nearest`` recent one after
        the position to which it was restored; count for evictions whether it goes on at its end.
        """
        if nearest.common >= max(nearest.recent.prompt.opening, MIN_SHARED):
            self.cache.policy.continuations.record(is_at_end=nearest.is_continued)
        branch = last_end(lookup.batch_ends, nearest.common)
        if branch > seq.n:
            # Up to there the rows may be in the cache, only without a state to resume from.
            seq.n_overlap = nearest.common
        if branch > stats.n_cached and not nearest.is_continued:
            stats.miss = Divergence.around(
                nearest.common,
                stats.n_cached,
                nearest.recent.prompt.tokens,
                lookup.request.prompt.tokens,
            )

    def _has_branch(self, lookup: CacheLookup, n: int, n_common: int) -> bool:
        """Return whether a snapshot after the ``n_common`` tokens of another prompt is of use: this
        one is raw text, resumes before that, and its client may learn of others' texts.
        """
        request = lookup.request
        if not request.prompt.is_raw or not request.may_read_prompts:
            return False
        if self.settings.exact or request.background or self.memory.shape.cut_anywhere:
            return False
        return n < n_common < len(request.prompt)

    def interim_snapshots(
        self, request: CacheRequest, plan: CachePlan, seq: LiveSequence, clock: Callable[[], float]
    ) -> InterimSnapshots:
        """Return the interim snapshots of the prompt of ``request``, which ``seq`` holds as far as
        it was restored. A background request has none: no client waits for the tokens that a kill
        would lose. ``clock`` gives monotonic seconds.
        """
        return InterimSnapshots(
            self.cache,
            self.write_back,
            None if request.background else self.disk,
            plan,
            start=seq.n,
            clock=clock,
        )

    def persist(self, plan: CachePlan) -> None:
        """Write to disk the prefixes that the policy chose of the prompt, as far as RAM has
        snapshots of them, and supply rows to the writes that wait for some.
        """
        snapshots = (self.cache.get(plan.match.prefix(n)) for n in plan.persist if n)
        self.write_back.write([snapshot for snapshot in snapshots if snapshot is not None])

    def announce(self, lookup: CacheLookup) -> None:
        """Let evictions take into account when the client of an evaluated prompt needs it again.

        The announcement for the end of an earlier turn moves on to this one's, since it is there
        that the conversation resumes.
        """
        retention = lookup.request.retention
        if not lookup.facts.cached or not retention.is_announced:
            return
        policy = self.cache.policy
        deepest_first = self.cache.lookup(lookup.match, len(lookup.request.prompt))
        n_system = lookup.facts.n_system
        head = next((snapshot for snapshot in deepest_first if snapshot.n <= n_system), None)
        if retention.prompt_seconds and deepest_first:
            end, *earlier = deepest_first
            for snapshot in earlier:
                if snapshot is not head:
                    policy.withdraw(snapshot)
            policy.announce(end, retention.prompt_seconds)
        if retention.head_seconds and head is not None:
            policy.announce(head, retention.head_seconds)

    def park(self, seq: LiveSequence) -> None:
        """Empty ``seq`` after a snapshot of its end if that is worth it."""
        self._park(seq, 0, RequestStats(n_prompt=0), PARK_MIN)
        self.forget(seq)

    def forget(self, seq: LiveSequence) -> None:
        """Empty ``seq``."""
        self.memory.clear(seq.id)
        seq.reset(as_tokens([]))

    def close(self) -> bool:
        """Send the ends of conversations to disk, the last however short; return False if they are
        not there in time.
        """
        if self.disk is None:
            return True
        if self.disk.policy.kind != "off":
            self.write_back.write(self.cache.conversation_ends()[::-1], has_last=True)
        return self.disk.close(self.write_back.flush_copies)

    def _park(self, seq: LiveSequence, n_shared: int, stats: RequestStats, minimum: int) -> None:
        """Save the end of ``seq`` if the next prompt shares less than its own and ``minimum``
        tokens are unsaved.
        """
        if not seq.facts.cached or seq.in_image:
            return
        n_new = seq.n - seq.covered.alive().n
        if n_shared < seq.n_prompt and n_new >= minimum:
            self.saver.save(seq, CachePlan(PromptMatch(seq.tokens)), stats)

    def _facts(self, request: CacheRequest) -> PromptFacts:
        boundaries = request.prompt.boundaries
        return PromptFacts(
            turn=self.cache.turn,
            cached=request.may_save,
            for_disk=may_use_disk(request, self.disk),
            n_header=request.prompt.end,
            n_opening=request.prompt.opening,
            n_system=boundaries[0] if len(boundaries) > 1 else 0,
        )
