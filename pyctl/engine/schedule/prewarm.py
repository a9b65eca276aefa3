"""Background requests: evaluation of prompts before a client requests them."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence

from pyctl.cache import (
    MIN_BATCH,
    CacheLookup,
    CacheRequest,
    LiveSequence,
    Prefix,
    PrefixCache,
    PromptMatch,
    ends_within,
    last_end,
    snapshot_ends,
)
from pyctl.engine.engine_settings import MAX_PREWARMS, Clock
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Failed, Request
from pyctl.engine.schedule.admission import ActiveRequest
from pyctl.errors import BusyError
from pyctl.prompt import Tokens, common_prefix

__all__ = ["Prewarms"]

AT_ONCE_SECONDS = 0.05
"""Delay after a reply, so that an immediate next request does not wait for a batch of a warm-up."""

QUIET_SECONDS = 1.0
"""Delay without client requests before a warm-up with little gain for the next turn."""

QUIET_BATCHES = 1
"""Such a warm-up also waits for the duration of this many batches, the longest that it can delay a
request.
"""

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
    they are: what the next turn would not evaluate is not worth the seconds now.
    """

    def __init__(self, prefix_cache: PrefixCache, n_ubatch: int, clock: Clock) -> None:
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
            self._queue.pop(0).handle.put(Failed(BusyError(MAX_PREWARMS)))

    def _has_continued(self, request: Request, after: CacheRequest) -> bool:
        """Return whether a client's prompt since ``after`` starts as ``request`` expects."""
        prompts = list(self._lately)
        # By its prompt: the request that was submitted may be a copy, with the rights of its
        # client.
        before = after.prompt.tokens
        place = next((i for i, tokens in enumerate(prompts) if tokens is before), -1)
        return any(_goes_on(tokens, request) for tokens in prompts[place + 1 :])

    def _quiet_before(self, request: Request, sequences: Sequence[LiveSequence]) -> float:
        """Return the seconds without a client's request before ``request`` starts: more if a live
        sequence has most of its prompt, or if many before it were of no use.
        """
        tokens = request.prompt.tokens
        is_exact = self._prefix_cache.settings.exact
        is_live = not is_exact and any(0 < seq.n == seq.shared(tokens) for seq in sequences)
        if not is_live and self._n_unused < MAX_UNUSED:
            return AT_ONCE_SECONDS
        first = max(len(tokens) - self._n_ubatch, 0)
        batch_seconds = self._prefix_cache.cache.costs.evaluate(first, len(tokens))
        return max(QUIET_SECONDS, QUIET_BATCHES * batch_seconds)

    def arrived(self, request: Request) -> None:
        """Cancel the warm-ups that the client's ``request`` makes redundant."""
        tokens = request.prompt.tokens
        self._lately.append(tokens)
        self._queue = [each for each in self._queue if not _goes_on(tokens, each.handle.request)]
        if self._now is not None and _goes_on(tokens, self._now.handle.request):
            self._now.handle.cancel()

    def ended(self) -> None:
        """Restart the quiet time after the end of a client's request."""
        self._quiet_since = self._clock()

    def take(self) -> ActiveRequest | None:
        """Remove and return the next due request, if any. Requires that no other request waits."""
        self._queue = [each for each in self._queue if not each.handle.cancelled]
        now = self._clock()
        due = (each for each in self._queue if self._quiet_since + each.quiet <= now)
        self._now = next(due, None)
        if self._now is not None:
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
        quiet = min(each.quiet for each in self._queue)
        return max(self._quiet_since + quiet - self._clock(), 0.0)

    def clear(self) -> list[ActiveRequest]:
        """Empty the queue and return its requests."""
        waiting = self._queue
        self._queue = []
        return waiting

    def forget(self) -> None:
        """Drop the requests without a client and the record of client prompts."""
        if self._now is not None and self._now.handle.request.after is not None:
            self._now.handle.cancel()
        self._queue = [each for each in self._queue if each.handle.request.after is None]
        self._lately.clear()

    # -- the work
    # ----------------------------------------------------------------------------------

    def aim(self, request: Request, ends: Sequence[int]) -> tuple[list[int], int]:
        """Return the subset of batch ``ends`` for a background request, and its goal, at or after
        the last of them.
        """
        points = self._prefix_cache.memory.shape.resume_points
        last = last_end(snapshot_ends(request.prompt, ends, points), len(request.prompt))
        goal = max(last, self._rest(request, last))
        return list(ends_within(ends, 0, last)), goal  # including ends inside images

    def is_worth_it(self, lookup: CacheLookup, seq: LiveSequence, goal: int) -> bool:
        """Return whether the warm-up gains a snapshot after all that the next turn finds, and does
        not merely refill a cache that is too small.
        """
        request = lookup.request
        nearest = lookup.candidates[0].n if lookup.candidates else 0
        last = max(lookup.ends, default=0)
        if nearest >= last and (goal == last or self._is_cached(lookup.match, goal)):
            return False
        if request.after is None:
            return True
        # From a live end it is a batch. What is elsewhere has to be loaded, so that it takes more
        # than one to pay.
        is_live = 0 < seq.n == seq.shared(request.prompt.tokens)
        if not self._prefix_cache.settings.exact:
            gains_nothing = seq.n >= last if is_live else goal - nearest < MIN_BATCH
            if gains_nothing:
                return False
        return nearest >= _shared(request.after, request) - MAX_AGAIN

    def _is_cached(self, match: PromptMatch, n: int) -> bool:
        return self._prefix_cache.cache.get(match.prefix(n)) is not None

    def replaced_end(self, lookup: CacheLookup, seq: LiveSequence) -> Prefix | None:
        """Return the live end of ``seq`` if the warm-up goes beyond it."""
        is_live = 0 < seq.n == seq.shared(lookup.match.tokens)
        goes_beyond = seq.n < max(lookup.ends, default=0)
        return lookup.match.prefix(seq.n) if is_live and goes_beyond else None

    def note(self, active: ActiveRequest, match: PromptMatch, first: int, n: int) -> None:
        """Record that a background request evaluated tokens ``first`` to ``n`` before it ended or
        was interrupted.
        """
        if n <= first:
            return
        before = self._ready.pop(match.prefix(first), 0) if first else 0
        self._ready[match.prefix(n)] = before + n - first
        if len(self._ready) > MAX_READY:
            self._ready.popitem(last=False)
        active.n_prewarmed += n - first
        self._prefix_cache.totals.n_prewarmed += n - first

    def evaluated(self, lookup: CacheLookup, replaced: Prefix | None) -> None:
        """Count a finished warm-up, and drop the unused parked snapshot of the live end that it
        ``replaced``.
        """
        snapshot = self._prefix_cache.cache.get(replaced) if replaced is not None else None
        if snapshot is not None and not snapshot.exact and not snapshot.hits:
            self._prefix_cache.cache.drop(snapshot)
        self._n_unused += lookup.request.after is not None

    def _rest(self, request: Request, last: int) -> int:
        """Return the boundary after the reply, to evaluate up to after the ``last`` batch end; 0
        for none.
        """
        if request.after is None or self._prefix_cache.settings.exact:
            return 0
        if not request.prompt.boundaries:
            return 0
        next_message = request.prompt.boundaries[-1]
        if next_message - last < MIN_BATCH or next_message <= _shared(request.after, request):
            return 0
        can_resume = self._prefix_cache.memory.shape.resume_points.allow(next_message)
        return next_message if can_resume else 0

    def used(self, match: PromptMatch, n: int) -> int:
        """Return how many of a request's ``n`` restored tokens warm-ups evaluated. Each counts for
        one request only.
        """
        found = self._ready.pop(match.prefix(n), 0) if n and self._ready else 0
        if found:
            self._n_unused = 0
            self._prefix_cache.totals.n_prewarmed_used += found
        return found


def _shared(one: CacheRequest, other: CacheRequest) -> int:
    return common_prefix(one.prompt.tokens, other.prompt.tokens)


def _goes_on(tokens: Tokens, prewarm: Request) -> bool:
    """Return whether ``tokens`` start with all that ``prewarm`` shares with the request before it;
    False without one.
    """
    before = prewarm.after
    n_common = common_prefix(tokens, prewarm.prompt.tokens)
    return before is not None and n_common >= max(_shared(before, prewarm), 1)
