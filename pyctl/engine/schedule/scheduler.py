"""The scheduler: starts, suspends, resumes and ends requests, and selects the work of each step."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from pyctl.cache.lookup import CacheLookup
from pyctl.cache.prefix_cache import PrefixCache
from pyctl.cache.reads import Reads
from pyctl.cache.sequence import LiveSequence
from pyctl.engine.backend import Backend
from pyctl.engine.engine_settings import Clock, EngineSettings
from pyctl.engine.engine_stats import EngineCounters
from pyctl.engine.handle import RequestHandle
from pyctl.engine.jobs import Job
from pyctl.engine.request import Failed, Progress, Request, as_client_error
from pyctl.engine.schedule.admission import ActiveRequest, Admission, Occupancy
from pyctl.engine.schedule.cells import CellPool
from pyctl.engine.schedule.prewarm import Prewarms
from pyctl.engine.schedule.turns import TurnQueue
from pyctl.errors import EngineError, OutOfCellsError, PyctlError

__all__ = ["Decision", "Scheduler"]

log = logging.getLogger(__name__)


class Decision(NamedTuple):
    """The work of a step: the next prompt batch of ``prefill``, if any, and one token of each of
    ``decode``.
    """

    prefill: ActiveRequest | None
    decode: list[ActiveRequest]


class Scheduler:
    """Requests ``running`` on sequences, and requests ``waiting`` to start or resume.

    All share ``cells``. When cells run out, the youngest request is suspended with its sequence in
    RAM; so are the youngest replies while a prompt without room waits. With --exact requests take
    turns instead: one runs at a time and has all cells. Background requests run one at a time and
    start again after an interruption. ``n_ready`` is how many tokens of a request's prompt could be
    restored to a sequence.
    """

    def __init__(
        self,
        backend: Backend,
        settings: EngineSettings,
        prefix_cache: PrefixCache,
        counters: EngineCounters,
        clock: Clock,
        n_ready: Callable[[Request, LiveSequence], int],
    ) -> None:
        """Start with one empty sequence for each that the backend has."""
        facts = backend.facts
        self.occupancy = Occupancy([LiveSequence(i, facts.n_ctx) for i in range(facts.n_seqs)])
        self.running = self.occupancy.running
        self.cells = CellPool(self.occupancy, facts.n_cells, prefix_cache)
        self.waiting = (
            TurnQueue(facts.n_cells, facts.n_ctx, facts.n_seqs, clock)
            if settings.exact
            else Admission(facts.n_cells, facts.n_ctx)
        )
        self.prewarms = Prewarms(prefix_cache, facts.n_ubatch, clock, settings.prewarm)
        self.idle_jobs: list[Job[Any]] = []
        self._backend = backend
        self._settings = settings
        self._prefix_cache = prefix_cache
        self._counters = counters
        self._n_ready = n_ready
        # Results of `n_ready` for requests that have not started.
        self._n_restorable: WeakKeyDictionary[ActiveRequest, int] = WeakKeyDictionary()
        self._n_arrived = 0
        self._n_begun = 0
        # Set when a waiting request may start, or was cancelled.
        self._changed = threading.Event()
        # llama.cpp had fewer cells than counted: no request starts until one ends.
        self._is_over_committed = False
        # The last prefill was short and passed others.
        self._has_passed = False

    @property
    def has_work(self) -> bool:
        """Return whether requests or jobs run or wait. Background requests count once they run."""
        return bool(self.running or self.waiting or self.idle_jobs)

    def add(self, handle: RequestHandle, reads: Reads | None = None) -> None:
        """Queue a request, which starts when ``reads`` are ready."""
        if handle.request.background:
            return self.prewarms.put(handle, self.occupancy.sequences)
        self.prewarms.arrived(handle.request)
        self._n_arrived += 1
        self.waiting.put_back(ActiveRequest(handle, self._n_arrived, step=reads))
        handle.changed = self._changed
        self._changed.set()

    def schedule(self) -> Decision:
        """Start or resume due requests, end cancelled ones, and return the work of the next
        step.
        """
        if self.waiting or self.idle_jobs:
            self.stop_prewarm()
            self._end_turn()
            self._make_way()
            self._run_idle_jobs()
            self.admit()
        if not self.has_work and (prewarm := self.prewarms.take()) is not None:
            self._begin(prewarm)
        for active in tuple(self.running):
            if len(self.running) > 1:
                active.ran_concurrently = True
            if active.handle.cancelled:
                self.end(active)
        decode = []
        ready = []
        for active in self.running:
            if active.pending is not None:
                decode.append(active)
            elif active.reads is None or active.reads.ready():
                ready.append(active)
        return Decision(self.next_prefill(ready) if ready else None, decode)

    def next_prefill(self, ready: Sequence[ActiveRequest]) -> ActiveRequest | None:
        """Return the first of ``ready``, but every second time one that needs only a single batch,
        if any.

        So short requests (titles, next turns) do not wait for a long prompt, which gets every
        second batch.
        """
        if not self._has_passed:
            for active in ready[1:]:
                if self.n_missing(active) <= self._backend.facts.n_ubatch:
                    self._has_passed = True
                    return active
        self._has_passed = False
        return ready[0] if ready else None

    def n_missing(self, active: ActiveRequest) -> int:
        """Return the tokens of the prompt to be evaluated; before the start, without those that can
        be restored.
        """
        assert active.seq is not None
        request = active.handle.request
        if active.stats is not None:
            return len(request.prompt) - active.seq.n
        if active not in self._n_restorable:
            self._n_restorable[active] = self._n_ready(request, active.seq)
        return len(request.prompt) - self._n_restorable[active]

    def _run_idle_jobs(self) -> None:
        """Run the jobs whose sequences no request owns."""
        if self._settings.exact and self.running:
            return  # a sequence that a job fills would share the cells with the request
        occupancy = self.occupancy
        free = {seq.id for seq in occupancy.sequences if occupancy.owner(seq) is None}
        ready = [job for job in self.idle_jobs if job.seq in free]
        self.idle_jobs = [job for job in self.idle_jobs if job.seq not in free]
        for job in ready:
            job.run()

    def stop_prewarm(self) -> None:
        """Interrupt the background request that runs, if any; it waits again."""
        for active in [each for each in self.running if each.handle.request.background]:
            self.end(active)
            self.prewarms.put_back(active)

    # -- start
    # ----------------------------------------------------------------------------------

    def admit(self) -> None:
        """Start or resume waiting requests, if something has changed since the last time, or reads
        may be ready.
        """
        if not self.waiting:
            return
        is_due = not self.running or self._changed.is_set()
        if not is_due and all(active.reads is None for active in self.waiting):
            return
        self._changed.clear()
        for active in self.waiting.take_cancelled():
            self.end(active)
        while not (self._is_over_committed and self.running):
            started = self.waiting.take_next(self.occupancy)
            if started is None:
                break
            if started.suspended_snapshot is not None:
                self._resume(started)
            else:
                self._begin(started)
            self.mark_shared()
        self._report_places()

    def _report_places(self) -> None:
        """Send the place of each waiting request whose place has changed, for clients that show
        progress.
        """
        for position, active in enumerate(self.waiting.expected_order(), 1):
            if active.turn.queue_position != position:
                active.turn.queue_position = position
                _report_place(active)

    def _begin(self, active: ActiveRequest) -> None:
        """Start a request on the free sequence with the highest gain."""
        request = active.handle.request
        active.seq = self.cells.values.best(
            self.occupancy.free_for(active),
            request.prompt,
            clears=self._clears and not self.running,
            in_blocks=not request.may_read_prompts,
        )
        self._n_begun += 1
        self._n_restorable.pop(active, None)
        active.id = self._n_begun
        active.ran_concurrently = False
        active.turn.queue_position = 0
        if request.seq >= 0:
            self.occupancy.named.add(active.seq.id)
        else:
            self.occupancy.named.discard(active.seq.id)
        self.occupancy.last[active.seq.id] = active
        self.running.append(active)

    def give_all_cells(self, lookup: CacheLookup) -> None:
        """Give all cells to a request that runs alone, so that its cost and its reply do not depend
        on earlier ones.
        """
        if len(self.running) == 1 and self._clears:
            with self._prefix_cache.cache.locked(*lookup.snapshots):
                self.cells.clear_idle(named=self._settings.exact)
            for seq in self.occupancy.sequences:
                seq.shares = False

    def mark_shared(self) -> None:
        """Mark, with --exact, sequences that share the context with others: the cache must not
        reuse their new rows.

        Attention sums in cell order, so result bits depend on the cells of other sequences.
        """
        if not self._settings.exact:
            return
        sequences = self.occupancy.sequences
        holding = [seq for seq in sequences if seq.n or self.occupancy.owner(seq) is not None]
        if len(holding) > 1:
            for seq in holding:
                seq.shares = True

    @property
    def _clears(self) -> bool:
        """Return whether a request that runs alone gets all cells."""
        if self._settings.exact:
            return True
        return self._settings.clear_idle and self._prefix_cache.cache.enabled

    # -- suspend and resume
    # ----------------------------------------------------------------------------------

    def fit_decoding(self, decoding: Sequence[ActiveRequest]) -> tuple[list[ActiveRequest], int]:
        """Suspend the youngest requests until the tokens of ``decoding`` fit in addition to all
        prompts.

        Returns the remaining requests of ``decoding``, and the cells left for drafts.
        """
        staying = list(decoding)
        while True:
            n_new = sum([len(active.pending or ()) for active in staying])
            n_needed = sum([active.n_needed for active in self.running])
            n_free = self.cells.n_cells - n_new - n_needed
            if n_free >= 0 or len(self.running) == 1:
                self.cells.make_room(n_new)
                return staying, n_free
            youngest = self._youngest()
            staying = [active for active in staying if active is not youngest]
            self.suspend(youngest)

    def yield_cells(self, error: OutOfCellsError) -> None:
        """After ``error``, suspend the youngest request and start no other until one ends.

        A request that runs alone ends with ``error``.
        """
        if len(self.running) == 1:
            return self.fail(self.running[0], error)
        self._is_over_committed = True
        self.suspend(self._youngest())

    def _make_way(self) -> None:
        """Suspend the replies that give way to a prompt; one that cannot be saved goes on."""
        if self._is_over_committed:
            return  # no request would start in their place
        for active in self.waiting.replies_to_suspend(self.occupancy):
            active.handle.release()
            try:
                self._move_to_ram(active, "room for a prompt")
            except (EngineError, MemoryError) as error:
                log.warning("request %d resumes before others: %s", active.id, error)
                active.turn.keeps_cells = True
                return
            active.ran_concurrently = True  # its times include the prompt's

    def suspend(self, active: ActiveRequest) -> None:
        """Suspend a running request: save its sequence to RAM and keep its generator."""
        active.handle.release()
        seq = active.seq
        assert seq is not None
        has_evaluated = active.stats is not None and active.reads is None and seq.n > 0
        if not has_evaluated:
            self._return_unstarted(active)
            return
        try:
            self._move_to_ram(active, "context is full")
        except (EngineError, MemoryError) as error:
            log.warning("cannot suspend request %d: %s", active.id, error)
            self.fail(active, OutOfCellsError())

    def _move_to_ram(self, active: ActiveRequest, reason: str) -> None:
        """Move a started request to the suspended ones; EngineError or MemoryError changes
        nothing.
        """
        seq = active.seq
        assert seq is not None
        active.suspended_snapshot = self._prefix_cache.saver.suspend(seq)
        if seq.shares:
            seq.batch_ends = []  # it resumes in other cells
        self._counters.n_suspended += 1
        n = f"{seq.n:,}"
        log.info("suspend      %7s tokens saved: %s  request %d", n, reason, active.id)
        self._detach(active, seq)

    def _end_turn(self) -> None:
        """Park the running request if its turn is over; it continues from the same bits in a later
        turn.
        """
        active = self.waiting.must_yield(self.running)
        if active is None:
            return
        if active.reads is not None:
            self._stop_reading(active)
            return
        seq = active.seq
        assert seq is not None
        if not self._backend.memory.shape.resume_points.contains(seq.n):
            return  # a restore here changes bits; a few tokens later it may not
        active.handle.release()
        try:
            active.suspended_snapshot = self._prefix_cache.saver.suspend(seq, frees_cells=False)
        except (EngineError, MemoryError) as error:
            log.warning("request %d resumes before others: %s", active.id, error)
            active.turn.started = math.inf
            return
        self._counters.n_turns_yielded += 1
        active.ran_concurrently = True  # its times include other requests'
        self._detach(active, seq)

    def _stop_reading(self, active: ActiveRequest) -> None:
        """Return a request that reads from disk to the end of the queue; it starts anew."""
        self._counters.n_turns_yielded += 1
        active.turn.has_stopped_reading = True
        self._n_arrived += 1
        active.arrived = self._n_arrived
        self._return_unstarted(active)

    def _return_unstarted(self, active: ActiveRequest) -> None:
        """Move a running request to the waiting ones; it starts anew."""
        self.running.remove(active)
        active.reset()
        self.waiting.put_back(active)
        self._changed.set()

    def _detach(self, active: ActiveRequest, seq: LiveSequence) -> None:
        """Move a request with ``suspended_snapshot`` set to the waiting ones, with its ``seq``; an
        empty sequence replaces that.
        """
        self.running.remove(active)
        self.occupancy.sequences[seq.id] = LiveSequence(seq.id, seq.capacity)
        self.occupancy.last.pop(seq.id, None)
        self.waiting.put_back(active)
        self._changed.set()

    def _resume(self, active: ActiveRequest) -> None:
        """Restore a suspended request to a free sequence."""
        seq = active.seq
        suspended = active.suspended_snapshot
        assert seq is not None
        assert suspended is not None
        free = self._cheapest_free(active)
        self._prefix_cache.park(free)
        if self._settings.exact:
            self.cells.clear_idle()  # so that its rows are in the cells of a run that is alone
        self.cells.make_room(seq.n, self._prefix_cache.device.n_ready(suspended, 0, suspended.n))
        active.turn.queue_position = 0
        seq.id = free.id
        self.occupancy.sequences[free.id] = seq
        self.occupancy.last[free.id] = active
        self.running.append(active)
        try:
            self._prefix_cache.saver.resume(seq, suspended)
        except OutOfCellsError as error:
            self._backend.memory.clear(seq.id)
            self._retry_resume(active, seq, error)
        except Exception as error:
            self.fail(active, error)
        else:
            active.suspended_snapshot = None

    def _cheapest_free(self, active: ActiveRequest) -> LiveSequence:
        """Return the free sequence for ``active`` whose contents are worth least, of equal ones the
        one that was used least recently.
        """
        occupancy = self.occupancy
        loss = self.cells.values.loss_if_truncated
        free = occupancy.free_for(active)
        return min(free, key=lambda seq: (loss(seq), occupancy.used(seq)))

    def _retry_resume(
        self, active: ActiveRequest, seq: LiveSequence, error: OutOfCellsError
    ) -> None:
        """Let a request wait again that found too few cells; it ends if no more can be freed."""
        has_freed = self.cells.empty()
        if not has_freed and len(self.running) == 1:
            self.fail(active, error)
            return
        if not has_freed:
            self._is_over_committed = True
        self._detach(active, seq)

    def _youngest(self) -> ActiveRequest:
        return max(self.running, key=lambda active: active.arrived)

    # -- end
    # ----------------------------------------------------------------------------------

    def end(self, active: ActiveRequest) -> None:
        """End a request at once and free its sequence."""
        active.handle.release()
        if active.steps is not None:
            active.steps.close()
        if active.suspended_snapshot is not None:
            self._prefix_cache.cache.release(active.suspended_snapshot)
            active.suspended_snapshot = None
        if active in self.running:
            self.running.remove(active)
        if not active.handle.request.background:
            self.prewarms.ended()
        self._changed.set()
        self._is_over_committed = False

    def fail(self, active: ActiveRequest, error: Exception) -> None:
        """End a request with ``error`` and empty its sequence, whose contents are undefined."""
        if active.stats is not None and active.seq is not None:
            self._prefix_cache.forget(active.seq)
        self.end(active)
        active.handle.put(Failed(as_client_error(error)))

    def end_all(self, error: PyctlError) -> None:
        """End all requests with ``error``."""
        for active in [*self.running, *self.waiting, *self.prewarms.clear()]:
            with contextlib.suppress(Exception):
                self.end(active)
            active.handle.put(Failed(error))
        self.running.clear()
        self.waiting.clear()


def _report_place(active: ActiveRequest) -> None:
    """Send the place of a waiting request, if its client shows progress and has no text yet."""
    if not active.handle.request.return_progress or active.pending is not None:
        return
    progress = Progress(
        n_prompt=len(active.handle.request.prompt),
        n_cached=0,
        n_processed=0,
        ms=(time.perf_counter() - active.submitted) * 1e3,
        source="none",
        queue_position=active.turn.queue_position,
    )
    if active.stats is not None and active.seq is not None:  # it is suspended
        progress = replace(
            progress,
            n_cached=active.stats.n_cached,
            n_processed=active.seq.n,
            source=active.stats.source,
        )
    active.handle.put(progress)
