"""Restores a live sequence to the deepest position of a prompt that is cached, in the quickest way.

Four steps: find the candidates (`candidates`), choose among them (`chooser`), load one, publish it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TypeAlias

from pyctl.cache.cache_stats import CacheStats, RequestStats
from pyctl.cache.candidates import Candidate, ResumeCandidates
from pyctl.cache.chooser import Chooser
from pyctl.cache.device_tier import DeviceTier, MakeRoom
from pyctl.cache.disk.readers import Reading
from pyctl.cache.lookup import CacheLookup
from pyctl.cache.ports import SequenceMemory, Store
from pyctl.cache.ram import RamCache
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import Snapshot
from pyctl.errors import OutOfCellsError, StateError
from pyctl.prompt import as_tokens

__all__ = ["Restorer"]

log = logging.getLogger(__name__)

Restored: TypeAlias = tuple[Snapshot, ...]
"""The snapshot in RAM that a prompt was restored from, if any."""


class Restorer:
    """Brings sequences of ``memory`` to prefixes of their prompts, from ``cache``, its ``device``
    tier and ``disk``.

    A sequence always holds exactly the tokens that it records: an attempt that fails, or is closed
    while it waits, leaves it empty. Failures are misses: logged and counted in ``totals``, never
    raised. With ``exact`` nothing is restored that a cold run would not have computed in the same
    batches. The engine's thread calls everything; waits for the disk are yielded.
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
            lookup.ends,
            seq,
            self._memory.shape,
            exact=self._exact or is_sent_ahead,
            in_blocks=not request.sees_texts,
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
        """Make ``seq`` hold the first ``candidate.n`` tokens of the prompt; False leaves it empty.

        A snapshot that finds no cells stays, since it may be sound; one whose bytes do not fit the
        model is dropped.
        """
        try:
            n_ready = self._free_cells(candidate, lookup, seq, make_room)
        except (OutOfCellsError, StateError) as error:
            return self._give_up(candidate, seq, "no room to restore", error)
        seq.n_expected = candidate.n
        try:
            self._cut(seq, candidate.keep)
            yield from candidate.load(seq, self._memory)
        except OutOfCellsError as error:
            return self._give_up(candidate, seq, "no room to restore", error)
        except StateError as error:
            self._totals.failed_restores += 1
            candidate.discard(self._cache)
            return self._give_up(candidate, seq, "cannot restore", error)
        except GeneratorExit:  # cancelled while the disk was read
            self._empty(seq)
            raise
        finally:
            seq.n_expected = 0
        seq.resume(lookup.match.tokens[: candidate.n], lookup.ends, candidate.snapshot)
        self._device.counts.returned += n_ready
        return True

    def _free_cells(
        self, candidate: Candidate, lookup: CacheLookup, seq: LiveSequence, make_room: MakeRoom
    ) -> int:
        """Have cells for the rows that ``seq`` lacks; return how many lie in their own already."""
        if candidate.snapshot is None:
            return 0
        self._cut(seq, candidate.keep)
        return self._device.make_cells(
            candidate.snapshot, seq.n, candidate.n, lookup.snapshots, make_room
        )

    def _give_up(
        self, candidate: Candidate, seq: LiveSequence, problem: str, error: Exception
    ) -> bool:
        log.warning(
            "%s the snapshot at %d tokens, evaluating instead: %s", problem, candidate.n, error
        )
        self._empty(seq)
        return False

    def _cut(self, seq: LiveSequence, n: int) -> None:
        """Leave ``seq`` the rows before ``n``, so that the cells of the others are free; it needs
        the state at ``n`` next.
        """
        if n < seq.n:
            self._memory.rewind(seq.id, n)
            seq.truncate(n)

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
        is_in_ram = yield from candidate.enter(seq, self._cache, self._device)
        if not is_in_ram:
            return ()
        self._device.hold(snapshot, seq)
        self._cache.ends.touch(snapshot)
        # With the end of a prompt the snapshot before it was of use; the end itself is never
        # written.
        for used in (snapshot, *lookup.snapshots):
            if not used.state.output.size:
                for_disk = used.facts.for_disk or lookup.facts.for_disk
                used.facts = replace(used.facts, for_disk=for_disk)
                self._cache.touch(used)
                break
        return (snapshot,)
