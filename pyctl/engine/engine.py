"""A request on its way through the engine, and errands that wait between requests."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.disk_tier import DiskTier
from pyctl.cache.plan import batch_ends
from pyctl.cache.ram import RamCache
from pyctl.engine.backend import Backend, TopTokens
from pyctl.engine.engine_stats import EngineCounters, PrefillLog
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Piece, Progress, StopType, Timings
from pyctl.engine.sequence import LiveSequence
from pyctl.engine.snapshotter import CachePlan, EngineOptions, Snapshotter
from pyctl.engine.stream import LineLimits, ReasoningBudget, TextStream
from pyctl.errors import EngineError, PyctlError

__all__ = ["ActiveRequest", "Engine", "EngineOptions", "IdleTask", "NextToken", "Steps"]


class NextToken(NamedTuple):
    """A job waits for its ``token`` to be evaluated at ``position``; it is resumed with the output's index."""

    token: int
    position: int


Steps: TypeAlias = Generator[NextToken | None, int, None]

"""None after a prefill batch, NextToken while decoding."""


@dataclass(eq=False)
class ActiveRequest:
    """A request on its way, the sequence that serves it, and the generator that does.

    ``id`` counts up; ``report`` is there as soon as the work has begun.
    """

    ticket: RequestHandle
    id: int = -1
    report: RequestStats | None = None
    submitted: float = field(default_factory=time.perf_counter)
    seq: LiveSequence | None = None
    steps: Steps | None = None
    wants: NextToken | None = None
    first_token: float = 0.0


@dataclass(eq=False)
class IdleTask:
    """Something to do with sequence ``seq`` as soon as no job owns it; ``fail`` is called if that never comes."""

    seq: int
    run: Callable[[], None]
    fail: Callable[[PyctlError], None]


log = logging.getLogger(__name__)


class Engine:
    """Serves jobs on the sequences of one backend, restoring from and saving to ``cache`` and ``disk``.

    Not thread-safe; `Worker` runs it on a thread of its own.
    """

    def __init__(self, backend: Backend, cache: RamCache, options: EngineOptions, disk: DiskTier | None = None) -> None:
        self.backend = backend
        self.options = options
        self.keeper = Snapshotter(backend, cache, options, disk)
        self.seqs = [LiveSequence(i, backend.n_ctx) for i in range(backend.n_seqs)]
        self.queue: deque[ActiveRequest] = deque()
        self.running: list[ActiveRequest] = []
        self.last: dict[int, ActiveRequest] = {}  # of each sequence, the job that it serves or served
        self.errands: list[IdleTask] = []
        self.meter = EngineCounters()
        self.asleep = False
        self._count = 0

    # -- scheduling --------------------------------------------------------------------------------------------------

    def submit(self, ticket: RequestHandle) -> None:
        """Queue a request."""
        self.queue.append(ActiveRequest(ticket))

    def when_idle(self, errand: IdleTask) -> None:
        """Have ``errand`` done when its sequence is free, before the next job gets it."""
        self.errands.append(errand)

    def step(self) -> bool:
        """Advance everybody once: one batch for the first job in prefill, one token for all that decode.

        Returns whether work is left.
        """
        if self.errands:
            self._run_errands()
        if self.queue:
            self._admit()
        prefilling: ActiveRequest | None = None
        decoding = []
        for job in tuple(self.running):
            if job.ticket.cancelled:
                self._end(job)
            elif job.wants is not None:
                decoding.append(job)
            else:
                prefilling = prefilling or job
        if prefilling is not None:
            self._resume(prefilling, None)
            if prefilling.wants is not None and prefilling in self.running:
                decoding.append(prefilling)
        if decoding:
            self._decode(decoding)
        return bool(self.running or self.queue or self.errands)

    def sleep(self) -> None:
        """Free the model, after the ends of all conversations went to the cache; nothing may be running."""
        for seq in self.seqs:
            self.keeper.park(seq)
        self.backend.settle()
        self.backend.close()
        self.asleep = True
        log.info("idle: the model is freed until the next request")

    def wake(self) -> None:
        """Load the model again if it was freed; ModelError when that fails."""
        if self.asleep:
            began = time.perf_counter()
            self.backend.open()
            self.asleep = False
            log.info("the model is loaded again after %.1f s", time.perf_counter() - began)

    def close(self, reason: PyctlError) -> None:
        """End all jobs with ``reason``."""
        for job in [*self.running, *self.queue]:
            if job.steps is not None:
                self._end(job)
            job.ticket.put(Failed(reason))
        for errand in self.errands:
            errand.fail(reason)
        self.queue.clear()
        self.keeper.close()

    def _run_errands(self) -> None:
        ready = [errand for errand in self.errands if not self.seqs[errand.seq].busy]
        self.errands = [errand for errand in self.errands if errand not in ready]
        for errand in ready:
            errand.run()

    def _admit(self) -> None:
        for job in tuple(self.queue):
            if all(seq.busy for seq in self.seqs):
                return
            if job.ticket.cancelled:
                self.queue.remove(job)
                continue
            wanted = job.ticket.request.seq
            idle = [seq for seq in self.seqs if not seq.busy and wanted in (-1, seq.id)]
            if not idle:
                continue  # a later one may want another sequence
            self.queue.remove(job)
            prompt = job.ticket.request.prompt.tokens
            # The sequence that already holds most of the prompt, else the one that was not used for longest.
            job.seq = max(idle, key=lambda seq: (seq.shared(prompt), -seq.used))
            self._count += 1
            job.seq.busy, job.seq.used, job.id = True, self._count, self._count
            self.last[job.seq.id] = job
            job.steps = self._serve(job, job.seq)
            self.running.append(job)

    def _resume(self, job: ActiveRequest, index: int | None) -> None:
        assert job.steps is not None
        try:
            job.wants = next(job.steps) if index is None else job.steps.send(index)
        except StopIteration:
            self._end(job)
        except Exception as error:
            self._forget(job.seq)
            self._end(job)
            if not isinstance(error, PyctlError):
                log.exception("request failed")
                error = EngineError(f"internal error: {error}")
            job.ticket.put(Failed(error))

    def _decode(self, jobs: list[ActiveRequest]) -> None:
        items = [(job.seq.id, *job.wants) for job in jobs if job.seq is not None and job.wants is not None]
        try:
            self.backend.decode(items)
        except EngineError as error:
            for job in jobs:
                self._forget(job.seq)
                self._end(job)
                job.ticket.put(Failed(error))
            return
        self.meter.evaluated(len(items), max(position for _, _, position in items) + 1)
        for index, job in enumerate(jobs):
            self._resume(job, index)

    def _end(self, job: ActiveRequest) -> None:
        if job.steps is not None:
            job.steps.close()
        if job.seq is not None:
            job.seq.busy = False
        if job in self.running:
            self.running.remove(job)

    def _forget(self, seq: LiveSequence | None) -> None:
        """After a failure nobody knows what the sequence holds."""
        if seq is not None:
            self.keeper.forget(seq)

    # -- one request -------------------------------------------------------------------------------------------------

    def _serve(self, job: ActiveRequest, seq: LiveSequence) -> Steps:
        """The whole way of a request: restore, evaluate batch by batch, save at cuts, generate, report."""
        request, ticket = job.ticket.request, job.ticket
        prompt, tokens = request.prompt, request.prompt.tokens
        started = time.perf_counter()
        report = job.report = RequestStats(n_prompt=len(prompt))
        ends = batch_ends(prompt, self.backend.n_ubatch, self.options.min_batch)

        turn = self.keeper.restore(request, seq, ends, report)
        if request.return_progress:
            ticket.put(self._progress(seq, report, started))
        shown = PrefillLog(job.id, seq.n, len(prompt))
        prefill_began, save_before = time.perf_counter(), report.save_ms
        for previous, end in itertools.pairwise([0, *ends]):
            if end <= seq.n:
                continue
            self.backend.evaluate(seq.id, tokens[seq.n : end], seq.n, output=end == len(prompt))
            self.meter.evaluated(1, end)
            # The very end of a prompt is a batch end of longer prompts only if it fills its batch.
            seq.append(tokens[seq.n : end], exact=end < len(prompt) or end - previous == self.backend.n_ubatch)
            shown.reached(end)
            if end in turn.cuts:
                self.keeper.save(seq, turn, report)
            if request.return_progress:
                ticket.put(self._progress(seq, report, started))
            if end < len(prompt):
                yield None
        report.n_evaluated = len(prompt) - report.n_cached
        report.prefill_ms = (time.perf_counter() - prefill_began) * 1e3 - (report.save_ms - save_before)

        n_predicted, stop_type, stopping_word = yield from self._generate(job, seq, turn)
        if n_predicted <= 1:
            self.keeper.persist(turn)
        finished = time.perf_counter()
        first_token = job.first_token or finished
        timings = Timings(
            cache_n=report.n_cached,
            prompt_n=report.n_evaluated,
            prompt_ms=(first_token - started) * 1e3,
            predicted_n=n_predicted,
            predicted_ms=(finished - first_token) * 1e3,
            queue_ms=(started - job.submitted) * 1e3,
            first_token_ms=(first_token - job.submitted) * 1e3,
        )
        self.keeper.totals.add(report, n_predicted)
        self.meter.served(timings)
        ticket.put(Done(stop_type, stopping_word, timings, report, seq.id))

    def _progress(self, seq: LiveSequence, report: RequestStats, started: float) -> Progress:
        elapsed = (time.perf_counter() - started) * 1e3
        return Progress(report.n_prompt, report.n_cached, seq.n, elapsed, report.source, seq.id)

    def _generate(
        self, job: ActiveRequest, seq: LiveSequence, turn: CachePlan
    ) -> Generator[NextToken, int, tuple[int, StopType, str]]:
        """Sample, stream, evaluate, until the reply ends; the disk waits for the first token."""
        request, ticket, backend = job.ticket.request, job.ticket, self.backend
        room = backend.n_ctx - seq.n
        limit = room if request.max_tokens < 0 else min(request.max_tokens, room)
        text = TextStream(request.stop)
        lines = LineLimits(request.n_indent) if request.n_indent or request.max_ms else None
        budget = ReasoningBudget(request.reasoning, backend.piece) if request.reasoning is not None else None
        after_sampling = request.sampling.post_sampling_probs
        n_predicted = 0
        stop_type: StopType = "limit"
        if limit == 0:
            return 0, stop_type, ""
        sampler = backend.sampler(request.sampling, request.prompt.tokens)
        pending: list[int] = []
        probs: list[TopTokens] = []
        index = 0
        is_end, piece, put = backend.is_end, backend.piece, ticket.put
        try:
            while True:
                forced = budget.next() if budget is not None else None
                if forced is None:
                    token = sampler.sample(index)
                else:
                    token = forced
                    sampler.force(index, token)
                if budget is not None:
                    budget.saw(token)
                if n_predicted == 0:  # only now has the device done what it was given
                    job.first_token = time.perf_counter()
                n_predicted += 1
                if is_end(token):
                    stop_type = "eos"
                    break
                pending.append(token)
                if request.n_probs:
                    n = request.n_probs
                    probs.append(
                        sampler.top_tokens(token, n) if after_sampling else backend.top_tokens(index, token, n)
                    )
                final = text.feed(piece(token))
                if lines is not None:
                    final = lines.feed(final, 0 < request.max_ms < (time.perf_counter() - job.first_token) * 1e3)
                if text.stopping_word:
                    stop_type = "word"
                    ticket.put(Piece(final, tuple(pending), tuple(probs)))
                    pending, probs = [], []
                    break
                if final:
                    put(Piece(final, tuple(pending), tuple(probs)))
                    pending, probs = [], []
                if n_predicted >= limit or (lines is not None and lines.ended):
                    break
                if n_predicted == 1:
                    self.keeper.persist(turn)
                index = yield NextToken(token, seq.n)
                seq.append_one(token)
        finally:
            sampler.close()
        rest = text.flush() if lines is None or not lines.ended else ""
        if text.stopping_word:
            stop_type = "word"
        if rest or pending:
            ticket.put(Piece(rest, tuple(pending), tuple(probs)))
        return n_predicted, stop_type, text.stopping_word
