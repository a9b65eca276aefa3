"""A request on its way through the engine, and tasks that wait between requests."""

from __future__ import annotations

import logging
import time

from pyctl.cache import DiskTier, LiveSequence, PrefixCache, RamCache, Reads, RequestStats
from pyctl.engine.backend import Backend
from pyctl.engine.decode import Generation, Verify
from pyctl.engine.draft.speculation import Speculation
from pyctl.engine.draft.verify_batch import BatchItem, verify_batches
from pyctl.engine.engine_settings import Clock, EngineSettings
from pyctl.engine.engine_stats import EngineCounters, RecentReplies
from pyctl.engine.handle import RequestHandle
from pyctl.engine.prefill import Prefill, PrefillTurns
from pyctl.engine.request import Done
from pyctl.engine.schedule.admission import ActiveRequest, IdleTask, Steps
from pyctl.engine.schedule.company import Company
from pyctl.engine.schedule.warm_ups import WarmUps
from pyctl.errors import OutOfCellsError, PyctlError

__all__ = ["Engine", "EngineSettings", "IdleTask"]

log = logging.getLogger(__name__)

WAIT_SECONDS = 0.005
"""For how long a step waits for the disk when there is nothing else to do; what arrives meanwhile waits, too."""


class Engine:
    """Serves requests on the sequences of one backend, restoring from and saving to ``cache`` and ``disk``.

    Not thread-safe; `Worker` runs it on a thread of its own.
    """

    def __init__(
        self,
        backend: Backend,
        cache: RamCache,
        settings: EngineSettings,
        disk: DiskTier | None = None,
        speculation: Speculation | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.clock = clock
        self.backend = backend
        self.settings = settings
        self.prefix_cache = PrefixCache(backend, cache, settings, disk)
        self.counters = EngineCounters()
        self.replies = RecentReplies()
        self.company = Company(backend, settings, self.prefix_cache, self.counters)
        self.cells = self.company.cells
        self.sequences = self.company.sequences
        self.running = self.company.running
        self.waiting = self.company.waiting
        self.idle_tasks: list[IdleTask] = []
        self.asleep = False
        self._turns = PrefillTurns(backend.n_ubatch)
        self._prefill = Prefill(backend, self.cells, self.prefix_cache, self.counters, self.running)
        self.warm_ups = WarmUps(self.prefix_cache, self._prefill, backend.n_ubatch, clock)
        self.company.on_end = self.warm_ups.ended
        self.speculation = speculation or Speculation()

    # -- scheduling --------------------------------------------------------------------------------------------------

    def submit(self, handle: RequestHandle) -> None:
        """Queue a request."""
        if handle.request.background:
            self.warm_ups.put(handle, self.sequences)
            return
        self.warm_ups.arrived(handle.request)
        self.backend.break_off(False)  # it is here
        self.company.arrive(handle)

    def when_idle(self, task: IdleTask) -> None:
        """Have ``task`` done when its sequence is free, before the next request gets it."""
        self.idle_tasks.append(task)

    @property
    def n_waiting(self) -> int:
        """Requests that wait to be begun. Any thread may ask."""
        return len(self.waiting.queue)

    @property
    def most_waiting(self) -> int:
        """How many may, with those whom a free sequence expects. Any thread may ask."""
        return self.settings.n_queue + max(self.backend.n_seqs - len(self.running), 0)

    def step(self) -> bool:
        """Advance everybody once: one batch for one request in prefill, one token for all that decode.

        Returns whether work is left that need not wait for its time.
        """
        if self.waiting or self.idle_tasks:
            self._stop_warm_up()
        self._run_idle_tasks()
        self.company.admit(self._begin)
        has_work = self.running or self.waiting or self.idle_tasks
        if not has_work and (warm_up := self.warm_ups.take()) is not None:
            self._begin(warm_up)
        ready: list[ActiveRequest] = []
        decoding: list[ActiveRequest] = []
        for active in tuple(self.running):
            if active.handle.cancelled:
                self.company.end(active)
            elif active.pending is not None:
                decoding.append(active)
            elif active.reads is None or active.reads.ready():
                ready.append(active)
        prefilling = self._turns.next(ready)
        if prefilling is not None:
            self.tell()
            self._resume(prefilling, None)
            if self._prefill.is_short:
                self._prefill.is_short = False
                youngest = self.company.suspend_youngest()
                decoding = [active for active in decoding if active is not youngest]
            if prefilling.pending is not None and prefilling in self.running:
                decoding.append(prefilling)
        if decoding:
            self._decode(decoding, is_timed=prefilling is None)
        elif prefilling is None:
            self.tell()
            if reads := [active.reads for active in self.running if active.reads is not None]:
                reads[0].wait(WAIT_SECONDS)
        return bool(self.running or self.waiting or self.idle_tasks) or self.warm_ups.seconds == 0

    def tell(self) -> None:
        """Let clients have what the last steps gave: while a device evaluates, not while it waits for the next step."""
        for active in self.running:
            active.handle.release()

    def recover(self, error: PyctlError) -> None:
        """A step broke off, nobody knows where: fail all requests with ``error``, forget what the sequences hold."""
        self.company.end_all(self.warm_ups.clear(), error)
        self._prefill.is_short = False
        for seq in self.sequences:
            seq.busy = seq.left_over = False
            self.prefix_cache.forget(seq)

    def sleep(self) -> None:
        """Free the model, after the ends of all conversations went to the cache; nothing may be running."""
        self.warm_ups.clear()
        for seq in self.sequences:
            try:
                self.prefix_cache.park(seq)
            except Exception:
                log.exception("the end of a conversation could not be saved")
                self.prefix_cache.forget(seq)
        self.prefix_cache.device.leave_all()
        self.prefix_cache.settle()
        self.backend.unload()
        self.asleep = True
        log.info("idle: the model is freed until the next request")

    def wake(self) -> None:
        """Load the model again if it was freed; ModelError when that fails."""
        if self.asleep:
            began = time.perf_counter()
            self.backend.load()
            self.asleep = False
            log.info("the model is loaded again after %.1f s", time.perf_counter() - began)

    @property
    def close_seconds(self) -> float:
        """How long `close` may take: what the disk is given to write the rest."""
        disk = self.prefix_cache.disk
        return disk.close_seconds if disk is not None else 0.0

    def close(self, reason: PyctlError) -> bool:
        """End all requests with ``reason``; whether everything is on disk then that was to be there."""
        self.company.end_all(self.warm_ups.clear(), reason)
        for task in self.idle_tasks:
            task.fail(reason)
        return self.prefix_cache.close()

    def _run_idle_tasks(self) -> None:
        ready = [task for task in self.idle_tasks if not self.sequences[task.seq].busy]
        self.idle_tasks = [task for task in self.idle_tasks if task not in ready]
        for task in ready:
            task.run()

    def _begin(self, active: ActiveRequest) -> None:
        seq = self.company.begin(active)
        if active.handle.request.background:
            active.steps = self.warm_ups.serve(active, seq, self.company.give_all_cells, self.cells.make_room)
        else:
            active.steps = self._serve(active, seq)

    def _stop_warm_up(self) -> None:
        for active in [each for each in self.running if each.handle.request.background]:
            self.company.end(active)
            self.warm_ups.put_back(active)

    def _resume(self, active: ActiveRequest, verify: Verify | None) -> None:
        assert active.steps is not None
        try:
            step = next(active.steps) if verify is None else active.steps.send(verify)
            active.reads = step if isinstance(step, Reads) else None
            active.pending = None if isinstance(step, Reads) else step
        except StopIteration:
            self.company.end(active)
        except Exception as error:
            self.company.fail(active, error)

    def _decode(self, requests: list[ActiveRequest], *, is_timed: bool) -> None:
        requests, n_free = self.company.with_room(requests)
        batches = verify_batches(requests, self.backend, self.speculation, n_free, self.cells.make_room)
        began = time.perf_counter()
        # What finds no cells is tried again by the next step.
        if all(map(self._evaluate, batches)) and self.speculation and batches:
            n_tokens = sum(len(item.tokens) for batch in batches for _, item, _ in batch)
            self.speculation.settle(n_tokens, (time.perf_counter() - began) * 1e3 if is_timed else None)

    def _evaluate(self, batch: list[BatchItem]) -> bool:
        """Evaluate one batch and resume those that wait for it; False if nothing was evaluated for want of cells."""
        try:
            if not self.backend.is_async:
                self.tell()
            self.backend.decode([item.tokens for item in batch])
            self.tell()
        except OutOfCellsError as error:
            if not self.cells.empty():
                if len(self.running) == 1:
                    self.company.fail(self.running[0], error)
                else:
                    self.company.suspend_youngest()
            return False
        except Exception as error:
            for active, _, _ in batch:
                self.company.fail(active, error)
            return True
        self.counters.count_call(len(batch), max(item.position + len(item.tokens) for _, item, _ in batch))
        output = 0
        for active, item, draft in batch:
            self._resume(active, Verify(output, *draft))
            output += item.n_drafts + 1
        return True

    # -- one request -------------------------------------------------------------------------------------------------

    def _serve(self, active: ActiveRequest, seq: LiveSequence) -> Steps:
        """The whole way of a request."""
        prefix_cache, request, handle = self.prefix_cache, active.handle.request, active.handle
        started = active.started = time.perf_counter()
        with Generation(self.backend, handle, seq) as reply:
            stats = active.stats = RequestStats(n_prompt=len(request.prompt))
            seq.left_over = False
            lookup = prefix_cache.lookup(request, self._prefill.ends(request.prompt), seq, stats)
            prefix_cache.leave(seq, lookup, stats)
            self.company.give_all_cells(lookup)
            restored = yield from prefix_cache.restore(lookup, seq, stats, self.cells.make_room)
            stats.n_warmed = self.warm_ups.used(lookup.match, stats.n_cached)
            lookup = self._prefill.behind(seq, lookup)
            plan = prefix_cache.plan(lookup, restored, seq, stats)
            yield from self._prefill.run(active, seq, lookup.ends, plan, stats)
            reply.first()
            prefix_cache.save_end(seq, lookup, stats, self.backend.output, self.waiting.n_alike(active, self.running))
            prefix_cache.persist(plan)
            with self.speculation.following(active.id, request.prompt.tokens, request.sampling.seed) as learn:
                yield from reply.rest(learn)

        timings = reply.timings(stats, active.submitted, started)
        prefix_cache.totals.add(stats, reply.n_predicted)
        self.counters.count_reply(timings)
        self.replies.add(timings)
        handle.put(Done(reply.stop_type, reply.stopping_word, timings, stats, seq.id))
