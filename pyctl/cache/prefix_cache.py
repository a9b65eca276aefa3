"""Snapshots of live sequences: restores a sequence to the start of evaluation, and saves snapshots
of worth.

It decides nothing about eviction or files (cache does) and evaluates nothing (engine does).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import TypeAlias

from pyctl.cache.cache_stats import CacheStats, Divergence, RequestStats
from pyctl.cache.check import faults
from pyctl.cache.device_tier import DeviceTier
from pyctl.cache.disk.readers import Reading, Reads
from pyctl.cache.plan import choose_cuts, inner_ends, last_end, next_turn
from pyctl.cache.ports import CacheOptions, CacheRequest, SequenceMemory, Store
from pyctl.cache.ram import RamCache
from pyctl.cache.recent import RecentPrompts
from pyctl.cache.restore import (
    SAME_SECONDS,
    CacheLookup,
    CachePlan,
    Candidate,
    MakeRoom,
    Ways,
    coverage,
    cut,
    make_room_for,
    publish,
    quickest,
    restore,
    rows_in_memory,
)
from pyctl.cache.saved_time import SavedTime
from pyctl.cache.sequence import Coverage, LiveSequence
from pyctl.cache.snapshot import Block, Prefix, PromptFacts, PromptMatch, Snapshot
from pyctl.errors import OutOfCellsError, StateError
from pyctl.prompt import Prompt, as_tokens

__all__ = ["PrefixCache"]

log = logging.getLogger(__name__)

EndsOf: TypeAlias = Callable[[Prompt], Sequence[int]]

END_MIN = 64
"""Tokens after the last batch end that are worth a snapshot of a prompt's end, though it may never
recur.
"""

PARK_MIN = 64
"""Fewer new tokens than this are not worth a snapshot when a live sequence is given away."""


class PrefixCache:
    """Restores from and saves to ``cache`` and ``disk`` for all sequences of ``memory``.

    A request passes `lookup`, `park_previous`, `restore`, `plan`, then `save` at each cut, and
    `persist`. A failure of the cache is a miss or a missing snapshot, never an error of the
    request. A request that has to give its cells to others passes `suspend` and `resume` in
    between.
    """

    def __init__(
        self, memory: SequenceMemory, cache: RamCache, settings: CacheOptions, disk: Store | None
    ) -> None:
        self.memory = memory
        self.cache = cache
        self.device = DeviceTier(memory, cache)
        self.disk = disk
        self.settings = settings
        self.recent = disk.recent if disk is not None else RecentPrompts()
        self.totals = CacheStats()
        self.saved_time = SavedTime()
        if disk is not None:
            disk.costs = cache.costs
            cache.on_evict = partial(disk.evict, rows_of=self.device.rows_of)

    def lookup(
        self, request: CacheRequest, ends: Sequence[int], seq: LiveSequence, stats: RequestStats
    ) -> CacheLookup:
        """Look up the ways to restore a prompt with these batch ends into ``seq``; note a client's
        prompt as recent.
        """
        began = time.perf_counter()
        match = PromptMatch(request.prompt.tokens, is_raw=request.prompt.is_raw)
        if request.cache_prompt and request.after is None:
            self.cache.next_turn()
        facts = self._facts(request)
        if not facts.cached:
            return CacheLookup(request, match, ends, facts)
        ways = self._ways(request, match, ends, seq).find(
            self.cache, may_end=not request.background
        )
        if request.after is not None:
            return CacheLookup(request, match, ends, facts, ways)
        recent = self.recent.compare(request.prompt)
        # Drafts from a planted text would show in the pace of replies to others whether it holds a
        # piece of theirs.
        self.recent.add(
            request.prompt, recent, for_disk=facts.for_disk, is_heard=request.sees_texts
        )
        stats.lookup_ms = (time.perf_counter() - began) * 1e3
        return CacheLookup(request, match, ends, facts, ways, recent)

    def park_previous(self, seq: LiveSequence, lookup: CacheLookup, stats: RequestStats) -> None:
        """Park the conversation of ``seq`` unless the new prompt continues it; for a background
        request, whatever would be lost of it.
        """
        began = time.perf_counter()
        ways = lookup.ways
        shared = seq.shared(lookup.match.tokens) if lookup.facts.cached else 0
        minimum = PARK_MIN
        is_kept = bool(ways) and ways[0].keep >= seq.n and self.memory.shape.cut_anywhere
        if lookup.request.background and not is_kept:
            shared = 0
            minimum = 1
        with self.cache.locked(*lookup.snapshots):
            self._park(seq, shared, stats, minimum)
        seq.facts = lookup.facts
        stats.restore_ms += (time.perf_counter() - began) * 1e3

    def restore(
        self,
        lookup: CacheLookup,
        seq: LiveSequence,
        stats: RequestStats,
        make_room: MakeRoom = lambda n, n_ready: True,
    ) -> Reading[tuple[Snapshot, ...]]:
        """Bring ``seq`` to the deepest restorable position of the prompt; the snapshot that it came
        from, if any.

        If a way fails, the next one is tried; if all fail, the sequence is empty. ``make_room``
        frees missing cells.
        """
        began = time.perf_counter()
        used = (
            (yield from self._from_disk(lookup, seq, stats, make_room))
            if lookup.facts.for_disk
            else None
        )
        used = (
            (yield from self._from_memory(lookup, seq, stats, make_room)) if used is None else used
        )
        stats.restore_ms += (time.perf_counter() - began) * 1e3
        return used

    def n_ready(self, prompt: Prompt, ends: Sequence[int], seq: LiveSequence) -> int:
        """How many tokens of ``prompt`` could be restored into ``seq``, without a fetch. Changes
        nothing.
        """
        return max(
            self._near(PromptMatch(prompt.tokens, is_raw=prompt.is_raw), ends, [seq]), default=0
        )

    def fetch(
        self, request: CacheRequest, ends_of: EndsOf, sequences: Sequence[LiveSequence]
    ) -> Reads | None:
        """Start to fetch the best prefix that only an object store has, if that is quicker than the
        ways here; else None. ``ends_of`` gives the batch ends of the prompt.
        """
        if self.disk is None or request.background or not self._facts(request).for_disk:
            return None
        match = PromptMatch(request.prompt.tokens, is_raw=request.prompt.is_raw)
        if not (far := self._far(match)):
            return None
        near = self._near(match, ends_of(request.prompt), sequences).values()
        prefix, seconds = min(far, key=itemgetter(1))
        evaluated = self.cache.costs.evaluate(0, int(match.tokens.size))
        return self.disk.fetch(prefix) if seconds + SAME_SECONDS < min([evaluated, *near]) else None

    def _near(
        self, match: PromptMatch, ends: Sequence[int], sequences: Sequence[LiveSequence]
    ) -> dict[int, float]:
        """The ways to resume without a fetch: tokens, and seconds until the prompt would be
        evaluated.
        """
        n_prompt = int(match.tokens.size)
        costs = self.cache.costs
        stored = self.disk.find(match, n_prompt - 1) if self.disk is not None else ()
        found = {
            each.n: self._read_seconds(each) + costs.evaluate(each.n, n_prompt) for each in stored
        }
        for seq in sequences:
            for way in Ways(match, ends, seq, self.memory.shape, exact=self.settings.exact).find(
                self.cache
            ):
                found[way.n] = costs.evaluate(way.n, n_prompt)
        return found

    def _far(self, match: PromptMatch) -> list[tuple[Prefix, float]]:
        """The prefixes that only an object store has, with the same seconds."""
        n_prompt = int(match.tokens.size)
        costs = self.cache.costs
        far = self.disk.far(match, n_prompt - 1) if self.disk is not None else []
        return [
            (each, s + self._read_seconds(each) + costs.evaluate(each.n, n_prompt))
            for each, s in far
        ]

    def _read_seconds(self, prefix: Prefix) -> float:
        return self.cache.costs.read(self.memory.shape.sizes.n_bytes(prefix.n, 0))

    def _facts(self, request: CacheRequest) -> PromptFacts:
        prompt = request.prompt
        is_cached = request.cache_prompt
        for_disk = (
            self.disk is not None
            and is_cached
            and (request.disk_policy or self.disk.policy).kind != "off"
        )
        return PromptFacts(self.cache.turn, is_cached, for_disk, prompt.end, prompt.opening)

    def plan(
        self,
        lookup: CacheLookup,
        restored: tuple[Snapshot, ...],
        seq: LiveSequence,
        stats: RequestStats,
        *,
        may_branch: bool = False,
    ) -> CachePlan:
        """Where to take snapshots of the rest to evaluate, and which prefixes belong on disk.

        With ``may_branch`` also where raw text leaves another prompt, since it was edited or its
        last token has grown, if that takes a state.
        """
        recent = lookup.recent
        ends = lookup.ends
        prompt = lookup.request.prompt
        if recent is None:
            return CachePlan(lookup.match, restored=restored)
        common = nearest.common if (nearest := recent.nearest()) is not None else 0
        branch = last_end(ends, common)
        # Between here and the branch point the rows may be in the cache, only without a state to
        # resume from.
        seq.n_overlap = common if branch > seq.n else 0
        if nearest is not None and not nearest.is_continued and branch > stats.n_cached:
            stats.miss = Divergence.at(
                common, stats.n_cached, nearest.recent.prompt.tokens, prompt.tokens
            )
        wanted = (
            self.disk.select(recent, seq.n, lookup.request.disk_policy)
            if self.disk is not None
            else ()
        )
        places = self.places(prompt, ends)
        cuts = choose_cuts(prompt, places, seq.n, self.settings.min_step, (common, *wanted))
        shape = self.memory.shape
        is_exact = self.settings.exact or lookup.request.background
        may_branch = may_branch and prompt.is_raw and lookup.request.sees_texts
        if may_branch and not (is_exact or shape.cut_anywhere) and seq.n < common < len(prompt):
            cuts = sorted({*cuts, *shape.resume_points.among([common])})
        # What goes to disk has to be among the counts at which snapshots are taken.
        *persist, turn = (last_end(places, n) for n in (*wanted, next_turn(prompt, common)))
        return CachePlan(lookup.match, tuple(cuts), tuple(persist), restored, turn)

    def places(self, prompt: Prompt, ends: Sequence[int]) -> list[int]:
        """The batch ends of ``prompt`` at which a snapshot is of use and comes back to the same
        bits.
        """
        return self.memory.shape.resume_points.among(inner_ends(prompt, ends))

    def save(self, seq: LiveSequence, plan: CachePlan, stats: RequestStats) -> None:
        """Take a snapshot at the end of ``seq``, a prefix of ``plan.match``: new rows and the
        state.
        """
        if self.memory.shape.resume_points.allow(seq.n) and (
            seq.n_exact == seq.n or not self.settings.exact
        ):
            with self.cache.locked(*plan.restored):
                self._save(seq, plan, stats)

    def _save(self, seq: LiveSequence, plan: CachePlan, stats: RequestStats) -> None:
        began = time.perf_counter()
        memory = self.memory
        covered = coverage(seq, plan.match, self.cache)
        prefix = plan.match.prefix(seq.n)
        n_bytes = self.device.rows_size(covered.n, seq.n) + seq.tokens[covered.n :].nbytes
        n_bytes += memory.state_size(seq.id, (seq.n,))
        if not self.cache.may_add(prefix, n_bytes, covered.segment):
            return
        try:
            snapshot = self._take(seq, prefix, covered)
            snapshot.is_turn = snapshot.n == plan.turn
            if self.cache.add(snapshot):
                seq.covered = Coverage(snapshot.segment, seq.n)
                stats.count_saved(prefix.name)
                if memory.shape.is_pool or (self.disk is not None and seq.facts.for_disk):
                    # Beside the next batch, not all of it at the end, or when the next prompt goes
                    # there.
                    self.device.copy_spare(
                        *(each for each in snapshot.chain if each.start >= covered.n)
                    )
            self.device.give_back(snapshot)
        except (StateError, MemoryError) as error:
            log.warning("cannot save a snapshot at %d tokens: %s", seq.n, error)
        self._hold_less()
        stats.save_ms += (time.perf_counter() - began) * 1e3

    def save_end(
        self,
        seq: LiveSequence,
        lookup: CacheLookup,
        stats: RequestStats,
        output: Callable[[], Block],
        n_alike: int = 0,
    ) -> None:
        """Keep the end of a prompt that ``seq`` has just reached, with the ``output`` there: see
        `PromptEnds`.

        It is worth room that others have if the same was asked before, ``n_alike`` others wait with
        it, or much of it lies after the last batch end; else it takes spare bytes only.
        """
        began = time.perf_counter()
        recent = lookup.recent
        n = seq.n
        before = lookup.ends[-2] if len(lookup.ends) > 1 else 0
        exact = seq.n_exact in (before, n) and not seq.shares
        if (
            recent is None
            or not stats.n_evaluated
            or not self.cache.enabled
            or (self.settings.exact and not exact)
        ):
            return
        if not self.memory.shape.resume_points.allow(n):
            return
        is_wanted = n_alike > 0 or n - before >= END_MIN or recent.has_whole
        n_bytes = self.memory.state_size(seq.id, (n,))
        if not self.cache.ends.may_add(n_bytes, is_wanted=is_wanted):
            return
        try:
            logits = output()
            end = self._take(seq, lookup.match.prefix(n), coverage(seq, lookup.match, self.cache))
            end.state = end.state.with_output(logits)
            end.exact = exact
            with self.cache.locked(end, *lookup.snapshots):
                if self.cache.ends.add(end, is_wanted=is_wanted):
                    seq.covered = Coverage(end.segment, n)
            self.device.give_back(end)
        except (StateError, MemoryError) as error:
            log.warning("cannot save the end of a prompt: %s", error)
        stats.save_ms += (time.perf_counter() - began) * 1e3

    def persist(self, plan: CachePlan) -> None:
        """Send to disk what the policy chose of the prompt, as far as there are snapshots of it,
        and what left RAM.
        """
        found = (self.cache.get(plan.match.prefix(n)) for n in plan.persist if n)
        self._write([each for each in found if each is not None])

    def hand_over(self) -> None:
        """Have all bytes there that wait for the disk, and copy the segment that its thread needs:
        a few milliseconds, between two steps.
        """
        if self.disk is not None and self.disk.queue.waits:
            self.memory.synchronize()
            self.disk.queue.serve(self.device.rows_now)
            self._hold_less()

    def copy_next(self) -> bool:
        """In an idle moment: copy some of what only the device has to RAM, or else write what the
        disk would need in the end, when there would be no time for so much. False if there is
        nothing left to copy.
        """
        if self.device.copy_one():
            return True
        if self.disk is not None and self.disk.policy.kind != "off":
            self._write(
                [end for end in self.cache.conversation_ends()[::-1] if self.device.is_large(end)]
            )
        return False

    def _write(self, snapshots: Sequence[Snapshot], *, has_last: bool = False) -> None:
        """Give ``snapshots`` to the disk; `hand_over` copies what only the device has."""
        if (disk := self.disk) is not None and snapshots:
            self.memory.synchronize()
            for each in snapshots:
                disk.write(each, is_last=has_last and each is snapshots[-1])
        self.hand_over()

    def park(self, seq: LiveSequence) -> None:
        """Empty ``seq`` after a snapshot of its end if that is worth it."""
        self._park(seq, 0, RequestStats(n_prompt=0))
        self.forget(seq)

    def suspend(self, seq: LiveSequence, *, frees_cells: bool = True) -> Snapshot:
        """Take everything that ``seq`` holds out of it, for `resume`; StateError or MemoryError
        leave it as it is.

        The snapshot is no entry of the cache, which only counts its bytes until `RamCache.release`,
        and shares rows with it. Rows that the device can hold stay there unless ``frees_cells``.
        """
        kept = self._take(seq, PromptMatch(seq.tokens).prefix(seq.n), seq.covered.alive())
        self.cache.retain(kept)
        try:
            if frees_cells:
                self.device.to_ram(kept)
        except (StateError, MemoryError):
            self.cache.release(kept)
            raise
        self.memory.clear(seq.id)
        return kept

    def resume(self, seq: LiveSequence, kept: Snapshot) -> None:
        """Give back what ``seq`` held; it may have another id. Raises StateError or
        OutOfCellsError, and keeps it.
        """
        self.memory.restore(seq.id, 0, kept.spans(0, kept.n), kept.state)
        seq.covered = Coverage(kept.segment, kept.n)
        self.cache.release(kept)

    def evict_bytes(self, n_bytes: int, worth: float) -> bool:
        """Evict for another model's cache, as `RamCache.evict_bytes` does; what belongs on disk is
        written.
        """
        gave = self.cache.evict_bytes(n_bytes, worth)
        if gave:
            self.hand_over()
        return gave

    def forget(self, seq: LiveSequence) -> None:
        """Empty ``seq``."""
        self.memory.clear(seq.id)
        seq.reset(as_tokens([]))

    def check(self) -> list[str]:
        """The contradictions of the cache in RAM, as `faults` lists them."""
        return faults(self.cache)

    def close(self) -> bool:
        """Send the ends of conversations to disk, the last however short; False if they are not
        there in time.
        """
        if self.disk is None:
            return True
        if self.disk.policy.kind != "off":
            self._write(self.cache.conversation_ends()[::-1], has_last=True)
        return self.disk.close(self.hand_over)

    def give_back(self) -> None:
        """Give back all RAM, also of pinned snapshots, and its share of a budget; nothing may be
        used after.
        """
        self.cache.pinned.clear()
        self.cache.clear()
        self.cache.shared.remove(self.cache)

    # -- restoring
    # ----------------------------------------------------------------------------------

    def _from_disk(
        self,
        lookup: CacheLookup,
        seq: LiveSequence,
        stats: RequestStats,
        make_room: MakeRoom,
    ) -> Reading[tuple[Snapshot, ...] | None]:
        """Restore from disk if that is quicker than memory, again after each failure; None if
        nothing is of use.
        """
        assert self.disk is not None
        match = lookup.match
        found = self.disk.find(match, int(match.tokens.size) - 1)
        base = rows_in_memory(match, lookup.ends, self.cache) if found else None
        if base is not None:
            self.cache.retain(base)
        try:
            sizes = self.memory.shape.sizes
            while (
                prefix := quickest(found, lookup.ways, match, base, self.disk, sizes)
            ) is not None:
                found.remove(prefix)
                arrival = yield from self.disk.open(prefix, match, base, self.device.max_read)
                if arrival is None:
                    continue
                try:
                    ways = self._ways(lookup.request, match, lookup.ends, seq)
                    candidate = ways.at("disk", arrival.snapshot, arrival)
                    used = (
                        (yield from self._try(candidate, lookup, seq, stats, make_room))
                        if candidate
                        else None
                    )
                    if used is not None:
                        return used
                finally:
                    arrival.cancel()
                    self.device.give_back(arrival.snapshot)
        finally:
            if base is not None:
                self.cache.release(base)
        return None

    def _from_memory(
        self, lookup: CacheLookup, seq: LiveSequence, stats: RequestStats, make_room: MakeRoom
    ) -> Reading[tuple[Snapshot, ...]]:
        for candidate in lookup.ways:
            snapshot = candidate.snapshot
            if snapshot is not None and snapshot.segment.dropped:
                continue  # by an attempt before this one, or while the disk was read
            if (
                candidate.keep > seq.n
            ):  # an attempt before this one failed and left the sequence empty
                if snapshot is None:
                    continue
                candidate = replace(candidate, source="ram", keep=0)
            used = yield from self._try(candidate, lookup, seq, stats, make_room)
            if used is not None:
                return used
        self.forget(seq)
        return ()

    def _try(
        self,
        candidate: Candidate,
        lookup: CacheLookup,
        seq: LiveSequence,
        stats: RequestStats,
        make_room: MakeRoom,
    ) -> Reading[tuple[Snapshot, ...] | None]:
        """Restore by one way: the snapshot that is in RAM now, if any; None if it failed."""
        snapshot = candidate.snapshot
        arrival = candidate.arrival
        n_ready = 0
        try:
            if snapshot is not None:
                cut(seq, candidate.keep, self.memory)
                n_ready = make_room_for(candidate, snapshot, seq, lookup, self.device, make_room)
            seq.n_expected = candidate.n
            restored = yield from restore(
                candidate, lookup.match.tokens, lookup.ends, seq, self.memory
            )
        except (OutOfCellsError, StateError) as error:  # the snapshot may be sound
            log.warning(
                "no room to restore the snapshot at %d tokens, evaluating instead: %s",
                candidate.n,
                error,
            )
            self.forget(seq)
            return None
        finally:
            seq.n_expected = 0
        if not restored:
            self.totals.failed_restores += 1
            if snapshot is None:
                return None
            if arrival is None:
                self.cache.drop(snapshot)
            elif (
                self.disk is not None
                and not arrival.is_lost
                and not any(each.dropped for each in snapshot.chain)
            ):
                self.disk.refuse(snapshot)
            return None
        stats.source = candidate.source
        stats.n_cached = candidate.n
        stats.restored = snapshot.prefix.name if snapshot else ""
        if snapshot is None:
            return ()
        if (
            arrival is not None
            and self.disk is not None
            and not (yield from publish(arrival, seq, self.cache, self.device, self.disk))
        ):
            return ()
        self.device.counts.returned += n_ready
        self.device.hold(snapshot, seq)
        # With the end of a prompt the snapshot before it was of use; the end itself is never
        # written.
        self.cache.ends.touch(snapshot)
        for used in [each for each in (snapshot, *lookup.snapshots) if not each.state.output.size][
            :1
        ]:
            used.facts = replace(used.facts, for_disk=used.facts.for_disk or lookup.facts.for_disk)
            self.cache.touch(used)
        return (snapshot,)

    def _ways(
        self, request: CacheRequest, match: PromptMatch, ends: Sequence[int], seq: LiveSequence
    ) -> Ways:
        # What a client sends ahead is evaluated in the batches of a cold run; a next turn would not
        # be.
        exact = self.settings.exact or (request.background and request.after is None)
        return Ways(
            match, ends, seq, self.memory.shape, exact=exact, in_blocks=not request.sees_texts
        )

    # -- saving
    # ----------------------------------------------------------------------------------

    def _hold_less(self) -> None:
        """Drop the oldest evicted snapshots if a slow disk leaves too many unwritten."""
        while (
            self.disk is not None and self.device.is_behind() and self.disk.queue.drop_least_worth()
        ):
            continue

    def _park(
        self, seq: LiveSequence, shared: int, stats: RequestStats, minimum: int = PARK_MIN
    ) -> None:
        """Save the end of ``seq`` if the next prompt shares less than its own and ``minimum``
        tokens are unsaved.
        """
        n_new = seq.n - seq.covered.alive().n
        if seq.facts.cached and not seq.in_image and shared < seq.n_prompt and n_new >= minimum:
            self.save(seq, CachePlan(PromptMatch(seq.tokens)), stats)

    def _take(self, seq: LiveSequence, prefix: Prefix, covered: Coverage) -> Snapshot:
        """A snapshot of all that ``seq`` holds: the rows after those ``covered``, and the state."""
        state = self.memory.save_state(seq.id, seq.n)
        exact = seq.n_exact == seq.n
        segment = covered.segment
        if segment is None or covered.n < seq.n:
            segment = self.device.segment(seq, covered)
        return Snapshot(prefix, segment, state, exact, facts=seq.facts)
