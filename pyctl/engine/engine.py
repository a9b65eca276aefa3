"""The engine: what happens to a request between its arrival and its last token.

It knows token ids and events, no text formats and no HTTP. One thread calls it. Each request is a generator that stops
wherever another sequence may run; `step` resumes them, one prefill batch and one decoded token for everybody at a time.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from pyctl.cache.compare import Comparison
from pyctl.cache.plan import MIN_BATCH, batch_ends, choose_cuts, ends_within, last_common_end, last_end
from pyctl.cache.ram import RamCache
from pyctl.cache.recent import RecentPrompts
from pyctl.cache.report import Miss, Report, Totals
from pyctl.cache.segment import Segment, Snapshot
from pyctl.engine.backend import Backend, TopTokens
from pyctl.engine.live import LiveSeq
from pyctl.engine.request import Done, Failed, Piece, Progress, Request, StopType, Timings
from pyctl.engine.restore import Candidate, candidates, restore
from pyctl.engine.stream import TextStream
from pyctl.engine.ticket import Ticket
from pyctl.errors import EngineError, PyctlError, StateError
from pyctl.prompt import Prompt, as_tokens

__all__ = ["Engine", "EngineOptions"]

log = logging.getLogger(__name__)

PARK_MIN = 64
"""Fewer new tokens than this are not worth a snapshot when a live sequence is given away."""


@dataclass(frozen=True)
class EngineOptions:
    """``min_batch``: see plan.MIN_BATCH. ``min_step``: tokens between the sparse cuts of a long stretch, 0 for none.

    ``exact``: reuse nothing that a cold run would not have computed the same way, generated text included.
    """

    min_batch: int = MIN_BATCH
    min_step: int = 8192
    exact: bool = False


class NextToken(NamedTuple):
    """A job waits for its ``token`` to be evaluated at ``position``; it is resumed with the output's index."""

    token: int
    position: int


Steps: TypeAlias = Generator[NextToken | None, int, None]
"""None after a prefill batch, NextToken while decoding."""


@dataclass(eq=False)
class Job:
    """A request on its way, the sequence that serves it, and the generator that does."""

    ticket: Ticket
    submitted: float = field(default_factory=time.perf_counter)
    seq: LiveSeq | None = None
    steps: Steps | None = None
    wants: NextToken | None = None


class Engine:
    """Serves jobs on the sequences of one backend, restoring from and saving to ``cache``.

    Not thread-safe; `Worker` runs it on a thread of its own.
    """

    def __init__(self, backend: Backend, cache: RamCache, options: EngineOptions) -> None:
        self.backend = backend
        self.cache = cache
        self.options = options
        self.seqs = [LiveSeq(i, backend.n_ctx) for i in range(backend.n_seqs)]
        self.recent = RecentPrompts()
        self.totals = Totals()
        self.queue: deque[Job] = deque()
        self.running: list[Job] = []
        self._count = 0

    # -- scheduling --------------------------------------------------------------------------------------------------

    def submit(self, ticket: Ticket) -> None:
        """Queue a request."""
        self.queue.append(Job(ticket))

    def step(self) -> bool:
        """Advance everybody once: one batch for the first job in prefill, one token for all that decode.

        Returns whether work is left.
        """
        if self.queue:
            self._admit()
        prefilling: Job | None = None
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
        return bool(self.running or self.queue)

    def close(self, reason: PyctlError) -> None:
        """End all jobs with ``reason``."""
        for job in [*self.running, *self.queue]:
            if job.steps is not None:
                self._end(job)
            job.ticket.put(Failed(reason))
        self.queue.clear()

    def _admit(self) -> None:
        while self.queue:
            job = self.queue[0]
            if job.ticket.cancelled:
                self.queue.popleft()
                continue
            idle = [seq for seq in self.seqs if not seq.busy]
            if not idle:
                return
            self.queue.popleft()
            prompt = job.ticket.request.prompt.tokens
            # The sequence that already holds most of the prompt, else the one that was not used for longest.
            job.seq = max(idle, key=lambda seq: (seq.shared(prompt), -seq.used))
            self._count += 1
            job.seq.busy, job.seq.used = True, self._count
            job.steps = self._serve(job, job.seq)
            self.running.append(job)

    def _resume(self, job: Job, index: int | None) -> None:
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

    def _decode(self, jobs: list[Job]) -> None:
        items = [(job.seq.id, *job.wants) for job in jobs if job.seq and job.wants]
        try:
            self.backend.decode(items)
        except EngineError as error:
            for job in jobs:
                self._forget(job.seq)
                self._end(job)
                job.ticket.put(Failed(error))
            return
        for index, job in enumerate(jobs):
            self._resume(job, index)

    def _end(self, job: Job) -> None:
        if job.steps is not None:
            job.steps.close()
        if job.seq is not None:
            job.seq.busy = False
        if job in self.running:
            self.running.remove(job)

    def _forget(self, seq: LiveSeq | None) -> None:
        """After a failure nobody knows what the sequence holds."""
        if seq is not None:
            self.backend.clear(seq.id)
            seq.reset(as_tokens([]))

    # -- one request -------------------------------------------------------------------------------------------------

    def _serve(self, job: Job, seq: LiveSeq) -> Steps:
        """The whole way of a request; see DESIGN 3 for the steps."""
        request, ticket = job.ticket.request, job.ticket
        prompt, tokens = request.prompt, request.prompt.tokens
        started = time.perf_counter()
        report = Report(n_prompt=len(prompt))
        ends = batch_ends(prompt, self.backend.n_ubatch, self.options.min_batch)

        known = Comparison(tokens)
        used, branch = self._restore(request, known, seq, ends, report)
        cuts: list[int] = []
        if request.cache_prompt:
            cuts = choose_cuts(prompt, ends, seq.n, self.options.min_step, branch)
            self._expect(seq, cuts)
        if request.return_progress:
            ticket.put(self._progress(seq, report, started))
        prefill_began, save_before = time.perf_counter(), report.save_ms
        for previous, end in itertools.pairwise([0, *ends]):
            if end <= seq.n:
                continue
            self.backend.evaluate(seq.id, tokens[seq.n : end], seq.n)
            # The very end of a prompt is a batch end of longer prompts only if it fills its batch.
            seq.append(tokens[seq.n : end], exact=end < len(prompt) or end - previous == self.backend.n_ubatch)
            if end in cuts:
                self._save(seq, known, used, report)
                self._expect(seq, cuts)
            if request.return_progress:
                ticket.put(self._progress(seq, report, started))
            if end < len(prompt):
                yield None
        report.n_evaluated = len(prompt) - report.n_cached
        report.prefill_ms = (time.perf_counter() - prefill_began) * 1e3 - (report.save_ms - save_before)

        first_token = time.perf_counter()
        n_predicted, stop_type, stopping_word = yield from self._generate(job, seq)
        finished = time.perf_counter()
        timings = Timings(
            cache_n=report.n_cached,
            prompt_n=report.n_evaluated,
            prompt_ms=(first_token - started) * 1e3,
            predicted_n=n_predicted,
            predicted_ms=(finished - first_token) * 1e3,
            queue_ms=(started - job.submitted) * 1e3,
            first_token_ms=(first_token - job.submitted) * 1e3,
        )
        self.totals.add(report, n_predicted)
        ticket.put(Done(stop_type, stopping_word, timings, report, seq.id))

    def _progress(self, seq: LiveSeq, report: Report, started: float) -> Progress:
        elapsed = (time.perf_counter() - started) * 1e3
        return Progress(report.n_prompt, report.n_cached, seq.n, elapsed, report.source)

    def _generate(self, job: Job, seq: LiveSeq) -> Generator[NextToken, int, tuple[int, StopType, str]]:
        """Sample, stream, evaluate, until the reply ends."""
        request, ticket, backend = job.ticket.request, job.ticket, self.backend
        room = backend.n_ctx - seq.n
        limit = room if request.max_tokens < 0 else min(request.max_tokens, room)
        text = TextStream(request.stop)
        n_predicted = 0
        stop_type: StopType = "limit"
        if limit == 0:
            return 0, stop_type, ""
        sampler = backend.sampler(request.sampling, request.prompt.tokens)
        pending: list[int] = []
        probs: list[TopTokens] = []
        index = 0
        try:
            while True:
                token = sampler.sample(index)
                n_predicted += 1
                if backend.is_end(token):
                    stop_type = "eos"
                    break
                pending.append(token)
                if request.n_probs:
                    probs.append(backend.top_tokens(index, token, request.n_probs))
                final = text.feed(backend.piece(token))
                if text.stopping_word:
                    stop_type = "word"
                    ticket.put(Piece(final, tuple(pending), tuple(probs)))
                    pending, probs = [], []
                    break
                if final:
                    ticket.put(Piece(final, tuple(pending), tuple(probs)))
                    pending, probs = [], []
                if n_predicted >= limit:
                    break
                index = yield NextToken(token, seq.n)
                seq.append_one(token)
        finally:
            sampler.close()
        rest = text.flush()
        if text.stopping_word:
            stop_type = "word"
        if rest or pending:
            ticket.put(Piece(rest, tuple(pending), tuple(probs)))
        return n_predicted, stop_type, text.stopping_word

    # -- the cache ---------------------------------------------------------------------------------------------------

    def _restore(
        self, request: Request, known: Comparison, seq: LiveSeq, ends: list[int], report: Report
    ) -> tuple[tuple[Snapshot, ...], int]:
        """Bring ``seq`` to the deepest restorable position.

        Returns the snapshot that was used, if any, and the position at which the prompt leaves the nearest recent one.
        What fails to restore falls back to the next way; what cannot be restored at all leaves an empty sequence.
        """
        prompt, exact = request.prompt, self.options.exact
        began = time.perf_counter()
        found: list[Candidate] = []
        shared = seq.shared(prompt.tokens)
        near: Prompt | None = None
        reach = 0
        if request.cache_prompt:
            found = candidates(known, ends, seq, self.cache, self.backend, exact=exact)
            near, reach = self.recent.nearest(prompt.tokens)
            self.recent.add(prompt)
        report.lookup_ms = (time.perf_counter() - began) * 1e3
        if seq.cached and (shared < seq.n_prompt or not request.cache_prompt):
            self._park(seq, tuple(c.snapshot for c in found if c.snapshot is not None), report)
        seq.cached = request.cache_prompt

        began = time.perf_counter()
        used: tuple[Snapshot, ...] = ()
        for candidate in found:
            if candidate.snapshot is not None and not candidate.snapshot.segment.alive:
                continue  # dropped by an attempt before this one
            if candidate.keep > seq.n:  # an attempt before this one failed and left the sequence empty
                if candidate.snapshot is None:
                    continue
                candidate = replace(candidate, source="ram", keep=0)
            if restore(candidate, prompt, ends, seq, self.backend):
                report.source, report.n_cached = candidate.source, candidate.n
                if candidate.snapshot is not None:
                    self.cache.touch(candidate.snapshot)
                    used = (candidate.snapshot,)
                break
            self.totals.failed_restores += 1
            if candidate.snapshot is not None:
                self.cache.drop(candidate.snapshot)
        else:
            self._forget(seq)
        report.restore_ms = (time.perf_counter() - began) * 1e3
        # Between here and the branch point the rows may be in the cache, only without a state to resume from.
        seq.n_known = reach if last_end(ends, reach) > seq.n else 0
        if near is not None and reach < near.end and last_end(ends, reach) > report.n_cached:
            report.miss = Miss.at(reach, report.n_cached, near.tokens, prompt.tokens)
        return used, reach

    def _park(self, seq: LiveSeq, spared: tuple[Snapshot, ...], report: Report) -> None:
        """Keep the end of a live sequence before another conversation takes it."""
        _, covered = seq.saved()
        exact = seq.n_exact == seq.n
        if seq.n - covered >= PARK_MIN and (exact or not self.options.exact):
            self._save(seq, Comparison(seq.tokens), spared, report)

    def _expect(self, seq: LiveSeq, cuts: list[int]) -> None:
        """Tell the backend which blocks the next cut will need, and one state more for what comes after it."""
        if not self.cache.enabled:
            return
        state = self.backend.state_size(seq.id)
        upcoming = next((cut for cut in cuts if cut > seq.n), None)
        rows = [] if upcoming is None else [self.backend.rows_size(seq.saved()[1], upcoming), state]
        self.backend.expect([*rows, state])

    def _saved(self, seq: LiveSeq, known: Comparison) -> tuple[Segment | None, int]:
        """The deepest segment that holds rows of ``seq``, and how many: its own, or those of a snapshot beside it."""
        segment, covered = seq.saved()
        if covered < seq.n_known:
            other, shared = self.cache.overlap(known)
            common = last_common_end(seq.ends, other.ends, min(shared, seq.n)) if other is not None else 0
            if other is not None and common > covered:
                seq.keep(other.segment_at(common), common)
                return seq.saved()
        return segment, covered

    def _save(self, seq: LiveSeq, known: Comparison, spared: tuple[Snapshot, ...], report: Report) -> None:
        """Take a snapshot at the end of ``seq``: the rows since the last one, and the state.

        ``known`` begins with the tokens of ``seq``.
        """
        began = time.perf_counter()
        backend = self.backend
        parent, covered = self._saved(seq, known)
        prefix = known.prefix(seq.n)
        n_bytes = backend.rows_size(covered, seq.n) + backend.state_size(seq.id)
        reservation = self.cache.prepare(prefix, n_bytes, spared)
        if reservation is None:
            return
        try:
            with reservation:
                segment = parent
                if segment is None or covered < seq.n:
                    rows = backend.save_rows(seq.id, covered, seq.n)
                    segment = Segment(
                        covered, as_tokens(seq.tokens[covered:]), rows, parent, ends_within(seq.ends, covered)
                    )
                snapshot = Snapshot(prefix, segment, backend.save_state(seq.id, seq.n), exact=seq.n_exact == seq.n)
                if reservation.confirm(snapshot):
                    seq.keep(segment, seq.n)
                    report.n_saved += 1
        except (StateError, MemoryError) as error:
            log.warning("no snapshot at %d: %s", seq.n, error)
        report.save_ms += (time.perf_counter() - began) * 1e3
