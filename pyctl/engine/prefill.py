"""A prompt on its way into its sequence, batch by batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from pyctl.cache import CacheLookup, CachePlan, LiveSequence, PrefixCache, RequestStats, State, batch_ends, full_batch
from pyctl.engine.backend import Backend
from pyctl.engine.engine_stats import EngineCounters, PrefillLog
from pyctl.engine.request import Progress
from pyctl.engine.schedule.admission import ActiveRequest, Steps
from pyctl.engine.schedule.cells import CellPool
from pyctl.errors import BrokenOffError, OutOfCellsError, StateError
from pyctl.prompt import Prompt

__all__ = ["Prefill", "PrefillTurns"]


class PrefillTurns:
    """Whose batch comes next: in order, but who needs one batch of ``n_batch`` tokens only waits for one at most.

    So a title or a completion does not wait for the whole of a long prompt, and that gets every second batch at least.
    """

    def __init__(self, n_batch: int) -> None:
        self._n_batch = n_batch
        self._passed = False

    def next(self, ready: Sequence[ActiveRequest]) -> ActiveRequest | None:
        """One of ``ready``, which are in order; None if there is none."""
        short = [active for active in ready[1:] if active.n_missing <= self._n_batch and not self._passed]
        self._passed = bool(short)
        return next(iter(short or ready), None)


class Prefill:
    """Evaluates prompts in batches, with a snapshot at each cut.

    ``is_short`` says that there was no room for a batch, and that somebody of ``running`` has to wait for it.
    """

    def __init__(
        self,
        backend: Backend,
        cells: CellPool,
        prefix_cache: PrefixCache,
        counters: EngineCounters,
        running: Collection[ActiveRequest],
    ) -> None:
        self.is_short = False
        self._backend = backend
        self._cells = cells
        self._prefix_cache = prefix_cache
        self._counters = counters
        self._running = running

    def ends(self, prompt: Prompt, *, free: bool = False) -> list[int]:
        """Where batches of ``prompt`` end; ``free``: as if a batch cost nothing."""
        backend, min_batch = self._backend, self._prefix_cache.settings.min_batch
        ends = batch_ends(prompt, backend.n_ubatch, min_batch, 0 if free else backend.batch_cost, backend.far_batch)
        return backend.places.added_to(ends)

    def behind(self, seq: LiveSequence, lookup: CacheLookup) -> CacheLookup:
        """``lookup`` with the batch ends for what is to follow in ``seq``.

        Behind generated text no batch is one of a cold run, so batches may end wherever a client may come back to: at
        every boundary. One turn has few of them, whatever they cost.
        """
        if seq.n_exact == seq.n or not self._backend.batch_cost:
            return lookup
        return replace(lookup, ends=self.ends(lookup.request.prompt, free=True))

    def run(
        self,
        active: ActiveRequest,
        seq: LiveSequence,
        ends: Sequence[int],
        plan: CachePlan,
        stats: RequestStats,
        *,
        exact: bool = True,
    ) -> Steps:
        """Append what is missing of the prompt up to each of ``ends``, as there is room; output 0 is that of its
        end then. Without ``exact`` these are other batches than a cold run's."""
        prompt = active.handle.request.prompt
        began, save_before = time.perf_counter(), stats.save_ms
        first = last = seq.n
        is_alone = True
        shown = PrefillLog(active.id, seq.n, len(prompt))
        _tell_progress(active, seq, stats)
        for previous, end in itertools.pairwise([0, *ends]):
            if end <= seq.n:
                continue
            picture = prompt.picture_at(seq.n)
            if picture is not None and self._backend.encode(picture):
                yield None  # that took a while: others may have a token first
            may_break = active.handle.request.background and picture is None
            while not self._evaluate(prompt, seq, end, plan, may_break=may_break):
                yield None
            last = seq.n if self._backend.is_async else end  # what a device has begun takes its time later
            # The very end of a prompt is a batch end of longer prompts only if it fills its batch.
            n_full = full_batch(previous, self._backend.n_ubatch, self._backend.far_batch)
            is_cold = exact and (end < len(prompt) or end - previous == n_full)
            seq.append(prompt.tokens[seq.n : end], exact=is_cold)
            seq.in_picture = picture is not None and end < picture.end
            shown.reached(end)
            if end in plan.cuts:
                self._prefix_cache.save(seq, plan, stats)
            _tell_progress(active, seq, stats)
            is_alone = is_alone and len(self._running) <= 1
            if end < len(prompt):
                yield None
        stats.n_evaluated = seq.n - stats.n_cached
        if plan.restored and plan.restored[0].state.output.size and not stats.n_evaluated:
            self._backend.recall(plan.restored[0].state.output)
        stats.prefill_ms = (time.perf_counter() - began) * 1e3 - (stats.save_ms - save_before)
        if is_alone:  # else others had their share of this time
            self._prefix_cache.cache.costs.note_evaluated(first, last, stats.prefill_ms / 1e3)

    def _evaluate(self, prompt: Prompt, seq: LiveSequence, end: int, plan: CachePlan, *, may_break: bool) -> bool:
        """False if there is no room until somebody else waits, or if it was broken off for somebody who does."""
        with self._prefix_cache.cache.locked(*plan.restored):
            has_room = self._cells.make_room(end - seq.n)
        if not has_room:
            self._cells.make_room(end - seq.n)  # its rows are in the sequence already
        before = self._before(seq) if may_break and self._backend.can_break else None
        self._backend.allow_break(before is not None)
        try:
            if (picture := prompt.picture_at(seq.n)) is not None:
                self._backend.evaluate_picture(seq.id, picture, seq.n, end, output=end == len(prompt))
            else:
                self._backend.evaluate(seq.id, prompt.tokens[seq.n : end], seq.n, output=end == len(prompt))
        except BrokenOffError:
            self._backend.break_off(False)
            if before is None:
                raise
            self._take_back(seq, before)
            return False
        except OutOfCellsError:
            if not self._empty(plan):
                if len(self._running) == 1:
                    raise
                self.is_short = True
            return False
        finally:
            self._backend.allow_break(False)
        self._counters.count_call(1, end)
        return True

    def _empty(self, plan: CachePlan) -> bool:
        """Take out of the context whatever is not in use, what the prompt was restored from last."""
        with self._prefix_cache.cache.locked(*plan.restored):
            gave = self._cells.empty()
        return gave or self._cells.empty()

    def _before(self, seq: LiveSequence) -> State | None:
        """What the sequence needs to be where it is again, beside its rows; None where that is not all."""
        if self._backend.kind == "opaque":
            return None
        try:
            return self._backend.save_state(seq.id, seq.n) if seq.n else State()
        except (StateError, MemoryError):
            return None

    def _take_back(self, seq: LiveSequence, before: State) -> None:
        """Let the sequence be where it was before an evaluation that was broken off."""
        if not seq.n:
            return self._backend.clear(seq.id)
        self._backend.rewind(seq.id, seq.n)
        if before.parts:
            self._backend.load_state(seq.id, seq.n, before)


def _tell_progress(active: ActiveRequest, seq: LiveSequence, stats: RequestStats) -> None:
    if active.handle.request.return_progress:
        ms = (time.perf_counter() - active.started) * 1e3
        active.handle.put(Progress(stats.n_prompt, stats.n_cached, seq.n, ms, stats.source, seq.id))
