"""Takes snapshots of live sequences: the rows that no snapshot has yet, and the state."""

from __future__ import annotations

import logging
from collections.abc import Callable

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.device_tier import DeviceTier
from pyctl.cache.lookup import CacheLookup, CachePlan
from pyctl.cache.ports import SequenceMemory
from pyctl.cache.ram import RamCache
from pyctl.cache.sequence import Coverage, LiveSequence
from pyctl.cache.snapshot import Block, Prefix, PromptMatch, Snapshot
from pyctl.cache.write_back import WriteBack
from pyctl.errors import StateError

__all__ = ["Saver"]

log = logging.getLogger(__name__)

MIN_END_TOKENS = 64
"""Tokens after the last batch end that are worth a snapshot of a prompt's end, though it may never
recur.
"""


class Saver:
    """The saving of sequences of ``memory`` to ``cache``; evicted snapshots go to ``write_back``.

    Saved rows never change, so a sequence saves only the rows after its `Coverage`. With ``exact``
    only rows of a cold run's batches are saved. A failure costs a snapshot: it is logged, and
    raised only by `suspend` and `resume`. The engine's thread calls everything.
    """

    def __init__(
        self,
        memory: SequenceMemory,
        cache: RamCache,
        device: DeviceTier,
        write_back: WriteBack,
        *,
        exact: bool,
    ) -> None:
        self._memory = memory
        self._cache = cache
        self._device = device
        self._write_back = write_back
        self._exact = exact

    def save(self, seq: LiveSequence, plan: CachePlan, stats: RequestStats) -> None:
        """Save a snapshot at the end of ``seq``, a prefix of ``plan.match``."""
        with stats.timed("save_ms"):
            if not self._memory.shape.resume_points.contains(seq.n):
                return  # a restore would give other bits
            if self._exact and seq.n_exact != seq.n:
                return  # a cold run would have evaluated other batches
            with self._cache.locked(*plan.restored):
                self._save(seq, plan, stats)

    def _save(self, seq: LiveSequence, plan: CachePlan, stats: RequestStats) -> None:
        """Take a snapshot of ``seq``, and add it to the cache if there is room.

        `RamCache.may_add` comes first, with the bytes that the snapshot would add: a refused
        snapshot then costs no copy. `RamCache.add` may still refuse it, since other models share
        the budget; then `DeviceTier.release_rejected` releases the cells that were held for it.
        Evicted snapshots may wait for the disk by now, so the backlog is trimmed last.
        """
        covered = self._coverage(seq, plan.match)
        prefix = plan.match.prefix(seq.n)
        new_bytes = self._device.rows_size(covered.n, seq.n) + seq.tokens[covered.n :].nbytes
        new_bytes += self._memory.state_size(seq.id, (seq.n,))
        if not self._cache.may_add(prefix, new_bytes, covered.segment):
            return
        try:
            snapshot = self._take(seq, prefix, covered)
            snapshot.is_turn = snapshot.n == plan.turn
            if self._cache.add(snapshot):
                seq.covered = Coverage(snapshot.segment, seq.n)
                stats.count_saved(prefix.name, prefix.n)
                self._copy_early(snapshot, covered.n)
            self._device.release_rejected(snapshot)
        except (StateError, MemoryError) as error:
            log.warning("cannot save a snapshot at %d tokens: %s", seq.n, error)
        self._write_back.trim_backlog()

    def save_end(
        self,
        seq: LiveSequence,
        lookup: CacheLookup,
        stats: RequestStats,
        output: Callable[[], Block],
        n_alike: int = 0,
        *,
        is_expected: bool = False,
    ) -> None:
        """Save the end of a prompt that ``seq`` has just reached, with the ``output`` there, for
        equal prompts: see `PromptEnds`.

        It is worth room that others have if the same was asked before, ``n_alike`` others wait with
        it, its client announced to send it again (``is_expected``), or much of it lies after the
        last batch end; else it takes spare bytes only.
        """
        with stats.timed("save_ms"):
            recent = lookup.recent
            if recent is None or not stats.n_evaluated or not self._cache.enabled:
                return  # no prompt of a client, or nothing new, or no room for anything
            if not self._memory.shape.resume_points.contains(seq.n):
                return  # a restore would give other bits
            last_begin = (
                lookup.batch_ends[-2] if len(lookup.batch_ends) > 1 else 0
            )  # of the last batch
            exact = seq.n_exact in (last_begin, seq.n) and not seq.shares
            if self._exact and not exact:
                return  # a cold run would have evaluated other batches
            is_long = seq.n - last_begin >= MIN_END_TOKENS
            is_wanted = n_alike > 0 or is_expected or is_long or recent.has_whole
            n_bytes = self._memory.state_size(seq.id, (seq.n,))
            if not self._cache.prompt_ends.may_add(n_bytes, is_wanted=is_wanted):
                return
            try:
                self._save_end(seq, lookup, output(), exact=exact, is_wanted=is_wanted)
            except (StateError, MemoryError) as error:
                log.warning("cannot save the end of a prompt: %s", error)

    def _save_end(
        self,
        seq: LiveSequence,
        lookup: CacheLookup,
        output: Block,
        *,
        exact: bool,
        is_wanted: bool,
    ) -> None:
        covered = self._coverage(seq, lookup.match)
        end = self._take(seq, lookup.match.prefix(seq.n), covered)
        end.state = end.state.with_output(output)
        end.exact = exact
        with self._cache.locked(end, *lookup.snapshots):
            if self._cache.prompt_ends.add(end, is_wanted=is_wanted):
                seq.covered = Coverage(end.segment, seq.n)
        self._device.release_rejected(end)

    def suspend(self, seq: LiveSequence, *, frees_cells: bool = True) -> Snapshot:
        """Move everything that ``seq`` holds into a snapshot for `resume`, and clear ``seq``.
        Raises StateError or MemoryError, with ``seq`` unchanged.

        The snapshot is not an entry of the cache, which only counts its bytes until
        `RamCache.release`, and shares rows with it. Rows that the device can hold stay there unless
        ``frees_cells``.
        """
        suspended = self._take(seq, PromptMatch(seq.tokens).prefix(seq.n), seq.covered.alive())
        self._cache.protect(suspended)
        try:
            if frees_cells:
                self._device.to_ram(suspended)
        except (StateError, MemoryError):
            self._cache.release(suspended)
            raise
        self._memory.clear(seq.id)
        return suspended

    def resume(self, seq: LiveSequence, kept: Snapshot) -> None:
        """Restore the snapshot ``kept`` of `suspend` into ``seq``, which may have another id now.
        Raises StateError or OutOfCellsError, and keeps the snapshot.
        """
        self._memory.restore(seq.id, 0, kept.spans(0, kept.n), kept.state)
        seq.covered = Coverage(kept.segment, kept.n)
        self._cache.release(kept)

    def _take(self, seq: LiveSequence, prefix: Prefix, covered: Coverage) -> Snapshot:
        """Return a snapshot of all that ``seq`` holds: the rows after those ``covered``, and the
        state. Raises StateError or MemoryError.
        """
        state = self._memory.save_state(seq.id, seq.n)
        segment = covered.segment
        if segment is None or covered.n < seq.n:
            segment = self._device.segment(seq, covered)
        return Snapshot(prefix, segment, state, exact=seq.n_exact == seq.n, facts=seq.facts)

    def _coverage(self, seq: LiveSequence, match: PromptMatch) -> Coverage:
        """Return the rows of ``seq`` that need not be saved: its own that are, or equal ones of
        another snapshot, if `LiveSequence.n_overlap` shows that there may be some.
        """
        covered = seq.covered.alive()
        if covered.n >= seq.n_overlap:
            return covered
        other, n_shared = self._cache.overlap(match)
        if other is None:
            return covered
        n_common = other.n_same_batches(seq.batch_ends, min(n_shared, seq.n))
        if n_common > covered.n:
            covered = seq.covered = Coverage(other.segment_at(n_common), n_common)
        return covered

    def _copy_early(self, snapshot: Snapshot, first: int) -> None:
        """Start to copy the rows of ``snapshot`` from ``first`` on to RAM, if they cannot stay on
        the device or may be written to disk: while the next batch runs, not all at the end.
        """
        if self._memory.shape.is_pool or self._write_back.wants(snapshot):
            new = [segment for segment in snapshot.chain if segment.start >= first]
            self._device.copies.copy_within_headroom(*new)
