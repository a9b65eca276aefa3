"""The engine: steps, the stages of a request, and tasks between requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.lookup import CacheLookup, CachePlan
from pyctl.cache.ports import CacheOptions, Store
from pyctl.cache.prefix_cache import PrefixCache
from pyctl.cache.ram import RamCache
from pyctl.cache.reads import Reading
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import Snapshot
from pyctl.engine.backend import Backend, VerifyOutputs
from pyctl.engine.canary.canary import Canary
from pyctl.engine.decode import Generation
from pyctl.engine.draft.speculation import Speculation
from pyctl.engine.draft.verify_batch import BatchItem, verify_batches
from pyctl.engine.engine_settings import Clock, EngineSettings
from pyctl.engine.engine_stats import EngineCounters
from pyctl.engine.exact_reply import ExactReply, ReplyRecorder, ReplyTrace
from pyctl.engine.handle import RequestHandle
from pyctl.engine.histograms import ReplySource
from pyctl.engine.jobs import StateReads
from pyctl.engine.prefill import Prefill
from pyctl.engine.request import Done, Request
from pyctl.engine.request_history import RequestHistory
from pyctl.engine.schedule.admission import ActiveRequest, Steps
from pyctl.engine.schedule.scheduler import Scheduler
from pyctl.errors import OutOfCellsError, PyctlError

__all__ = ["Engine", "EngineSettings"]

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.005
"""Longest wait of a step for the disk when there is no other work; requests that arrive meanwhile
wait as well.
"""


class Engine:
    """Serves requests on the sequences of one backend, restoring from and saving to ``cache`` and
    ``disk``. A ``recorder`` that is set gets the replies that are known to be exact.

    Not thread-safe; `Worker` runs it on a separate thread.
    """

    def __init__(
        self,
        backend: Backend,
        cache: RamCache,
        settings: EngineSettings,
        disk: Store | None = None,
        speculation: Speculation | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Build the cache and the scheduler around ``backend``, with empty sequences."""
        self.clock = clock
        self.state_reads = StateReads()
        self.backend = backend
        self.settings = settings
        self.recorder: ReplyRecorder | None = None
        options = CacheOptions(settings.min_step, settings.exact, settings.device)
        self.prefix_cache = PrefixCache(backend.memory, cache, options, disk)
        self.counters = EngineCounters()
        self.history = RequestHistory(clock)
        self.scheduler = Scheduler(
            backend, settings, self.prefix_cache, self.counters, clock, self._n_ready
        )
        self.sequences = self.scheduler.occupancy.sequences
        self.cells = self.scheduler.cells
        self.running = self.scheduler.running
        self.waiting = self.scheduler.waiting
        self.prewarms = self.scheduler.prewarms
        self.canary = Canary(
            backend,
            self.prefix_cache,
            self.scheduler.occupancy,
            self.state_reads,
            settings,
            clock,
        )
        self.speculation = Speculation() if speculation is None else speculation
        self.asleep = False
        self._is_warm = False
        self._drafts_lack_cells = False
        self._prefill = Prefill(
            backend, self.cells, self.prefix_cache, self.counters, self.state_reads, clock
        )

    def submit(self, handle: RequestHandle) -> None:
        """Queue a request; its snapshot in an object store is fetched while it waits."""
        self.canary.stop()
        reads = self.prefix_cache.prefetch.start(
            handle.request, self._prefill.compute_batch_ends, self.sequences
        )
        self.scheduler.add(handle, reads)
        if not handle.request.background:
            self.backend.control.preempt(False)  # the request that preempted has arrived

    def _n_ready(self, request: Request, seq: LiveSequence) -> int:
        """Return how many tokens of the prompt could be restored to ``seq``."""
        if not request.cache_prompt:
            return 0
        prompt = request.prompt
        return self.prefix_cache.prefetch.n_ready(
            prompt, self._prefill.compute_batch_ends(prompt), seq
        )

    @property
    def n_waiting(self) -> int:
        """The number of requests not yet started. Thread-safe."""
        return len(self.waiting.queue)

    @property
    def max_waiting(self) -> int:
        """The limit of `n_waiting`, including requests for free sequences. Thread-safe."""
        return self.settings.n_queue + max(self.backend.facts.n_seqs - len(self.running), 0)

    def step(self) -> bool:
        """Run one step: one batch of one prompt and one token of all replies. Returns whether work
        is due.
        """
        self.canary.stop()
        prefill, decode = self.scheduler.schedule()
        if prefill is not None:
            self.deliver_events()
            self._resume(prefill)
            # The batch may have suspended others, and the request may have its first token now.
            candidates = [
                candidate for candidate in (*decode, prefill) if candidate in self.running
            ]
            decode = [candidate for candidate in candidates if candidate.pending is not None]
        if decode:
            self._decode(decode, is_timed=prefill is None)
            if prefill is None:
                self.prefix_cache.write_back.flush_copies()
        elif prefill is None:
            self.deliver_events()
            self._wait_for_reads()
        return self.scheduler.has_work or self.prewarms.seconds == 0

    def _wait_for_reads(self) -> None:
        """Wait for the disk, if a request does, at most WAIT_SECONDS."""
        reads = [
            active.reads for active in (*self.running, *self.waiting) if active.reads is not None
        ]
        if reads:
            with self.state_reads.allowed(evaluating=False):
                reads[0].wait(WAIT_SECONDS)

    def deliver_events(self) -> None:
        """Deliver the events of the last steps. Called while the device evaluates, so that delivery
        costs no time.
        """
        for active in self.running:
            active.handle.release()

    @property
    def needs_warm_up(self) -> bool:
        """Return whether `warm_up` has work, and nothing is evaluated or held."""
        if self._is_warm or not self.backend.facts.is_async:
            return False
        if self.asleep or self.scheduler.has_work or self.canary.is_running:
            return False
        return not any(seq.n for seq in self.sequences) and not self.prefix_cache.device.n_cells

    def warm_up(self) -> None:
        """Let a separate device load its kernels in a full batch; a request preempts that."""
        facts = self.backend.facts
        control = self.backend.control
        tokens = np.ones(min(facts.n_ubatch, facts.n_cells), np.int32)
        control.preempt(False)
        control.allow_preemption(True)
        try:
            with self.state_reads.allowed():
                self.backend.evaluate(0, tokens, 0)
                self.backend.top_tokens(0, 1, 1)  # waits for the device
        except PyctlError as error:
            log.debug("preparation ends: %s", error)
        finally:
            control.allow_preemption(False)
            control.preempt(False)
            self.backend.memory.clear(0)
            self._is_warm = True

    def recover(self, error: PyctlError) -> None:
        """After a failed step, fail all requests with ``error`` and empty all sequences."""
        self.canary.stop()
        self.scheduler.end_all(error)
        for seq in self.sequences:
            self.prefix_cache.forget(seq)

    def sleep(self) -> None:
        """Park all sequences and unload the model; background requests end. All others have ended
        or are cancelled.
        """
        self.canary.stop()
        self.scheduler.stop_prewarm()
        self.prewarms.clear()
        while self.scheduler.has_work:  # cancelled requests end at the next step
            self.step()
        self._park_all()
        self.prefix_cache.device.evict_all()
        self.prefix_cache.write_back.flush_copies()
        self.backend.unload()
        self.asleep = True

    def _park_all(self) -> None:
        for seq in self.sequences:
            try:
                self.prefix_cache.park(seq)
            except Exception:
                log.exception("cannot save the end of a conversation")
                self.prefix_cache.forget(seq)

    def wake(self) -> None:
        """Reload the model if it is unloaded. Raises ModelError on failure."""
        if not self.asleep:
            return
        began = time.perf_counter()
        with self.state_reads.allowed():
            self.backend.load()
        self.asleep = False
        log.info("model loaded again in %.1f s", time.perf_counter() - began)

    @property
    def close_seconds(self) -> float:
        """Longest duration of `close`: the disk's time for pending writes."""
        disk = self.prefix_cache.disk
        return disk.close_seconds if disk is not None else 0.0

    def close(self, reason: PyctlError) -> bool:
        """End all requests with ``reason``; return whether all pending cache writes completed."""
        self.canary.stop()
        self.scheduler.end_all(reason)
        for job in self.scheduler.idle_jobs:
            job.fail(reason)
        if not self.asleep:
            self._park_all()
        return self.prefix_cache.close()

    # -- the parts of a step
    # ----------------------------------------------------------------------------------

    def _resume(self, active: ActiveRequest, verify: VerifyOutputs | None = None) -> None:
        """Run a request up to its next batch or token and record the step that it waits for."""
        if active.steps is None:
            is_prewarm = active.handle.request.background
            active.steps = self._prewarm(active) if is_prewarm else self._serve(active)
        try:
            active.step = next(active.steps) if verify is None else active.steps.send(verify)
        except StopIteration:
            return self.scheduler.end(active)
        except Exception as error:
            return self.scheduler.fail(active, error)
        if isinstance(active.step, OutOfCellsError):
            self.scheduler.yield_cells(active.step)

    def _decode(self, requests: list[ActiveRequest], *, is_timed: bool) -> None:
        """Evaluate the tokens of ``requests`` with drafts. ``is_timed``: the step does no other
        work.
        """
        requests, n_free = self.scheduler.fit_decoding(requests)
        if self._drafts_lack_cells:
            n_free = 0  # the last step found no cells for drafts
        self._drafts_lack_cells = False
        speculation = self.speculation or None
        batches = verify_batches(
            requests, self.backend.facts, speculation, n_free, self.cells.make_room
        )
        accepted_before = {}
        if speculation is not None:
            accepted_before = {active.id: active.handle.drafts.n_accepted for active in requests}
        began = time.perf_counter()
        for batch in batches:
            if not self._evaluate(batch):
                return  # no cells: the next step tries again
        ms = (time.perf_counter() - began) * 1e3 if is_timed else None
        if accepted_before and self.speculation and batches:
            self._record_drafts(requests, batches, accepted_before, ms)

    def _record_drafts(
        self,
        requests: list[ActiveRequest],
        batches: list[list[BatchItem]],
        accepted_before: Mapping[int, int],
        ms: float | None,
    ) -> None:
        """Report a step to the sources of drafts."""
        n_tokens = sum(len(item.tokens.tokens) for batch in batches for item in batch)
        accepted = {}
        for active in requests:
            n_before = accepted_before[active.id]
            accepted[active.id] = active.handle.drafts.n_accepted - n_before
        self.speculation.record(accepted, n_tokens, ms)

    def _evaluate(self, batch: list[BatchItem]) -> bool:
        """Evaluate one batch and resume its requests; False if it was not evaluated for lack of
        cells.
        """
        try:
            if not self.backend.facts.is_async:
                self.deliver_events()
            with self.state_reads.allowed():
                self.backend.decode([item.tokens for item in batch])
            if self.backend.facts.is_async:
                self.deliver_events()
        except OutOfCellsError as error:
            # The next step has the cells of unused rows, or goes without drafts. If there are
            # neither, a request gives up its cells.
            self._drafts_lack_cells = any(item.tokens.n_drafts for item in batch)
            has_freed = self.cells.empty()
            if not has_freed and not self._drafts_lack_cells:
                self.scheduler.yield_cells(error)
            return False
        except Exception as error:
            for item in batch:
                self.scheduler.fail(item.active, error)
            return True
        longest = 0
        for item in batch:
            longest = max(longest, item.tokens.position + len(item.tokens.tokens))
        self.counters.count_call(len(batch), longest)
        output = 0
        for item in batch:
            self._resume(item.active, VerifyOutputs(output, *item.draft))
            output += item.tokens.n_drafts + 1
        return True

    # -- one request
    # ----------------------------------------------------------------------------------

    def _serve(self, active: ActiveRequest) -> Steps:
        """Run all stages of a client's request."""
        handle = active.handle
        request = handle.request
        seq = active.seq
        cache = self.prefix_cache
        assert seq is not None
        active.started = time.perf_counter()
        with Generation(
            self.backend, handle, seq, self.state_reads, ends_loops=self.settings.loop_guard
        ) as reply:
            stats = active.stats = RequestStats(n_prompt=len(request.prompt))
            lookup = cache.lookup(
                request, self._prefill.compute_batch_ends(request.prompt), seq, stats
            )
            self.history.classify(request, stats)
            restored = yield from self._restore(seq, lookup, stats)
            stats.n_prewarmed = self.prewarms.used(lookup.match, stats.n_cached)
            lookup = self._prefill.after_reply(seq, lookup)
            plan = cache.plan(lookup, restored, seq, stats, may_branch=self._may_branch)
            if self._is_recorded(request, seq, lookup, plan):
                reply.trace = ReplyTrace()
            yield from self._prefill.run(active, seq, lookup, plan, stats)
            reply.first()
            is_alone = not active.ran_concurrently
            n_alike = self.waiting.n_alike(active, self.running)
            cache.saver.save_end(
                seq,
                lookup,
                stats,
                self.backend.output,
                n_alike,
                is_expected=request.is_prefill_only,
            )
            cache.persist(plan)
            cache.announce(lookup)
            prompt = request.prompt.tokens
            with self.speculation.following(
                active.id,
                prompt,
                prediction=request.prediction,
                may_read_prompts=request.may_read_prompts,
            ):
                yield from reply.generate()
        timings = reply.timings(stats, active.submitted, active.started)
        saved_seconds = cache.saved_time.count(stats, timings.prompt_ms, is_alone=is_alone)
        cache.totals.add(stats, reply.n_predicted, saved_seconds)
        self.counters.count_reply(timings, _reply_source(stats))
        self.history.add(timings, stats)
        if request.is_prefill_only:
            self.prewarms.record_sent_ahead(lookup.match, stats)
        receipt = self._record(request, reply.trace, stats, plan)
        handle.put(Done(reply.stop_type, reply.stopping_word, timings, stats, seq.id, receipt))

    def _is_recorded(
        self, request: Request, seq: LiveSequence, lookup: CacheLookup, plan: CachePlan
    ) -> bool:
        """Return whether the reply is known to be exact, and may be recorded. ``seq`` has only
        restored rows.
        """
        if self.recorder is None or not self.recorder.accepts(request):
            return False
        if self.settings.exact:
            return True
        # Without --exact the engine does not record which batches ran while others had cells, and
        # drafts make batches of several widths.
        if len(self.sequences) > 1 or not self.settings.clear_idle or self.speculation:
            return False
        if request.prediction and self.speculation.drafts_predictions:
            return False
        # An output that is recalled may be of another batch than a cold run's.
        is_cold_start = seq.n_exact == seq.n < len(request.prompt)
        return is_cold_start and set(plan.cuts) <= set(lookup.batch_ends)

    def _record(
        self, request: Request, trace: ReplyTrace | None, stats: RequestStats, plan: CachePlan
    ) -> int:
        """Record a reply that has a ``trace``; return the id of its receipt, 0 for none."""
        if self.recorder is None or trace is None or not trace.tokens:
            return 0
        rows = ""
        if plan.restored and plan.restored[0].segment.file.name is not None:
            rows = str(plan.restored[0].segment.file.name)
        reply = ExactReply(request, trace, stats, self.speculation.width, rows)
        return self.recorder.record(reply)

    def _prewarm(self, active: ActiveRequest) -> Steps:
        """Evaluate a prompt ahead if worthwhile, and count evaluated tokens across all
        interruptions; there is no reply.
        """
        handle = active.handle
        request = handle.request
        seq = active.seq
        cache = self.prefix_cache
        assert seq is not None
        active.started = time.perf_counter()
        ends, goal = self.prewarms.aim(request, self._prefill.compute_batch_ends(request.prompt))
        reply = Generation(self.backend, handle, seq, self.state_reads)
        stats = active.stats = RequestStats(n_prompt=goal)
        lookup = cache.lookup(request, ends, seq, stats)
        if self.prewarms.is_worth_it(lookup, seq, goal):
            replaced = self.prewarms.replaced_end(lookup, seq)
            restored = yield from self._restore(seq, lookup, stats)
            plan = cache.plan(lookup, restored, seq, stats, may_branch=self._may_branch)
            plan = replace(plan, cuts=(*plan.cuts, *lookup.batch_ends[-1:], goal))
            try:
                yield from self._prefill.run(active, seq, lookup, plan, stats)
            finally:
                self.prewarms.record(active, lookup.match, stats.n_cached, seq.n)
            cache.persist(plan)
            self.prewarms.evaluated(lookup, replaced)
        stats.n_evaluated = active.n_prewarmed
        stats.n_cached = max(goal - active.n_prewarmed, 0)
        if active.n_prewarmed:
            cache.totals.n_prewarms += 1
            self._log_prewarm(active, goal)
        timings = reply.timings(stats, active.submitted, active.started)
        handle.put(Done(reply.stop_type, reply.stopping_word, timings, stats, seq.id))

    def _log_prewarm(self, active: ActiveRequest, goal: int) -> None:
        why = "as a client asked"
        if active.handle.request.after is not None:
            why = "for the next turn, to its bits" if self.settings.exact else "for the next turn"
        log.info(
            "prewarm      %7s tokens  %7s evaluated  %.2f s  %s",
            f"{goal:,}",
            f"{active.n_prewarmed:,}",
            time.perf_counter() - active.started,
            why,
        )

    @property
    def _may_branch(self) -> bool:
        """Return whether a plan may add a batch: where batches have no overhead, as on a CPU."""
        return not self.backend.facts.batch_cost

    def _restore(
        self, seq: LiveSequence, lookup: CacheLookup, stats: RequestStats
    ) -> Reading[tuple[Snapshot, ...]]:
        """Restore the longest cached prefix of a prompt; return the snapshots that it came from."""
        cache = self.prefix_cache
        cache.park_previous(seq, lookup, stats)
        self.scheduler.give_all_cells(lookup)
        returned_before = cache.device.counts.returned
        restored = yield from cache.restore(lookup, seq, stats, self.cells.make_room)
        stats.n_from_device = cache.device.counts.returned - returned_before
        return restored


def _reply_source(stats: RequestStats) -> ReplySource:
    """Return the place of most rows of the prefix that was restored."""
    if stats.source == "ram" and 2 * stats.n_from_device > stats.n_cached:
        return "device"
    return stats.source
