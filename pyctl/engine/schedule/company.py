"""Requests that are served side by side: who has which sequence, who waits for cells, who goes on."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

from pyctl.cache import CacheLookup, LiveSequence, PrefixCache
from pyctl.engine.backend import Backend
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.engine_stats import EngineCounters
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Failed, told
from pyctl.engine.schedule.admission import ActiveRequest, Admission
from pyctl.engine.schedule.cells import CellPool
from pyctl.errors import EngineError, OutOfCellsError, PyctlError

__all__ = ["Company"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
"""Who waits is looked at when something has changed, and this often for those that nobody waits for any more."""


class Company:
    """Those that are ``running``, each on one of ``sequences``, and those that are ``waiting`` to begin or to go on.

    All share ``cells``. Where they are short, the youngest is suspended: it waits as it is, with all that its sequence
    held. ``last`` is, of each sequence, the request that it serves or served. ``on_end`` is called when a client's
    request is over, to be set by who needs it.
    """

    def __init__(
        self, backend: Backend, settings: EngineSettings, prefix_cache: PrefixCache, counters: EngineCounters
    ) -> None:
        self.sequences = [LiveSequence(i, backend.n_ctx) for i in range(backend.n_seqs)]
        self.cells = CellPool(self.sequences, backend.n_cells, prefix_cache)
        self.waiting = Admission(backend.n_cells, backend.n_ctx)
        self.running: list[ActiveRequest] = []
        self.last: dict[int, ActiveRequest] = {}
        self.on_end: Callable[[], None] = lambda: None
        self._backend, self._settings = backend, settings
        self._prefix_cache = prefix_cache
        self._counters = counters
        self._n_arrived = 0
        self._n_begun = 0
        self._look_again = 0.0  # when to look at who waits, unless something changes before
        self._overrun = False  # the context had fewer cells than were counted: nobody begins until somebody ends

    # -- who begins --------------------------------------------------------------------------------------------------

    def arrive(self, handle: RequestHandle) -> None:
        """Let a request wait for its turn."""
        self._n_arrived += 1
        self.waiting.put_back(ActiveRequest(handle, self._n_arrived))
        self._look_again = 0.0

    def admit(self, begin: Callable[[ActiveRequest], None]) -> None:
        """Let those go on, or ``begin``, whose turn it is; looks only if something has changed or some time passed."""
        if not self.waiting or (self.running and time.monotonic() < self._look_again):
            return
        self._look_again = time.monotonic() + LOOK_SECONDS
        for active in self.waiting.take_cancelled():
            self.end(active)
        while not (self._overrun and self.running):
            found = self.waiting.take_next(self.running, self.sequences)
            if found is None:
                return
            if found.kept is not None:
                self._go_on(found)
            else:
                begin(found)
            self.note_shared()

    def begin(self, active: ActiveRequest) -> LiveSequence:
        """Let a request run on the free sequence where that gains most."""
        idle = filter(active.may_use, self.sequences)
        clears = self._clears and not self.running
        seq = active.seq = self.cells.worth.best(idle, active.handle.request.prompt, clears=clears)
        self._n_begun += 1
        seq.busy = seq.left_over = True
        seq.used = active.id = self._n_begun
        seq.named = active.handle.request.seq >= 0
        self.last[seq.id] = active
        self.running.append(active)
        return seq

    def give_all_cells(self, lookup: CacheLookup) -> None:
        """A request that is served alone gets all cells: it then costs and yields what it does alone."""
        if len(self.running) == 1 and self._clears:
            with self._prefix_cache.cache.locked(*lookup.snapshots):
                self.cells.clear_idle(named=self._settings.exact)
            for seq in self.sequences:
                seq.shares = False

    def note_shared(self) -> None:
        """With --exact, note where several sequences take cells: from now on nothing of them is to be resumed.

        Attention sums in the order of cells. So bits depend on which cells others take, even between two batches.
        """
        holding = [seq for seq in self.sequences if seq.n or seq.busy]
        if self._settings.exact and len(holding) > 1:
            for seq in holding:
                seq.shares = True

    @property
    def _clears(self) -> bool:
        return self._settings.exact or (self._settings.clear_idle and self._prefix_cache.cache.enabled)

    # -- who makes way -----------------------------------------------------------------------------------------------

    def with_room(self, decoding: Sequence[ActiveRequest]) -> tuple[list[ActiveRequest], int]:
        """Those of ``decoding`` for whose tokens there are cells beside all prompts, and how many are left for drafts.

        The youngest have to wait.
        """
        staying = list(decoding)
        while True:
            n_new = sum(active.n_pending for active in staying)
            n_free = self.cells.n_cells - n_new - sum(each.n_needed for each in self.running)
            if n_free >= 0 or len(self.running) == 1:
                self.cells.make_room(n_new)
                return staying, n_free
            youngest = self._youngest()
            staying = [active for active in staying if active is not youngest]
            self.suspend(youngest)

    def suspend_youngest(self) -> ActiveRequest:
        """There were fewer cells than were counted: let the youngest wait, and nobody begin until somebody ends."""
        self._overrun = True
        self.suspend(youngest := self._youngest())
        return youngest

    def suspend(self, active: ActiveRequest) -> None:
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
            self.waiting.put_back(active)
            return
        try:
            active.kept = self._prefix_cache.suspend(seq)
        except (EngineError, MemoryError) as error:
            log.warning("request %d could not be suspended: %s", active.id, error)
            self.fail(active, OutOfCellsError())
            return
        if seq.shares:
            seq.ends = []  # it will come back to other cells
        self._counters.n_suspended += 1
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
        idle = filter(active.may_use, self.sequences)
        free = min(idle, key=lambda seq: (self.cells.worth.left(seq), seq.used))
        self._prefix_cache.park(free)
        self.cells.make_room(seq.n)
        seq.id, self.sequences[free.id], self.last[free.id] = free.id, seq, active
        self.running.append(active)
        try:
            self._prefix_cache.resume(seq, kept)
        except OutOfCellsError as error:
            self._backend.clear(seq.id)
            if self.cells.empty():
                self._detach(active, seq)
            elif len(self.running) == 1:
                self.fail(active, error)
            else:
                self._overrun = True
                self._detach(active, seq)
        except Exception as error:
            self.fail(active, error)
        else:
            active.kept = None

    def _youngest(self) -> ActiveRequest:
        return max(self.running, key=lambda active: active.arrived)

    # -- who ends ----------------------------------------------------------------------------------------------------

    def end(self, active: ActiveRequest) -> None:
        """Let nothing of a request go on; its sequence is free."""
        active.handle.release()
        if active.steps is not None:
            active.steps.close()
        if active.kept is not None:
            self._prefix_cache.release(active.kept)
            active.kept = None
        if active.seq is not None:
            active.seq.busy = active.seq.left_over = False
        if active in self.running:
            self.running.remove(active)
        if not active.handle.request.background:
            self.on_end()
        self._look_again = 0.0
        self._overrun = False

    def fail(self, active: ActiveRequest, error: Exception) -> None:
        """End a request with ``error``, and forget what its sequence holds, which nobody knows."""
        if active.stats is not None and active.seq is not None:
            self._prefix_cache.forget(active.seq)
        self.end(active)
        active.handle.put(Failed(told(error)))

    def end_all(self, others: Sequence[ActiveRequest], error: PyctlError) -> None:
        """End all, and ``others`` that are neither running nor waiting, with ``error``."""
        for active in [*self.running, *self.waiting, *others]:
            with contextlib.suppress(Exception):
                self.end(active)
            active.handle.put(Failed(error))
        self.running.clear()
        self.waiting.clear()
