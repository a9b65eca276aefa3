"""A request on its way through the engine, and tasks that wait between requests."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.disk.readers import Reads
from pyctl.cache.disk_tier import DiskTier
from pyctl.cache.plan import batch_ends
from pyctl.cache.ram import RamCache
from pyctl.engine.backend import Backend, SequenceTokens
from pyctl.engine.decode import Drafter, Generation, PendingTokens
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.engine_stats import EngineCounters, PrefillLog
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Progress, Timings
from pyctl.engine.sequence import LiveSequence
from pyctl.engine.snapshotter import CachePlan, Snapshotter
from pyctl.errors import EngineError, PyctlError

__all__ = ["ActiveRequest", "Engine", "EngineSettings", "IdleTask", "Steps", "told"]


Steps: TypeAlias = Generator[PendingTokens | Reads | None, int, None]

"""None after a prefill batch, PendingTokens while decoding, Reads while the disk is read."""

WAIT_SECONDS = 0.005
"""For how long a step waits for the disk when there is nothing else to do; what arrives meanwhile waits, too."""


@dataclass(eq=False)
class ActiveRequest:
    """A request on its way, the sequence that serves it, and the generator that does.

    ``id`` counts up; ``stats`` is there as soon as the work has begun. ``submitted`` and ``started`` are seconds of the
    performance counter.
    """

    handle: RequestHandle
    id: int = -1
    stats: RequestStats | None = None
    submitted: float = field(default_factory=time.perf_counter)
    seq: LiveSequence | None = None
    steps: Steps | None = None
    pending: PendingTokens | None = None
    reads: Reads | None = None
    started: float = 0.0


@dataclass(eq=False)
class IdleTask:
    """Something to do with sequence ``seq`` as soon as no request owns it; ``fail`` is called if that never comes."""

    seq: int
    run: Callable[[], None]
    fail: Callable[[PyctlError], None]


log = logging.getLogger(__name__)


def told(error: Exception) -> PyctlError:
    """What a request that ``error`` ended is told; one that nobody raised on purpose is logged."""
    if isinstance(error, PyctlError):
        return error
    log.error("unexpected error", exc_info=error)
    return EngineError(f"internal error: {str(error) or type(error).__name__}")


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
        drafter: Callable[[LiveSequence], Drafter] | None = None,
    ) -> None:
        self.backend = backend
        self.settings = settings
        self.snapshotter = Snapshotter(backend, cache, settings, disk)
        self.sequences = [LiveSequence(i, backend.n_ctx) for i in range(backend.n_seqs)]
        self.queue: deque[ActiveRequest] = deque()
        self.running: list[ActiveRequest] = []
        self.last: dict[int, ActiveRequest] = {}  # of each sequence, the request that it serves or served
        self.idle_tasks: list[IdleTask] = []
        self.counters = EngineCounters()
        self.asleep = False
        self._drafter = drafter
        self._count = 0

    # -- scheduling --------------------------------------------------------------------------------------------------

    def submit(self, handle: RequestHandle) -> None:
        """Queue a request."""
        self.queue.append(ActiveRequest(handle))

    def when_idle(self, task: IdleTask) -> None:
        """Have ``task`` done when its sequence is free, before the next request gets it."""
        self.idle_tasks.append(task)

    def step(self) -> bool:
        """Advance everybody once: one batch for the first request in prefill, one token for all that decode.

        Returns whether work is left.
        """
        if self.idle_tasks:
            self._run_idle_tasks()
        if self.queue:
            self._admit()
        prefilling: ActiveRequest | None = None
        decoding = []
        for active in tuple(self.running):
            if active.handle.cancelled:
                self._end(active)
            elif active.pending is not None:
                decoding.append(active)
            elif active.reads is None or active.reads.ready():
                prefilling = prefilling or active
        if prefilling is not None:
            self._resume(prefilling, None)
            if prefilling.pending is not None and prefilling in self.running:
                decoding.append(prefilling)
        if decoding:
            self._decode(decoding)
        elif prefilling is None:
            waiting = [active.reads for active in self.running if active.reads is not None]
            if waiting:
                waiting[0].wait(WAIT_SECONDS)
        return bool(self.running or self.queue or self.idle_tasks)

    def recover(self, error: PyctlError) -> None:
        """A step broke off, nobody knows where: fail all requests with ``error``, forget what the sequences hold."""
        for active in [*self.running, *self.queue]:
            with contextlib.suppress(Exception):
                self._end(active)
            active.handle.put(Failed(error))
        self.running.clear()
        self.queue.clear()
        for seq in self.sequences:
            seq.busy = False
            self.snapshotter.forget(seq)

    def sleep(self) -> None:
        """Free the model, after the ends of all conversations went to the cache; nothing may be running."""
        for seq in self.sequences:
            try:
                self.snapshotter.park(seq)
            except Exception:
                log.exception("the end of a conversation could not be saved")
                self.snapshotter.forget(seq)
        self.backend.synchronize()
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
        for active in [*self.running, *self.queue]:
            if active.steps is not None:
                self._end(active)
            active.handle.put(Failed(reason))
        for task in self.idle_tasks:
            task.fail(reason)
        self.queue.clear()
        return self.snapshotter.close()

    def _run_idle_tasks(self) -> None:
        ready = [task for task in self.idle_tasks if not self.sequences[task.seq].busy]
        self.idle_tasks = [task for task in self.idle_tasks if task not in ready]
        for task in ready:
            task.run()

    def _admit(self) -> None:
        for active in tuple(self.queue):
            if all(seq.busy for seq in self.sequences):
                return
            if active.handle.cancelled:
                self.queue.remove(active)
                continue
            wanted = active.handle.request.seq
            idle = [seq for seq in self.sequences if not seq.busy and wanted in (-1, seq.id)]
            if not idle:
                continue  # a later one may want another sequence
            self.queue.remove(active)
            prompt = active.handle.request.prompt.tokens
            # The sequence that already holds most of the prompt, else the one that was not used for longest.
            active.seq = max(idle, key=lambda seq: (seq.shared(prompt), -seq.used))
            self._count += 1
            active.seq.busy, active.seq.used, active.id = True, self._count, self._count
            self.last[active.seq.id] = active
            active.steps = self._serve(active, active.seq)
            self.running.append(active)

    def _resume(self, active: ActiveRequest, index: int | None) -> None:
        assert active.steps is not None
        try:
            step = next(active.steps) if index is None else active.steps.send(index)
            active.reads = step if isinstance(step, Reads) else None
            active.pending = None if isinstance(step, Reads) else step
        except StopIteration:
            self._end(active)
        except Exception as error:
            self._forget(active.seq)
            self._end(active)
            active.handle.put(Failed(told(error)))

    def _decode(self, requests: list[ActiveRequest]) -> None:
        items, longest = [], 0
        for active in requests:
            assert active.seq is not None
            assert active.pending is not None
            tokens, position = active.pending
            items.append(SequenceTokens(active.seq.id, tokens, position))
            longest = max(longest, position + len(tokens))
        try:
            self.backend.decode(items)
        except Exception as error:
            for active in requests:
                self._forget(active.seq)
                self._end(active)
                active.handle.put(Failed(told(error)))
            return
        self.counters.count_call(len(items), longest)
        output = 0
        for active, item in zip(requests, items, strict=True):
            self._resume(active, output)
            output += len(item.tokens)

    def _end(self, active: ActiveRequest) -> None:
        if active.steps is not None:
            active.steps.close()
        if active.seq is not None:
            active.seq.busy = False
        if active in self.running:
            self.running.remove(active)

    def _forget(self, seq: LiveSequence | None) -> None:
        """After a failure nobody knows what the sequence holds."""
        if seq is not None:
            self.snapshotter.forget(seq)

    # -- one request -------------------------------------------------------------------------------------------------

    def _serve(self, active: ActiveRequest, seq: LiveSequence) -> Steps:
        """The whole way of a request."""
        snapshotter, request, handle = self.snapshotter, active.handle.request, active.handle
        started = active.started = time.perf_counter()
        stats = active.stats = RequestStats(n_prompt=len(request.prompt))
        ends = batch_ends(request.prompt, self.backend.n_ubatch, self.settings.min_batch)

        lookup = snapshotter.lookup(request, ends, seq, stats)
        snapshotter.leave(seq, lookup, stats)
        restored = yield from snapshotter.restore(lookup, seq, stats)
        plan = snapshotter.plan(lookup, restored, seq, stats)
        yield from self._prefill(active, seq, ends, plan, stats)
        with Generation(self.backend, handle, seq, self._drafter(seq) if self._drafter else None) as reply:
            reply.first()
            snapshotter.persist(plan)
            yield from reply.rest()

        finished = time.perf_counter()
        first_token = reply.first_token or finished
        timings = Timings(
            n_cached=stats.n_cached,
            n_evaluated=stats.n_evaluated,
            prompt_ms=(first_token - started) * 1e3,
            n_predicted=reply.n_predicted,
            predicted_ms=(finished - first_token) * 1e3,
            queue_ms=(started - active.submitted) * 1e3,
            first_token_ms=(first_token - active.submitted) * 1e3,
        )
        snapshotter.totals.add(stats, reply.n_predicted)
        self.counters.count_reply(timings)
        handle.put(Done(reply.stop_type, reply.stopping_word, timings, stats, seq.id))

    def _prefill(
        self, active: ActiveRequest, seq: LiveSequence, ends: Sequence[int], plan: CachePlan, stats: RequestStats
    ) -> Steps:
        """Evaluate what is missing of the prompt batch by batch, and take a snapshot at each cut."""
        prompt, tokens = active.handle.request.prompt, active.handle.request.prompt.tokens
        began, save_before = time.perf_counter(), stats.save_ms
        shown = PrefillLog(active.id, seq.n, len(prompt))
        self._tell_progress(active, seq, stats)
        for previous, end in itertools.pairwise([0, *ends]):
            if end <= seq.n:
                continue
            self.backend.evaluate(seq.id, tokens[seq.n : end], seq.n, output=end == len(prompt))
            self.counters.count_call(1, end)
            # The very end of a prompt is a batch end of longer prompts only if it fills its batch.
            seq.append(tokens[seq.n : end], exact=end < len(prompt) or end - previous == self.backend.n_ubatch)
            shown.reached(end)
            if end in plan.cuts:
                self.snapshotter.save(seq, plan, stats)
            self._tell_progress(active, seq, stats)
            if end < len(prompt):
                yield None
        stats.n_evaluated = len(prompt) - stats.n_cached
        stats.prefill_ms = (time.perf_counter() - began) * 1e3 - (stats.save_ms - save_before)

    def _tell_progress(self, active: ActiveRequest, seq: LiveSequence, stats: RequestStats) -> None:
        if active.handle.request.return_progress:
            ms = (time.perf_counter() - active.started) * 1e3
            active.handle.put(Progress(stats.n_prompt, stats.n_cached, seq.n, ms, stats.source, seq.id))
