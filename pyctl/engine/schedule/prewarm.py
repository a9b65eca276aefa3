"""Background requests: evaluation of prompts before a client requests them."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.lookup import CacheLookup
from pyctl.cache.plan import MIN_BATCH, snapshot_ends
from pyctl.cache.ports import CacheRequest
from pyctl.cache.positions import ends_within, last_end
from pyctl.cache.prefix_cache import PrefixCache
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import Prefix, PromptMatch
from pyctl.engine.engine_settings import MAX_PREWARMS, Clock, PrewarmDelays
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Failed, Request
from pyctl.engine.schedule.admission import ActiveRequest
from pyctl.errors import BusyError
from pyctl.prompt import Tokens, common_prefix

__all__ = ["Prewarms"]

MAX_UNUSED = 4
"""After this many unused warm-ups in a row, each waits as if its gain were small."""

MAX_READY = 256
"""Finished warm-ups remembered to count whether requests use them."""

MAX_AGAIN = 2048
"""Tokens before a reply that a warm-up may evaluate again. If more are missing, the cache is too
small for it.
"""


class Prewarms:
    """The queue of background requests, which run one at a time while no other request runs.

    These are prompts that clients sent ahead, and the certain beginnings of next turns after
    replies. Client requests interrupt them between two batches, or within one if the device
    supports it; the evaluated part stays, and the rest follows later unless the conversation has
    continued. Batches end where a cold run's do. With --exact a warm-up evaluates nothing after the
    last of these; else it goes on to the next message's boundary, and leaves generated tokens as
    they are: tokens that the next turn would not evaluate are not worth the seconds now.
    """

    def __init__(
        self,
        prefix_cache: PrefixCache,
        n_ubatch: int,
        clock: Clock,
        delays: PrewarmDelays = PrewarmDelays(),
    ) -> None:
        """Make an empty queue; ``n_ubatch`` is the number of tokens of a batch."""
        self.delays = delays
        self._clock = clock
        self._prefix_cache = prefix_cache
        self._n_ubatch = n_ubatch
        self._queue: list[ActiveRequest] = []
        # The tokens of the latest client prompts: no requests, since image files are large.
        self._lately: deque[Tokens] = deque(maxlen=MAX_PREWARMS)
        self._now: ActiveRequest | None = None
        self._quiet_since = -math.inf  # monotonic seconds
        # Tokens that were evaluated for a prompt that resumes there.
        self._ready: OrderedDict[Prefix, int] = OrderedDict()
        self._n_unused = 0

    # -- the queue
    # ----------------------------------------------------------------------------------

    def put(self, handle: RequestHandle, sequences: Sequence[LiveSequence] = ()) -> None:
        """Queue ``handle``, unless its conversation has already continued."""
        active = ActiveRequest(handle)
        if handle.request.after is not None:
            if not self._prefix_cache.cache.enabled:
                return  # the sequence could not return to its live end
            if self._has_continued(handle.request, handle.request.after):
                return
            active.quiet = self._quiet_before(handle.request, sequences)
        self._queue.append(active)
        if len(self._queue) > MAX_PREWARMS:
            oldest = self._queue.pop(0)
            error = BusyError(MAX_PREWARMS)
            oldest.handle.put(Failed(error))

    def _has_continued(self, request: Request, after: CacheRequest) -> bool:
        """Return whether a client's prompt since ``after`` starts as ``request`` expects."""
        prompts = list(self._lately)
        # By its prompt: the request that was submitted may be a copy, with the rights of its
        # client.
        before = after.prompt.tokens
        index = next((i for i, tokens in enumerate(prompts) if tokens is before), -1)
        later = prompts[index + 1 :]
        return any(_is_continued(tokens, request) for tokens in later)

    def _quiet_before(self, request: Request, sequences: Sequence[LiveSequence]) -> float:
        """Return the seconds without a client's request before ``request`` starts: more if a live
        sequence has most of its prompt, or if many before it were of no use.
        """
        tokens = request.prompt.tokens
        is_live = False
        if not self._prefix_cache.settings.exact:
            is_live = any(0 < seq.n == seq.shared(tokens) for seq in sequences)
        if not is_live and self._n_unused < MAX_UNUSED:
            return self.delays.at_once
        first = max(len(tokens) - self._n_ubatch, 0)
        batch_seconds = self._prefix_cache.cache.costs.evaluate(first, len(tokens))
        return max(self.delays.quiet, self.delays.quiet_batches * batch_seconds)

    def arrived(self, request: Request) -> None:
        """Cancel the warm-ups that the client's ``request`` makes redundant."""
        tokens = request.prompt.tokens
        self._lately.append(tokens)
        self._queue = [
            queued for queued in self._queue if not _is_continued(tokens, queued.handle.request)
        ]
        if self._now is None:  # none runs that could be redundant
            return
        handle = self._now.handle
        if _is_continued(tokens, handle.request):
            handle.cancel()

    def ended(self) -> None:
        """Restart the quiet time after the end of a client's request."""
        self._quiet_since = self._clock()

    def take(self) -> ActiveRequest | None:
        """Remove and return the next due request, if any. Requires that no other request waits."""
        self._queue = [queued for queued in self._queue if not queued.handle.cancelled]
        now = self._clock()
        due = (queued for queued in self._queue if self._quiet_since + queued.quiet <= now)
        self._now = next(due, None)
        if self._now is None:  # none is due
            return None
        self._queue.remove(self._now)
        return self._now

    def put_back(self, active: ActiveRequest) -> None:
        """Queue an interrupted request first, to start again later."""
        active.reset()
        if not active.handle.cancelled:
            self._queue.insert(0, active)

    @property
    def seconds(self) -> float | None:
        """Seconds until the next request may start; None if there is none."""
        if not self._queue:
            return None
        quiet = min(queued.quiet for queued in self._queue)
        start = self._quiet_since + quiet
        return max(start - self._clock(), 0.0)

    def clear(self) -> list[ActiveRequest]:
        """Empty the queue and return its requests."""
        waiting = self._queue
        self._queue = []
        return waiting

    def forget(self) -> None:
        """Drop the requests without a client and the record of client prompts."""
        if self._now is not None:
            handle = self._now.handle
            if handle.request.after is not None:
                handle.cancel()
        self._queue = [queued for queued in self._queue if queued.handle.request.after is None]
        self._lately.clear()

    # -- the work
    # ----------------------------------------------------------------------------------

    def aim(self, request: Request, ends: Sequence[int]) -> tuple[list[int], int]:
        """Return the subset of batch ``ends`` for a background request, and its goal, at or after
        the last of them.
        """
        points = self._prefix_cache.memory.shape.resume_points
        snapshots = snapshot_ends(request.prompt, ends, points)
        last = last_end(snapshots, len(request.prompt))
        goal = max(last, self._next_boundary(request, last))
        within = ends_within(ends, 0, last)  # including ends inside images
        return list(within), goal

    def is_worth_it(self, lookup: CacheLookup, seq: LiveSequence, goal: int) -> bool:
        """Return whether the warm-up gains a snapshot after all that the next turn finds, and does
        not merely refill a cache that is too small.
        """
        request = lookup.request
        nearest = 0
        if lookup.candidates:
            nearest = lookup.candidates[0].n
        last = max(lookup.batch_ends, default=0)
        if nearest >= last and (goal == last or self._is_cached(lookup.match, goal)):
            return False
        if request.after is None:  # a client sent it ahead
            return True
        # From a live end it is a batch. Rows elsewhere have to be loaded, which pays from two
        # batches on.
        if not self._prefix_cache.settings.exact:
            is_live = 0 < seq.n == seq.shared(request.prompt.tokens)
            gains_nothing = goal - nearest < MIN_BATCH
            if is_live:
                gains_nothing = seq.n >= last
            if gains_nothing:
                return False
        n_shared = _shared(request.after, request)
        return nearest >= n_shared - MAX_AGAIN

    def _is_cached(self, match: PromptMatch, n: int) -> bool:
        prefix = match.prefix(n)
        return self._prefix_cache.cache.get(prefix) is not None

    def replaced_end(self, lookup: CacheLookup, seq: LiveSequence) -> Prefix | None:
        """Return the live end of ``seq`` if the warm-up goes beyond it."""
        is_live = 0 < seq.n == seq.shared(lookup.match.tokens)
        goes_beyond = seq.n < max(lookup.batch_ends, default=0)
        if not is_live or not goes_beyond:  # the live end stays of use
            return None
        return lookup.match.prefix(seq.n)

    def record(self, active: ActiveRequest, match: PromptMatch, first: int, n: int) -> None:
        """Record that a background request evaluated tokens ``first`` to ``n`` before it ended or
        was interrupted.
        """
        if n <= first:
            return
        self._record_ready(match, first, n)
        active.n_prewarmed += n - first

    def record_sent_ahead(self, match: PromptMatch, stats: RequestStats) -> None:
        """Record a prompt that a client has sent ahead and waited for."""
        if not stats.n_evaluated:
            return
        self._record_ready(match, stats.n_cached, stats.n_prompt)
        self._prefix_cache.totals.n_prewarms += 1

    def _record_ready(self, match: PromptMatch, first: int, n: int) -> None:
        n_evaluated = n - first
        n_before = 0
        if first:
            n_before = self._ready.pop(match.prefix(first), 0)
        self._ready[match.prefix(n)] = n_before + n_evaluated
        if len(self._ready) > MAX_READY:
            self._ready.popitem(last=False)
        self._prefix_cache.totals.n_prewarmed += n_evaluated

    def evaluated(self, lookup: CacheLookup, replaced: Prefix | None) -> None:
        """Count a finished warm-up, and drop the unused parked snapshot of the live end that it
        ``replaced``.
        """
        cache = self._prefix_cache.cache
        if replaced is not None:
            snapshot = cache.get(replaced)
            if snapshot is not None and not snapshot.exact and not snapshot.hits:
                cache.drop(snapshot)
        if lookup.request.after is not None:
            self._n_unused += 1

    def _next_boundary(self, request: Request, last: int) -> int:
        """Return the boundary after the reply, to evaluate up to after the ``last`` batch end; 0
        for none.
        """
        if request.after is None or self._prefix_cache.settings.exact:
            return 0
        if not request.prompt.boundaries:
            return 0
        next_message = request.prompt.boundaries[-1]
        if next_message - last < MIN_BATCH:
            return 0
        if next_message <= _shared(request.after, request):  # it lies before the reply
            return 0
        points = self._prefix_cache.memory.shape.resume_points
        if not points.contains(next_message):
            return 0
        return next_message

    def used(self, match: PromptMatch, n: int) -> int:
        """Return how many of a request's ``n`` restored tokens warm-ups evaluated. Each counts for
        one request only.
        """
        if not n or not self._ready:  # nothing restored, or no warm-up finished
            return 0
        n_found = self._ready.pop(match.prefix(n), 0)
        if n_found:
            self._n_unused = 0
            self._prefix_cache.totals.n_prewarmed_used += n_found
        return n_found


def _shared(one: CacheRequest, other: CacheRequest) -> int:
    return common_prefix(one.prompt.tokens, other.prompt.tokens)


def _is_continued(tokens: Tokens, prewarm: Request) -> bool:
    """Return whether ``tokens`` start with all that ``prewarm`` shares with the request before it;
    False without one.
    """
    before = prewarm.after
    if before is None:  # a client sent it ahead
        return False
    n_common = common_prefix(tokens, prewarm.prompt.tokens)
    n_shared = _shared(before, prewarm)
    return n_common >= max(n_shared, 1)
