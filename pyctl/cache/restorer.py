"""Restores a live sequence to the deepest position of a prompt that is cached, in the quickest way.

Four steps: find the candidates, choose one (`Chooser`), load it, and publish the result.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from types import TracebackType
from typing import TypeAlias

from pyctl.cache.arriving import ArrivingCandidate
from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.cache_stats import CacheStats, RequestStats
from pyctl.cache.candidates import SAME_SECONDS, Candidate, ResumeCandidates
from pyctl.cache.device_tier import DeviceTier, MakeRoom
from pyctl.cache.lookup import CacheLookup
from pyctl.cache.ports import SequenceMemory, Store
from pyctl.cache.ram import RamCache
from pyctl.cache.reads import Reading
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import Prefix, Snapshot, State
from pyctl.errors import OutOfCellsError, StateError
from pyctl.prompt import as_tokens

__all__ = ["Chooser", "Restorer"]

log = logging.getLogger(__name__)

Restored: TypeAlias = tuple[Snapshot, ...]
"""The snapshot in RAM that a prompt was restored from, if any."""


class Restorer:
    """The restore of sequences of ``memory`` to prefixes of their prompts, from ``cache``, its
    ``device`` tier and ``disk``.

    A sequence always holds exactly the tokens that it records: an attempt that fails, or is closed
    while it waits, empties it. Failures are misses, never raised; bytes that do not fit the model
    are counted in ``totals``. With ``exact`` nothing is restored that a cold run would not have
    computed in the same batches. The engine's thread calls everything; waits for the disk are
    yielded.
    """

    def __init__(
        self,
        memory: SequenceMemory,
        cache: RamCache,
        device: DeviceTier,
        disk: Store | None,
        totals: CacheStats,
        *,
        exact: bool,
    ) -> None:
        self._memory = memory
        self._cache = cache
        self._device = device
        self._disk = disk
        self._totals = totals
        self._exact = exact

    def find(self, lookup: CacheLookup, seq: LiveSequence) -> CacheLookup:
        """Return ``lookup`` with the candidates in memory to resume in ``seq``."""
        request = lookup.request
        # A prompt that a client sends ahead is evaluated in the batches of a cold run; a next turn
        # that is prepared would not be.
        is_sent_ahead = request.background and request.after is None
        finder = ResumeCandidates(
            lookup.match,
            lookup.batch_ends,
            seq,
            self._memory.shape,
            exact=self._exact or is_sent_ahead,
            in_blocks=not request.may_read_prompts,
        )
        candidates = finder.find(self._cache, may_end=not request.background)
        return replace(lookup, candidates=candidates, finder=finder)

    def restore_prefix(
        self, lookup: CacheLookup, seq: LiveSequence, stats: RequestStats, make_room: MakeRoom
    ) -> Reading[Restored]:
        """Bring ``seq`` to the deepest position that can be restored, and return the snapshot that
        it came from, if any.

        If a candidate fails, the next is tried; if all fail, the sequence is empty. ``make_room``
        frees missing cells.
        """
        sizes = self._memory.shape.sizes
        with Chooser(lookup, sizes, self._cache, self._device, self._disk) as chooser:
            while (candidate := (yield from chooser.next_candidate(seq))) is not None:
                is_loaded = yield from self._load(candidate, lookup, seq, make_room)
                if is_loaded:
                    return (yield from self._publish(candidate, lookup, seq, stats))
        self._empty(seq)
        return ()

    def _load(
        self,
        candidate: Candidate,
        lookup: CacheLookup,
        seq: LiveSequence,
        make_room: MakeRoom,
    ) -> Reading[bool]:
        """Make ``seq`` hold the first ``candidate.n`` tokens of the prompt; return False if that
        fails, with ``seq`` empty.

        A snapshot that finds no cells stays, since it may be sound; one whose bytes do not fit the
        model is dropped.
        """
        try:
            n_ready = self._free_cells(candidate, lookup, seq, make_room)
        except (OutOfCellsError, StateError) as error:
            return self._give_up(candidate, seq, "no room to restore", error)
        seq.n_expected = candidate.n
        try:
            yield from candidate.load(seq, self._memory)
        except OutOfCellsError as error:
            return self._give_up(candidate, seq, "no room to restore", error)
        except StateError as error:
            self._totals.failed_restores += 1
            self._give_up(candidate, seq, "cannot restore", error)
            candidate.discard(self._cache)
            return False
        except GeneratorExit:  # cancelled while the disk was read
            self._empty(seq)
            raise
        finally:
            seq.n_expected = 0
        seq.resume(lookup.match.tokens[: candidate.n], lookup.batch_ends, candidate.snapshot)
        self._device.counts.returned += n_ready
        return True

    def _free_cells(
        self, candidate: Candidate, lookup: CacheLookup, seq: LiveSequence, make_room: MakeRoom
    ) -> int:
        """Free cells for the rows of a snapshot that ``seq`` lacks; return the result of
        `DeviceTier.n_ready` for them.

        Rows of ``seq`` that do not stay are cut first, so that their cells are free.
        """
        snapshot = candidate.snapshot
        if snapshot is None:
            return 0
        if candidate.n_kept < seq.n:
            self._memory.rewind(seq.id, candidate.n_kept)
            seq.truncate(candidate.n_kept)
        return self._device.make_cells(snapshot, seq.n, candidate.n, lookup.snapshots, make_room)

    def _give_up(
        self, candidate: Candidate, seq: LiveSequence, problem: str, error: Exception
    ) -> bool:
        """Log ``problem`` and empty ``seq``; return False."""
        log.warning(
            "%s the snapshot at %d tokens, evaluating instead: %s", problem, candidate.n, error
        )
        self._empty(seq)
        return False

    def _empty(self, seq: LiveSequence) -> None:
        self._memory.clear(seq.id)
        seq.reset(as_tokens([]))

    def _publish(
        self, candidate: Candidate, lookup: CacheLookup, seq: LiveSequence, stats: RequestStats
    ) -> Reading[Restored]:
        """Count the restore, have the snapshot in RAM, and let the device hold the rows that
        ``seq`` has now. Return the snapshot if it is in RAM.
        """
        snapshot = candidate.snapshot
        stats.source = candidate.source
        stats.n_cached = candidate.n
        if snapshot is None:
            return ()
        stats.restored = snapshot.prefix.name
        is_in_ram = yield from candidate.enter(seq)
        if not is_in_ram:
            return ()
        self._device.hold_rows(snapshot, seq)
        self._cache.prompt_ends.touch(snapshot)
        self._count_use(snapshot, lookup)
        return (snapshot,)

    def _count_use(self, snapshot: Snapshot, lookup: CacheLookup) -> None:
        """Record the use of ``snapshot``, or of the deepest candidate before it if it is the end
        of a prompt: the end itself is never written.
        """
        for used in (snapshot, *lookup.snapshots):
            if not used.is_prompt_end:
                for_disk = used.facts.for_disk or lookup.facts.for_disk
                used.facts = replace(used.facts, for_disk=for_disk)
                self._cache.touch(used)
                return


class Chooser:
    """The choice of a candidate for ``lookup``.

    Of all ways that have the prompt evaluated within SAME_SECONDS of the quickest one, the deepest
    is taken, as long as that is a snapshot on ``disk``. Then the candidates in memory follow, in
    their order.

    A context manager: each candidate is closed before the next one, and on exit. Rows of the prompt
    that RAM has, the base, are not read from disk; they stay in RAM until it is the turn of memory.
    Rows beyond the base that an earlier read brought to RAM are not read again either; they stay
    until their candidate is closed.
    """

    def __init__(
        self,
        lookup: CacheLookup,
        sizes: BlockSizes,
        cache: RamCache,
        device: DeviceTier,
        disk: Store | None,
    ) -> None:
        """Choose for ``lookup`` among its candidates in ``cache`` and, if the prompt may be on
        disk, the snapshots on ``disk``.
        """
        self._lookup = lookup
        self._sizes = sizes
        self._cache = cache
        self._device = device
        self._disk = disk if lookup.facts.for_disk else None
        self._in_memory = iter(lookup.candidates)
        self._stored: list[Prefix] = []  # the deepest first
        self._base: Snapshot | None = None
        self._shared: Snapshot | None = None
        self._current: Candidate | None = None

    def __enter__(self) -> Chooser:
        if self._disk is not None:
            match = self._lookup.match
            self._stored = self._disk.find(match, int(match.tokens.size) - 1)
            if self._stored:
                self._protect_base()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_current()
        self._release_base()

    def next_candidate(self, seq: LiveSequence) -> Reading[Candidate | None]:
        """Return the candidate to load into ``seq`` next; None if there is none left."""
        self._close_current()
        while (prefix := self._next_stored()) is not None:
            self._stored.remove(prefix)
            self._current = yield from self._open(prefix, seq)
            if self._current is not None:
                return self._current
        self._stored.clear()
        self._release_base()
        for candidate in self._in_memory:
            self._current = candidate.recheck(seq)
            if self._current is not None:
                return self._current
        return None

    def _next_stored(self) -> Prefix | None:
        """Return the stored prefix to read next; None if memory is as quick.

        Of all that are about as quick as the quickest it is the deepest, but none that memory has
        as quickly.
        """
        if self._disk is None or not self._stored:
            return None
        costs = self._disk.costs
        sizes = self._sizes
        n_prompt = int(self._lookup.match.tokens.size)
        n_base = self._base.n if self._base is not None else 0

        def from_ram(n: int, n_kept: int) -> float:
            return costs.load(sizes.n_bytes(n, n_kept)) + costs.evaluate(n, n_prompt)

        def from_disk(n: int) -> float:
            return costs.read(sizes.n_bytes(n, n_base)) + from_ram(n, 0)

        seconds_in_memory = {
            candidate.n: from_ram(candidate.n, candidate.n_kept)
            for candidate in self._lookup.candidates
        }
        seconds_on_disk = {prefix: from_disk(prefix.n) for prefix in self._stored}
        cold = costs.evaluate(0, n_prompt)
        quickest = min([*seconds_in_memory.values(), *seconds_on_disk.values(), cold])
        limit = quickest + SAME_SECONDS
        quick = [n for n, seconds in seconds_in_memory.items() if seconds <= limit]
        n_quick_in_memory = max(quick, default=0)
        for prefix in self._stored:
            if prefix.n > n_quick_in_memory and seconds_on_disk[prefix] <= limit:
                return prefix
        return None

    def _open(self, prefix: Prefix, seq: LiveSequence) -> Reading[Candidate | None]:
        """Start to read ``prefix``; return None if it is gone or of no use to this prompt."""
        assert self._disk is not None
        assert self._lookup.finder is not None
        arrival = yield from self._disk.open(
            prefix, self._lookup.match, self._base, self._device.copies.max_read
        )
        if arrival is None:
            return None
        candidate = self._lookup.finder.from_snapshot("disk", arrival.snapshot)
        usable = candidate.recheck(seq) if candidate is not None else None
        if usable is None:
            arrival.cancel()
            self._device.release_rejected(arrival.snapshot)
            return None
        self._protect_shared(arrival.snapshot)
        return ArrivingCandidate(
            usable.origin,
            usable.n,
            usable.n_kept,
            usable.snapshot,
            arrival=arrival,
            disk=self._disk,
            cache=self._cache,
            device=self._device,
        )

    def _close_current(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None
        if self._shared is not None:
            self._cache.release(self._shared)
            self._shared = None

    def _protect_shared(self, arriving: Snapshot) -> None:
        """Retain the rows of ``arriving`` that RAM has already: another request could evict them
        while the rest is read.
        """
        for segment, last in arriving.chain.items():
            if segment.alive:  # and so are its ancestors
                self._shared = Snapshot(self._lookup.match.prefix(last), segment, State())
                self._cache.protect(self._shared)
                return

    def _protect_base(self) -> None:
        """Retain the rows that RAM has of the prompt, as far as they came from its batches, as a
        snapshot without a state.
        """
        match = self._lookup.match
        nearest, n_shared = self._cache.overlap(match)
        if nearest is None:
            return
        n = nearest.n_same_batches(self._lookup.batch_ends, n_shared)
        if n:
            self._base = Snapshot(match.prefix(n), nearest.segment_at(n), State())
            self._cache.protect(self._base)

    def _release_base(self) -> None:
        if self._base is not None:
            self._cache.release(self._base)
            self._base = None
