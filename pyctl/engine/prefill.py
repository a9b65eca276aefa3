"""Prefill: evaluates a prompt into its sequence, batch by batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.lookup import CacheLookup, CachePlan
from pyctl.cache.plan import batch_ends, snapshot_ends
from pyctl.cache.prefix_cache import PrefixCache
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import Snapshot, State
from pyctl.engine.backend import Backend
from pyctl.engine.engine_settings import Clock
from pyctl.engine.engine_stats import EngineCounters, PrefillLog
from pyctl.engine.jobs import StateReads
from pyctl.engine.request import Progress
from pyctl.engine.schedule.admission import ActiveRequest, Steps
from pyctl.engine.schedule.cells import CellPool
from pyctl.errors import OutOfCellsError, PreemptedError, StateError
from pyctl.prompt import ImageSpan, Prompt

__all__ = ["Prefill"]


class Prefill:
    """Evaluates prompts in batches, with a snapshot at each cut."""

    def __init__(
        self,
        backend: Backend,
        cells: CellPool,
        prefix_cache: PrefixCache,
        counters: EngineCounters,
        state_reads: StateReads,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._backend = backend
        self._cells = cells
        self._prefix_cache = prefix_cache
        self._counters = counters
        self._state_reads = state_reads

    def compute_batch_ends(self, prompt: Prompt, *, free: bool = False) -> list[int]:
        """Return the batch ends of ``prompt``; with ``free``, as if batches had no overhead."""
        facts = self._backend.facts
        batch_cost = 0 if free else facts.batch_cost
        ends = batch_ends(prompt, facts.n_ubatch, batch_cost=batch_cost)
        return self._backend.memory.shape.resume_points.add_to(ends)

    def after_reply(self, seq: LiveSequence, lookup: CacheLookup) -> CacheLookup:
        """Return ``lookup`` with batch ends for the tokens after those in ``seq``."""
        # After generated text no batch equals one of a cold run, so batches end at every boundary,
        # where clients may resume. One turn has few boundaries.
        if seq.n_exact == seq.n or not self._backend.facts.batch_cost:
            return lookup
        return replace(lookup, batch_ends=self.compute_batch_ends(lookup.request.prompt, free=True))

    def run(
        self,
        active: ActiveRequest,
        seq: LiveSequence,
        lookup: CacheLookup,
        plan: CachePlan,
        stats: RequestStats,
    ) -> Steps:
        """Evaluate the missing tokens up to each of ``lookup.batch_ends``, each cut and
        ``stats.n_prompt``, as cells allow.

        Afterwards output 0 is the prompt end's. A batch to none of the ends differs from a cold
        run's.
        """
        prompt = active.handle.request.prompt
        ends = lookup.batch_ends
        began = time.perf_counter()
        save_before = stats.save_ms
        n_before = n_timed = seq.n  # before the first batch, and after the last one that is timed
        costs = self._prefix_cache.cache.costs
        shown = PrefillLog(active.id, seq.n, len(prompt), costs, self._clock)
        points = self._backend.memory.shape.resume_points
        resumable = frozenset(snapshot_ends(prompt, ends, points))
        interim = self._prefix_cache.interim_snapshots(
            active.handle.request, plan, seq, self._clock
        )
        _report_progress(active, seq, stats, 0.0)
        # ``start`` is where the batch starts without the cache; a restored sequence may be past it.
        for start, end in itertools.pairwise(sorted({0, *ends, *plan.cuts, stats.n_prompt})):
            if end <= seq.n:
                continue  # restored
            picture = prompt.image_at(seq.n)
            if picture is not None and self._encode(picture):
                yield None  # encoding is slow: other requests decode a token first
            yield from self._evaluate_until_done(active, seq, end, plan)
            # A device has only started this batch: the time so far belongs to the ones before.
            n_timed = seq.n if self._backend.facts.is_async else end
            is_cold = self._is_cold(prompt, ends, start, end)
            seq.append(prompt.tokens[seq.n : end], exact=is_cold)
            seq.in_image = picture is not None and end < picture.end
            shown.reached(end)
            is_due = end in resumable and interim.is_due(end)
            if is_due or end in plan.cuts:
                self._prefix_cache.saver.save(seq, plan, stats)
            if is_due:
                interim.write(end)
            _report_progress(active, seq, stats, shown.seconds_left)
            if end < len(prompt):
                yield None  # other requests take a step between two batches
        stats.n_evaluated = seq.n - stats.n_cached
        if plan.restored and not stats.n_evaluated:
            self._recall_output(plan.restored[0])
        if not active.ran_concurrently:  # otherwise the time includes other requests
            ms = (time.perf_counter() - began) * 1e3 - (stats.save_ms - save_before)
            self._prefix_cache.cache.costs.record_evaluated(n_before, n_timed, ms / 1e3)

    def _recall_output(self, restored: Snapshot) -> None:
        """Sample from the output that ``restored`` has kept of the end of an equal prompt: with
        all of a prompt restored, no batch has left one for the first token.
        """
        output = restored.state.output
        if output.size:
            self._backend.recall(output)

    def _evaluate_until_done(
        self, active: ActiveRequest, seq: LiveSequence, end: int, plan: CachePlan
    ) -> Steps:
        """Evaluate up to ``end``, however often the batch has to be tried again."""
        while (refusal := self._evaluate(active, seq, end, plan)) is not None:
            if isinstance(refusal, OutOfCellsError):
                yield refusal  # the scheduler suspends the youngest request, which frees cells
            else:
                yield None  # preempted: the request that has arrived goes first

    def _is_cold(self, prompt: Prompt, ends: Sequence[int], start: int, end: int) -> bool:
        """Return whether the batch from ``start`` to ``end`` is also one of a cold run, of this
        prompt and of each that extends it.

        The very end of a prompt ends its last batch; in a longer prompt that batch goes on, unless
        it is full.
        """
        if end not in ends:
            return False  # only a cut or the goal of a warm-up
        is_full = end - start == self._backend.facts.n_ubatch
        return end < len(prompt) or is_full

    def _encode(self, picture: ImageSpan) -> bool:
        with self._state_reads.allowed():
            return self._backend.encode(picture)

    def _evaluate(
        self, active: ActiveRequest, seq: LiveSequence, end: int, plan: CachePlan
    ) -> PreemptedError | OutOfCellsError | None:
        """Evaluate up to ``end``. Returns the error if the caller must retry: another request
        preempted the evaluation, or no cells are free.
        """
        prompt = active.handle.request.prompt
        picture = prompt.image_at(seq.n)
        with self._prefix_cache.cache.locked(*plan.restored):
            has_room = self._cells.make_room(end - seq.n)
        if not has_room:
            self._cells.make_room(
                end - seq.n
            )  # may evict the restored snapshots: their rows are in the sequence
        tokens = prompt.tokens[seq.n : end]
        control = self._backend.control
        is_preemptible = (
            active.handle.request.background and picture is None and control.can_preempt
        )
        before = self._before(seq) if is_preemptible else None
        control.allow_preemption(before is not None)
        try:
            with self._state_reads.allowed():
                self._backend.evaluate(
                    seq.id, tokens, seq.n, output=end == len(prompt), picture=picture
                )
        except PreemptedError as error:
            control.preempt(False)
            if before is None:
                raise
            self._take_back(seq, before)
            return error
        except OutOfCellsError as error:
            return self._evaluate(active, seq, end, plan) if self._empty(plan) else error
        finally:
            control.allow_preemption(False)
        self._counters.count_call(1, end)
        return None

    def _empty(self, plan: CachePlan) -> bool:
        """Remove all unused rows from the context; the snapshots that the prompt was restored from
        go last.
        """
        with self._prefix_cache.cache.locked(*plan.restored):
            gave = self._cells.empty()
        return gave or self._cells.empty()

    def _before(self, seq: LiveSequence) -> State | None:
        """Return the state for `_take_back`; None if the memory cannot separate rows from state, or
        on failure.
        """
        if not self._backend.memory.shape.has_rows:
            return None
        try:
            return self._backend.memory.save_state(seq.id, seq.n) if seq.n else State()
        except (StateError, MemoryError):
            return None

    def _take_back(self, seq: LiveSequence, before: State) -> None:
        """Return the sequence to its contents before an interrupted evaluation."""
        if not seq.n:
            return self._backend.memory.clear(seq.id)
        self._backend.memory.rewind(seq.id, seq.n)
        self._backend.memory.restore(seq.id, seq.n, (), before)


def _report_progress(
    active: ActiveRequest, seq: LiveSequence, stats: RequestStats, seconds_left: float
) -> None:
    if active.handle.request.return_progress:
        ms = (time.perf_counter() - active.started) * 1e3
        active.handle.put(
            Progress(stats.n_prompt, stats.n_cached, seq.n, ms, stats.source, seq.id, seconds_left)
        )
