"""A request on its way through the engine, and tasks that wait between requests."""

from __future__ import annotations

import contextlib
import logging
import time

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.disk.readers import Reads
from pyctl.cache.disk_tier import DiskTier
from pyctl.cache.ram import RamCache
from pyctl.engine.admission import LOOK_SECONDS, WAIT_SECONDS, ActiveRequest, Admission, IdleTask, Steps
from pyctl.engine.backend import Backend
from pyctl.engine.cells import CellPool
from pyctl.engine.decode import Generation, Verify
from pyctl.engine.draft.speculation import Speculation
from pyctl.engine.draft.verify_batch import BatchItem, verify_batches
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.engine_stats import EngineCounters, RecentReplies
from pyctl.engine.handle import RequestHandle
from pyctl.engine.prefill import Prefill, PrefillTurns, WarmUps
from pyctl.engine.request import Done, Failed, told
from pyctl.engine.restore import CacheLookup
from pyctl.engine.sequence import LiveSequence
from pyctl.engine.snapshotter import Snapshotter
from pyctl.errors import EngineError, OutOfCellsError, PyctlError

__all__ = ["Engine", "EngineSettings", "IdleTask"]

log = logging.getLogger(__name__)


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
    ) -> None:
        self.backend = backend
        self.settings = settings
        self.snapshotter = Snapshotter(backend, cache, settings, disk)
        self.sequences = [LiveSequence(i, backend.n_ctx) for i in range(backend.n_seqs)]
        self.pool = CellPool(self.sequences, backend.n_cells, self.snapshotter.park, self.snapshotter.device)
        self.waiting = Admission(backend.n_cells, backend.n_ctx)
        self.running: list[ActiveRequest] = []
        self.last: dict[int, ActiveRequest] = {}  # of each sequence, the request that it serves or served
        self.idle_tasks: list[IdleTask] = []
        self.counters = EngineCounters()
        self.replies = RecentReplies()
        self.asleep = False
        self._turns = PrefillTurns(backend.n_ubatch)
        self._prefill = Prefill(backend, self.pool, self.snapshotter, self.counters, self.running)
        self.warm_ups = WarmUps(self.snapshotter, self._prefill, backend.n_ubatch)
        self.speculation = speculation or Speculation()
        self._n_arrived = self._n_begun = 0
        self._look_again = 0.0  # when to look at who waits, unless something changes before
        self._overrun = False  # the context had fewer cells than were counted: nobody begins until somebody ends

    # -- scheduling --------------------------------------------------------------------------------------------------

    def submit(self, handle: RequestHandle) -> None:
        """Queue a request."""
        if handle.request.background:
            return self.warm_ups.put(handle, self.sequences)
        self.warm_ups.arrived(handle.request)
        self._n_arrived += 1
        self.backend.break_off(False)  # it is here
        self.waiting.put_back(ActiveRequest(handle, self._n_arrived))
        self._look_again = 0.0

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
        if self.idle_tasks:
            self._run_idle_tasks()
        if self.waiting and (not self.running or time.monotonic() >= self._look_again):
            self._admit()
        if not (self.running or self.waiting or self.idle_tasks) and (warm_up := self.warm_ups.take()) is not None:
            self._begin(warm_up)
        ready: list[ActiveRequest] = []
        decoding: list[ActiveRequest] = []
        for active in tuple(self.running):
            if active.handle.cancelled:
                self._end(active)
            elif active.pending is not None:
                decoding.append(active)
            elif active.reads is None or active.reads.ready():
                ready.append(active)
        prefilling = self._turns.next(ready)
        if prefilling is not None:
            self.tell()
            self._resume(prefilling, None)
            if self._prefill.is_short:
                self._prefill.is_short, self._overrun = False, True
                self._suspend(youngest := self._youngest())
                decoding = [active for active in decoding if active is not youngest]
            if prefilling.pending is not None and prefilling in self.running:
                decoding.append(prefilling)
        if decoding:
            self._decode(decoding, is_timed=prefilling is None)
        elif prefilling is None:
            self.tell()
            waiting = [active.reads for active in self.running if active.reads is not None]
            if waiting:
                waiting[0].wait(WAIT_SECONDS)
        return bool(self.running or self.waiting or self.idle_tasks) or self.warm_ups.seconds == 0

    def tell(self) -> None:
        """Let clients have what the last steps gave: while a device evaluates, not while it waits for the next step."""
        for active in self.running:
            active.handle.release()

    def recover(self, error: PyctlError) -> None:
        """A step broke off, nobody knows where: fail all requests with ``error``, forget what the sequences hold."""
        self._end_all(error)
        self._prefill.is_short = False
        for seq in self.sequences:
            seq.busy = seq.left_over = False
            self.snapshotter.forget(seq)

    def sleep(self) -> None:
        """Free the model, after the ends of all conversations went to the cache; nothing may be running."""
        self.warm_ups.clear()
        for seq in self.sequences:
            try:
                self.snapshotter.park(seq)
            except Exception:
                log.exception("the end of a conversation could not be saved")
                self.snapshotter.forget(seq)
        self.snapshotter.device.leave_all()
        self.snapshotter.settle()
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
        disk = self.snapshotter.disk
        return disk.close_seconds if disk is not None else 0.0

    def close(self, reason: PyctlError) -> bool:
        """End all requests with ``reason``; whether everything is on disk then that was to be there."""
        self._end_all(reason)
        for task in self.idle_tasks:
            task.fail(reason)
        return self.snapshotter.close()

    def _end_all(self, error: PyctlError) -> None:
        for active in [*self.running, *self.waiting, *self.warm_ups.clear()]:
            with contextlib.suppress(Exception):
                self._end(active)
            active.handle.put(Failed(error))
        self.running.clear()
        self.waiting = Admission(self.backend.n_cells, self.backend.n_ctx)

    def _run_idle_tasks(self) -> None:
        ready = [task for task in self.idle_tasks if not self.sequences[task.seq].busy]
        self.idle_tasks = [task for task in self.idle_tasks if task not in ready]
        for task in ready:
            task.run()

    def _admit(self) -> None:
        self._look_again = time.monotonic() + LOOK_SECONDS
        for active in self.waiting.take_cancelled():
            self._end(active)
        while not (self._overrun and self.running):
            found = self.waiting.take_next(self.running, self.sequences)
            if found is None:
                return
            if found.kept is not None:
                self._go_on(found)
            else:
                self._begin(found)

    def _begin(self, active: ActiveRequest) -> None:
        prompt = active.handle.request.prompt.tokens
        # The sequence that already holds most of the prompt, else the one that was not used for longest.
        idle = filter(active.may_use, self.sequences)
        active.seq = max(idle, key=lambda seq: (seq.shared(prompt), -seq.used))
        self._n_begun += 1
        active.seq.busy = active.seq.left_over = True
        active.seq.used = active.id = self._n_begun
        active.seq.named = active.handle.request.seq >= 0
        self.last[active.seq.id] = active
        if active.handle.request.background:
            active.steps = self.warm_ups.serve(active, active.seq, self._give_all_cells, self.pool.make_room)
        else:
            active.steps = self._serve(active, active.seq)
        self.running.append(active)

    def _stop_warm_up(self) -> None:
        for active in [each for each in self.running if each.handle.request.background]:
            self._end(active)
            self.warm_ups.put_back(active)

    def _suspend(self, active: ActiveRequest) -> None:
        """Let a running request wait as it is: what its sequence holds goes to RAM, its generator stays."""
        active.handle.release()
        seq = active.seq
        assert seq is not None
        if active.stats is None or active.reads is not None or not seq.n:  # nothing of it is evaluated yet
            self.running.remove(active)
            if active.steps is not None:
                active.steps.close()
            active.seq, active.steps, active.stats, active.reads = None, None, None, None
            seq.busy = seq.left_over = False
            return self.waiting.put_back(active)
        try:
            active.kept = self.snapshotter.suspend(seq)
        except (EngineError, MemoryError) as error:
            log.warning("request %d could not be suspended: %s", active.id, error)
            return self._fail(active, OutOfCellsError())
        self.counters.n_suspended += 1
        log.info("request %d waits with %d tokens, others need the cells", active.id, seq.n)
        self._detach(active, seq)

    def _detach(self, active: ActiveRequest, seq: LiveSequence) -> None:
        """Let a request that has ``kept`` everything wait; its ``seq`` stays with it, an empty one takes the place."""
        self.running.remove(active)
        self.sequences[seq.id] = LiveSequence(seq.id, seq.capacity, used=seq.used)
        self.last.pop(seq.id, None)
        self.waiting.put_back(active)

    def _go_on(self, active: ActiveRequest) -> None:
        """Give a suspended request a sequence again."""
        seq, kept = active.seq, active.kept
        assert seq is not None
        assert kept is not None
        free = min(filter(active.may_use, self.sequences), key=lambda seq: (seq.n, seq.used))
        self.snapshotter.park(free)
        self.pool.make_room(seq.n)
        seq.id, self.sequences[free.id], self.last[free.id] = free.id, seq, active
        self.running.append(active)
        try:
            self.snapshotter.resume(seq, kept)
        except OutOfCellsError as error:
            self.backend.clear(seq.id)
            if not self.pool.empty():
                if len(self.running) == 1:
                    return self._fail(active, error)
                self._overrun = True
            return self._detach(active, seq)
        except Exception as error:
            return self._fail(active, error)
        active.kept = None

    def _resume(self, active: ActiveRequest, verify: Verify | None) -> None:
        assert active.steps is not None
        try:
            step = next(active.steps) if verify is None else active.steps.send(verify)
            active.reads = step if isinstance(step, Reads) else None
            active.pending = None if isinstance(step, Reads) else step
        except StopIteration:
            self._end(active)
        except Exception as error:
            self._fail(active, error)

    def _decode(self, requests: list[ActiveRequest], *, is_timed: bool) -> None:
        requests, n_free = self._with_room(requests)
        batches = verify_batches(requests, self.backend, self.speculation, n_free, self.pool.make_room)
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
            if not self.pool.empty():
                self._overrun = True
                if len(self.running) == 1:
                    self._fail(self.running[0], error)
                else:
                    self._suspend(self._youngest())
            return False
        except Exception as error:
            for active, _, _ in batch:
                self._fail(active, error)
            return True
        self.counters.count_call(len(batch), max(item.position + len(item.tokens) for _, item, _ in batch))
        output = 0
        for active, item, draft in batch:
            self._resume(active, Verify(output, *draft))
            output += item.n_drafts + 1
        return True

    def _with_room(self, decoding: list[ActiveRequest]) -> tuple[list[ActiveRequest], int]:
        """Those of ``decoding`` for whose tokens there are cells beside all prompts, and how many are left for drafts.

        The youngest have to wait."""
        while True:
            n_new = sum(active.n_pending for active in decoding)
            n_free = self.pool.n_cells - n_new - sum(each.n_needed for each in self.running)
            if n_free >= 0 or len(self.running) == 1:
                self.pool.make_room(n_new)
                return decoding, n_free
            youngest = self._youngest()
            decoding = [active for active in decoding if active is not youngest]
            self._suspend(youngest)

    def _youngest(self) -> ActiveRequest:
        return max(self.running, key=lambda active: active.arrived)

    def _fail(self, active: ActiveRequest, error: Exception) -> None:
        if active.stats is not None and active.seq is not None:  # what it holds nobody knows
            self.snapshotter.forget(active.seq)
        self._end(active)
        active.handle.put(Failed(told(error)))

    def _end(self, active: ActiveRequest) -> None:
        active.handle.release()
        if active.steps is not None:
            active.steps.close()
        if active.kept is not None:
            self.snapshotter.release(active.kept)
            active.kept = None
        if active.seq is not None:
            active.seq.busy = active.seq.left_over = False
        if active in self.running:
            self.running.remove(active)
        if not active.handle.request.background:
            self.warm_ups.ended()
        self._look_again, self._overrun = 0.0, False

    # -- one request -------------------------------------------------------------------------------------------------

    def _serve(self, active: ActiveRequest, seq: LiveSequence) -> Steps:
        """The whole way of a request."""
        snapshotter, request, handle = self.snapshotter, active.handle.request, active.handle
        started = active.started = time.perf_counter()
        with Generation(self.backend, handle, seq) as reply:
            stats = active.stats = RequestStats(n_prompt=len(request.prompt))
            seq.left_over = False
            lookup = snapshotter.lookup(request, self._prefill.ends(request.prompt), seq, stats)
            snapshotter.leave(seq, lookup, stats)
            self._give_all_cells(lookup)
            restored = yield from snapshotter.restore(lookup, seq, stats, self.pool.make_room)
            stats.n_warmed = self.warm_ups.used(lookup.match, stats.n_cached)
            lookup = self._prefill.behind(seq, lookup)
            plan = snapshotter.plan(lookup, restored, seq, stats)
            yield from self._prefill.run(active, seq, lookup.ends, plan, stats)
            reply.first()
            snapshotter.persist(plan)
            with self.speculation.following(active.id, request.prompt.tokens, request.sampling.seed) as learn:
                yield from reply.rest(learn)

        timings = reply.timings(stats, active.submitted, started)
        snapshotter.totals.add(stats, reply.n_predicted)
        self.counters.count_reply(timings)
        self.replies.add(timings)
        handle.put(Done(reply.stop_type, reply.stopping_word, timings, stats, seq.id))

    def _give_all_cells(self, lookup: CacheLookup) -> None:
        """Who is served alone gets all cells: a request then costs and yields what it does alone."""
        clears = self.settings.exact or (self.settings.clear_idle and self.snapshotter.cache.enabled)
        if len(self.running) == 1 and clears:
            self.pool.clear_idle(lookup.snapshots, named=False)
