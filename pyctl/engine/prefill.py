"""A prompt on its way into its sequence, batch by batch, for a reply or before anybody asks for one."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from weakref import ref

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.plan import MIN_BATCH, batch_ends, ends_within, inner_ends, last_end
from pyctl.cache.snapshot import Prefix, PromptMatch, State
from pyctl.engine.admission import ActiveRequest, Steps
from pyctl.engine.backend import Backend
from pyctl.engine.cells import CellPool
from pyctl.engine.engine_settings import MOST_WARM_UPS
from pyctl.engine.engine_stats import EngineCounters, PrefillLog
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Done, Failed, Progress, Request, Timings
from pyctl.engine.restore import CacheLookup, CachePlan, MakeRoom
from pyctl.engine.sequence import LiveSequence
from pyctl.engine.snapshotter import Snapshotter
from pyctl.errors import BrokenOffError, BusyError, OutOfCellsError, StateError
from pyctl.prompt import Prompt, Tokens, common_prefix

__all__ = ["Prefill", "PrefillTurns", "WarmUps"]

log = logging.getLogger(__name__)


class PrefillTurns:
    """Whose batch comes next: in order, but who needs one batch of ``n_batch`` tokens only waits for one at most.

    So a title or a completion does not wait for the whole of a long prompt, and that gets every second batch at least.
    """

    def __init__(self, n_batch: int) -> None:
        self._n_batch = n_batch
        self._passed = False

    def next(self, ready: Sequence[ActiveRequest]) -> ActiveRequest | None:
        """One of ``ready``, which are in order; None if there is none."""
        short = (active for active in ready[1:] if active.n_missing <= self._n_batch and not self._passed)
        found = next(short, None)
        self._passed = found is not None
        return found or next(iter(ready), None)


class Prefill:
    """Evaluates prompts in batches, with a snapshot at each cut.

    ``is_short`` says that there was no room for a batch, and that somebody of ``running`` has to wait for it.
    """

    def __init__(
        self,
        backend: Backend,
        pool: CellPool,
        snapshotter: Snapshotter,
        counters: EngineCounters,
        running: Collection[ActiveRequest],
    ) -> None:
        self.is_short = False
        self._backend, self._pool, self._snapshotter = backend, pool, snapshotter
        self._counters, self._running = counters, running

    def ends(self, prompt: Prompt) -> list[int]:
        """Where batches of ``prompt`` end."""
        return self._ends(prompt, self._backend.batch_cost)

    def behind(self, seq: LiveSequence, lookup: CacheLookup) -> CacheLookup:
        """``lookup`` with the batch ends for what is to follow in ``seq``.

        Behind generated text no batch is one of a cold run, so batches may end wherever a client may come back to: at
        every boundary. One turn has few of them, whatever they cost.
        """
        if seq.n_exact == seq.n or not self._backend.batch_cost:
            return lookup
        return replace(lookup, ends=self._ends(lookup.request.prompt, 0))

    def _ends(self, prompt: Prompt, batch_cost: int) -> list[int]:
        return batch_ends(prompt, self._backend.n_ubatch, self._snapshotter.settings.min_batch, batch_cost)

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
        """Append what is missing of the prompt up to each of ``ends``, as soon as there is room for it.

        Without ``exact`` these are other batches than a cold run's.
        """
        prompt, n_full = active.handle.request.prompt, self._backend.n_ubatch
        began, save_before, first, last, is_alone = time.perf_counter(), stats.save_ms, seq.n, seq.n, True
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
            is_cold = exact and (end < len(prompt) or end - previous == n_full)
            seq.append(prompt.tokens[seq.n : end], exact=is_cold)
            seq.in_picture = picture is not None and end < picture.end
            shown.reached(end)
            if end in plan.cuts:
                self._snapshotter.save(seq, plan, stats)
            _tell_progress(active, seq, stats)
            is_alone = is_alone and len(self._running) <= 1
            if end < len(prompt):
                yield None
        stats.n_evaluated = seq.n - stats.n_cached
        stats.prefill_ms = (time.perf_counter() - began) * 1e3 - (stats.save_ms - save_before)
        if is_alone:  # else others had their share of this time
            self._snapshotter.cache.costs.note_evaluated(first, last, stats.prefill_ms / 1e3)

    def _evaluate(self, prompt: Prompt, seq: LiveSequence, end: int, plan: CachePlan, *, may_break: bool) -> bool:
        """False if there is no room until somebody else waits, or if it was broken off for somebody who does."""
        if not self._pool.make_room(end - seq.n, plan.protected):
            self._pool.make_room(end - seq.n)  # its rows are in the sequence already
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
            if not self._pool.empty(plan.protected):
                if len(self._running) == 1:
                    raise
                self.is_short = True
            return False
        finally:
            self._backend.allow_break(False)
        self._counters.count_call(1, end)
        return True

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


AT_ONCE_SECONDS = 0.05
"""So long after a reply a client may ask again at once, and is not to wait for a batch of a warm-up then."""

QUIET_SECONDS = 1.0
"""So long nobody must have asked before a warm-up begins by which the next turn hardly becomes faster."""

QUIET_BATCHES = 1
"""And so many batches as long as one takes, by which somebody who comes then may have to wait."""

MOST_UNUSED = 4
"""After so many warm-ups in a row that no request has used, each waits that long."""

MOST_READY = 256
"""Warm-ups that are remembered until a request uses them, which is only counted."""

MOST_AGAIN = 2048
"""Tokens before a reply that a warm-up may evaluate with it; where more is missing, the cache is too small for it."""


class WarmUps:
    """Prompts that are evaluated before anybody asks for them, one at a time, while nothing else is to be done.

    They are background requests: prompts that a client wants to be ready, and the beginnings of next turns, as far as
    they are certain when a reply has ended. A request stops what runs between two batches. What is evaluated by then
    stays, the rest follows later, unless the conversation has gone on by itself. All is evaluated in the batches of a
    cold run, up to the last batch end within the prompt. Where batches are costly, the next message need not begin at
    one: unless everything has to be exact, what is left up to there is evaluated as well.
    """

    def __init__(self, snapshotter: Snapshotter, prefill: Prefill, n_ubatch: int) -> None:
        self._snapshotter, self._prefill, self._n_ubatch = snapshotter, prefill, n_ubatch
        self._queue: list[ActiveRequest] = []
        # Those of clients, as they came: their tokens, and none of their images' files, which are large.
        self._lately: deque[tuple[ref[Request], Tokens]] = deque(maxlen=MOST_WARM_UPS)
        self._now: ActiveRequest | None = None
        self._quiet_since = -math.inf  # monotonic seconds
        self._ready: OrderedDict[Prefix, int] = OrderedDict()  # tokens that were evaluated for those who resume there
        self._n_unused = 0

    # -- the line ----------------------------------------------------------------------------------------------------

    def put(self, handle: RequestHandle, sequences: Sequence[LiveSequence] = ()) -> None:
        """Have the prompt of ``handle`` evaluated, unless its conversation has gone on already."""
        request = handle.request
        active = ActiveRequest(handle)
        if request.after is not None:
            if not self._snapshotter.cache.enabled:  # there would be no way back to the live end
                return
            came = list(self._lately)
            at = next((i for i, (each, _) in enumerate(came) if each() is request.after), -1)
            if any(_goes_on(tokens, request) for _, tokens in came[at + 1 :]):
                return
            tokens, exact = request.prompt.tokens, self._snapshotter.settings.exact
            active.quiet = AT_ONCE_SECONDS
            # The next turn goes on from the live sequence just as well, only not in the batches of a cold run.
            is_live = not exact and any(0 < seq.n == seq.shared(tokens) for seq in sequences)
            if is_live or self._n_unused >= MOST_UNUSED:
                batch = self._snapshotter.cache.costs.evaluate(max(len(tokens) - self._n_ubatch, 0), len(tokens))
                active.quiet = max(QUIET_SECONDS, QUIET_BATCHES * batch)
        self._queue.append(active)
        if len(self._queue) > MOST_WARM_UPS:
            self._queue.pop(0).handle.put(Failed(BusyError(MOST_WARM_UPS)))

    def arrived(self, request: Request) -> None:
        """A client asks: what its request evaluates by itself is given up."""
        tokens = request.prompt.tokens
        self._lately.append((ref(request), tokens))
        self._queue = [each for each in self._queue if not _goes_on(tokens, each.handle.request)]
        if self._now is not None and _goes_on(tokens, self._now.handle.request):
            self._now.handle.cancel()

    def ended(self) -> None:
        """A client's request is over."""
        self._quiet_since = time.monotonic()

    def take(self) -> ActiveRequest | None:
        """The next one whose time has come, out of the line then. Nobody else is to be served now."""
        self._queue = [each for each in self._queue if not each.handle.cancelled]
        now = time.monotonic()
        self._now = next((each for each in self._queue if self._quiet_since + each.quiet <= now), None)
        if self._now is not None:
            self._queue.remove(self._now)
        return self._now

    def put_back(self, active: ActiveRequest) -> None:
        """Let one that was stopped go on when there is time again."""
        active.seq, active.steps, active.stats, active.reads = None, None, None, None
        if not active.handle.cancelled:
            self._queue.insert(0, active)

    @property
    def seconds(self) -> float | None:
        """How long until the next one may begin; None if there is none."""
        quiet = min((each.quiet for each in self._queue), default=None)
        return max(self._quiet_since + quiet - time.monotonic(), 0.0) if quiet is not None else None

    def clear(self) -> list[ActiveRequest]:
        """Give up all that wait; returns them."""
        waiting, self._queue = self._queue, []
        return waiting

    def forget(self) -> None:
        """Give up what nobody waits for, and remember no prompt any more."""
        if self._now is not None and self._now.handle.request.after is not None:
            self._now.handle.cancel()
        self._queue = [each for each in self._queue if each.handle.request.after is None]
        self._lately.clear()

    # -- the work ----------------------------------------------------------------------------------------------------

    def serve(
        self, active: ActiveRequest, seq: LiveSequence, alone: Callable[[CacheLookup], None], make_room: MakeRoom
    ) -> Steps:
        """The whole way of a background request; ``alone`` gives it all cells, as whoever is served alone gets them."""
        request, snapshotter = active.handle.request, self._snapshotter
        tokens = request.prompt.tokens
        began = active.started = time.perf_counter()
        stats = active.stats = RequestStats(n_prompt=len(request.prompt))
        ends = self._prefill.ends(request.prompt)
        last = last_end(inner_ends(request.prompt, ends), len(request.prompt))
        ends = list(ends_within(ends, 0, last))  # those inside of images, too
        seq.left_over = False
        lookup = snapshotter.lookup(request, ends, seq, stats)
        goal = max(last, self._rest(request, last))
        if self._is_worth_it(lookup, seq, last, goal):
            generated = lookup.match.prefix(seq.n) if 0 < seq.n == seq.shared(tokens) < last else None
            snapshotter.leave(seq, lookup, stats)
            alone(lookup)
            restored = yield from snapshotter.restore(lookup, seq, stats, make_room)
            plan = CachePlan(lookup.match, protected=restored)
            if request.after is None:
                plan = snapshotter.plan(lookup, restored, seq, stats)
            plan = replace(plan, cuts=(*plan.cuts, last, goal))
            try:
                yield from self._prefill.run(active, seq, ends, plan, stats)
                yield from self._prefill.run(active, seq, [goal], plan, stats, exact=False)
            finally:
                self._note(lookup.match, stats.n_cached, seq.n)
                active.n_warmed += seq.n - stats.n_cached
            snapshotter.persist(plan)
            if generated is not None:
                self._forget(generated)
            self._n_unused += request.after is not None
        ms = (time.perf_counter() - began) * 1e3
        stats.n_prompt, stats.n_cached, stats.n_evaluated = goal, max(goal - active.n_warmed, 0), active.n_warmed
        if active.n_warmed:
            snapshotter.totals.n_warm_ups += 1
            log.info("made ready: a prompt of %d tokens, %d evaluated in %.0f ms", goal, active.n_warmed, ms)
        waited = (began - active.submitted) * 1e3
        timings = Timings(stats.n_cached, stats.n_evaluated, ms, 0, 0.0, waited, waited + ms)
        active.handle.put(Done("limit", "", timings, stats, seq.id))

    def _rest(self, request: Request, last: int) -> int:
        """Up to where the prompt is evaluated behind its ``last`` batch end: to the message after the reply, or 0."""
        next_message = request.prompt.boundaries[-1] if request.prompt.boundaries else 0
        if request.after is None or self._snapshotter.settings.exact:
            return 0
        is_behind = next_message > _shared(request.after, request) and next_message - last >= MIN_BATCH
        return next_message if is_behind else 0

    def _is_worth_it(self, lookup: CacheLookup, seq: LiveSequence, last: int, goal: int) -> bool:
        """Whether more is ready afterwards than now, without what only a small cache makes necessary."""
        request, nearest = lookup.request, lookup.ways[0].n if lookup.ways else 0
        if nearest >= last and (goal == last or lookup.match.prefix(goal) in self._snapshotter.cache):
            return False
        if request.after is None:
            return True
        # The live end is as good, unless every batch has to be one of a cold run.
        is_live = last <= seq.n == seq.shared(request.prompt.tokens) and not self._snapshotter.settings.exact
        return not is_live and nearest >= _shared(request.after, request) - MOST_AGAIN

    def used(self, match: PromptMatch, n: int) -> int:
        """How many of the ``n`` tokens that a request did not have to evaluate had been made ready for it; each counts
        for one request only.
        """
        found = self._ready.pop(match.prefix(n), 0) if n and self._ready else 0
        if found:
            self._n_unused = 0
            self._snapshotter.totals.n_warmed_used += found
        return found

    def _note(self, match: PromptMatch, first: int, n: int) -> None:
        """The tokens [first, n) of a prompt are evaluated."""
        if n <= first:
            return
        before = self._ready.pop(match.prefix(first), 0) if first else 0
        self._ready[match.prefix(n)] = before + n - first
        if len(self._ready) > MOST_READY:
            self._ready.popitem(last=False)
        self._snapshotter.totals.n_warmed += n - first

    def _forget(self, prefix: Prefix) -> None:
        """Give up a live end that was parked before: its tokens are all evaluated in the batches of a cold run now."""
        snapshot = self._snapshotter.cache.get(prefix)
        if snapshot is not None and not snapshot.exact and not snapshot.hits:
            self._snapshotter.cache.drop(snapshot)


def _shared(one: Request, other: Request) -> int:
    return common_prefix(one.prompt.tokens, other.prompt.tokens)


def _goes_on(tokens: Tokens, warm_up: Request) -> bool:
    """Whether a request with these has all that ``warm_up`` shares with the one before it, whose conversation went on.

    What a client wants to be ready goes on with nobody's conversation.
    """
    before = warm_up.after
    n_common = common_prefix(tokens, warm_up.prompt.tokens)
    return before is not None and n_common >= max(_shared(before, warm_up), 1)
