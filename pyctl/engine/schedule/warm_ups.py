"""Background requests: prompts that are evaluated before a client asks for them."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from weakref import ref

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
)
from pyctl.engine.engine_settings import MOST_WARM_UPS, Clock
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Failed, Request
from pyctl.engine.schedule.admission import ActiveRequest
from pyctl.errors import BusyError
from pyctl.prompt import Tokens, common_prefix

__all__ = ["WarmUps"]

AT_ONCE_SECONDS = 0.05
"""So long after a reply a client may ask again at once, and is not to wait for a batch of a warm-up then."""

QUIET_SECONDS = 1.0
"""So long no client must have asked before a warm-up begins that hardly makes the next turn faster."""

QUIET_BATCHES = 1
"""And as long as so many batches take, for which a request that comes then may have to wait."""

MOST_UNUSED = 4
"""After so many warm-ups in a row that no request has used, each waits that long."""

MOST_READY = 256
"""Warm-ups that are remembered until a request uses them, which is only counted."""

MOST_AGAIN = 2048
"""Tokens before a reply that a warm-up may evaluate with it; where more is missing, the cache is too small for it."""


class WarmUps:
    """Prompts that are evaluated before a client asks for them, one at a time, while there is no other work.

    They are background requests: prompts that a client wants to be ready, and the beginnings of next turns, as far as
    they are certain when a reply has ended. A request stops them between two batches. The evaluated part
    stays, the rest follows later, unless the conversation has continued by itself. All is evaluated in the batches of a
    cold run, up to the last batch end within the prompt. Where batches are costly, the next message need not begin at
    one: unless everything has to be exact, the tokens up to there are evaluated as well.
    """

    def __init__(self, prefix_cache: PrefixCache, n_ubatch: int, clock: Clock) -> None:
        self._clock = clock
        self._prefix_cache, self._n_ubatch = prefix_cache, n_ubatch
        self._queue: list[ActiveRequest] = []
        # Those of clients, as they came: their tokens, and none of their images' files, which are large.
        self._lately: deque[tuple[ref[Request], Tokens]] = deque(maxlen=MOST_WARM_UPS)
        self._now: ActiveRequest | None = None
        self._quiet_since = -math.inf  # monotonic seconds
        self._ready: OrderedDict[Prefix, int] = (
            OrderedDict()
        )  # tokens that were evaluated for a prompt that resumes there
        self._n_unused = 0

    # -- the line ----------------------------------------------------------------------------------------------------

    def put(self, handle: RequestHandle, sequences: Sequence[LiveSequence] = ()) -> None:
        """Have the prompt of ``handle`` evaluated, unless its conversation has gone on already."""
        request = handle.request
        active = ActiveRequest(handle)
        if request.after is not None:
            if not self._prefix_cache.cache.enabled:  # there would be no way back to the live end
                return
            came = list(self._lately)
            at = next((i for i, (each, _) in enumerate(came) if each() is request.after), -1)
            if any(_goes_on(tokens, request) for _, tokens in came[at + 1 :]):
                return
            tokens, exact = request.prompt.tokens, self._prefix_cache.settings.exact
            active.quiet = AT_ONCE_SECONDS
            # The next turn resumes there just as well, only not in the batches of a cold run.
            is_near = not exact and (
                any(0 < seq.n == seq.shared(tokens) for seq in sequences) or self._is_kept(request)
            )
            if is_near or self._n_unused >= MOST_UNUSED:
                batch = self._prefix_cache.cache.costs.evaluate(max(len(tokens) - self._n_ubatch, 0), len(tokens))
                active.quiet = max(QUIET_SECONDS, QUIET_BATCHES * batch)
        self._queue.append(active)
        if len(self._queue) > MOST_WARM_UPS:
            self._queue.pop(0).handle.put(Failed(BusyError(MOST_WARM_UPS)))

    def _is_kept(self, request: Request) -> bool:
        """Whether some snapshot, exact or not, has all but a little of the prompt: another one came in between."""
        match, least = PromptMatch(request.prompt.tokens), len(request.prompt) - MIN_BATCH
        return any(each.n >= least for each in self._prefix_cache.cache.lookup(match, len(request.prompt)))

    def arrived(self, request: Request) -> None:
        """A client asks: what its request evaluates by itself is given up."""
        tokens = request.prompt.tokens
        self._lately.append((ref(request), tokens))
        self._queue = [each for each in self._queue if not _goes_on(tokens, each.handle.request)]
        if self._now is not None and _goes_on(tokens, self._now.handle.request):
            self._now.handle.cancel()

    def ended(self) -> None:
        """A client's request is over."""
        self._quiet_since = self._clock()

    def take(self) -> ActiveRequest | None:
        """The next one that is due, out of the queue then. No other request may wait now."""
        self._queue = [each for each in self._queue if not each.handle.cancelled]
        now = self._clock()
        self._now = next((each for each in self._queue if self._quiet_since + each.quiet <= now), None)
        if self._now is not None:
            self._queue.remove(self._now)
        return self._now

    def put_back(self, active: ActiveRequest) -> None:
        """Let one that was stopped begin anew when there is time."""
        active.unbegin()
        if not active.handle.cancelled:
            self._queue.insert(0, active)

    @property
    def seconds(self) -> float | None:
        """How long until the next one may begin; None if there is none."""
        quiet = min((each.quiet for each in self._queue), default=None)
        return max(self._quiet_since + quiet - self._clock(), 0.0) if quiet is not None else None

    def clear(self) -> list[ActiveRequest]:
        """Give up all that wait; returns them."""
        waiting, self._queue = self._queue, []
        return waiting

    def forget(self) -> None:
        """Drop the requests without a client, and forget all prompts."""
        if self._now is not None and self._now.handle.request.after is not None:
            self._now.handle.cancel()
        self._queue = [each for each in self._queue if each.handle.request.after is None]
        self._lately.clear()

    # -- the work ----------------------------------------------------------------------------------------------------

    def aim(self, request: Request, ends: Sequence[int]) -> tuple[list[int], int]:
        """Those of the batch ``ends`` that a background request gets, and its own end, there or after them."""
        last = last_end(self._prefix_cache.places(request.prompt, ends), len(request.prompt))
        return list(ends_within(ends, 0, last)), max(last, self._rest(request, last))  # those inside of images, too

    def is_worth_it(self, lookup: CacheLookup, seq: LiveSequence, goal: int) -> bool:
        """Whether more is ready afterwards than now, without what only a small cache makes necessary."""
        request, nearest, last = lookup.request, lookup.ways[0].n if lookup.ways else 0, max(lookup.ends, default=0)
        if nearest >= last and (goal == last or lookup.match.prefix(goal) in self._prefix_cache.cache):
            return False
        if request.after is None:
            return True
        # The live end is as good, unless every batch has to be one of a cold run.
        is_live = last <= seq.n == seq.shared(request.prompt.tokens) and not self._prefix_cache.settings.exact
        return not is_live and nearest >= _shared(request.after, request) - MOST_AGAIN

    def replaced_end(self, lookup: CacheLookup, seq: LiveSequence) -> Prefix | None:
        """The live end of ``seq`` if all of its tokens are evaluated anew, in the batches of a cold run."""
        n = seq.shared(lookup.match.tokens)
        return lookup.match.prefix(seq.n) if 0 < seq.n == n < max(lookup.ends, default=0) else None

    def note(self, active: ActiveRequest, match: PromptMatch, first: int, n: int) -> None:
        """A background request has evaluated its prompt from ``first`` up to ``n``, where it ended or was stopped."""
        if n <= first:
            return
        before = self._ready.pop(match.prefix(first), 0) if first else 0
        self._ready[match.prefix(n)] = before + n - first
        if len(self._ready) > MOST_READY:
            self._ready.popitem(last=False)
        active.n_warmed += n - first
        self._prefix_cache.totals.n_warmed += n - first

    def evaluated(self, lookup: CacheLookup, replaced: Prefix | None) -> None:
        """A prompt is ready: the live end that it ``replaced`` is given up, if it was parked before."""
        snapshot = self._prefix_cache.cache.get(replaced) if replaced is not None else None
        if snapshot is not None and not snapshot.exact and not snapshot.hits:
            self._prefix_cache.cache.drop(snapshot)
        self._n_unused += lookup.request.after is not None

    def _rest(self, request: Request, last: int) -> int:
        """Up to where the prompt is evaluated after its ``last`` batch end: to the message after the reply, or 0."""
        next_message = request.prompt.boundaries[-1] if request.prompt.boundaries else 0
        if request.after is None or self._prefix_cache.settings.exact:
            return 0
        is_behind = next_message > _shared(request.after, request) and next_message - last >= MIN_BATCH
        return next_message if is_behind and self._prefix_cache.memory.shape.places.allow(next_message) else 0

    def used(self, match: PromptMatch, n: int) -> int:
        """How many of the ``n`` tokens that a request did not have to evaluate had been made ready for it; each counts
        for one request only.
        """
        found = self._ready.pop(match.prefix(n), 0) if n and self._ready else 0
        if found:
            self._n_unused = 0
            self._prefix_cache.totals.n_warmed_used += found
        return found


def _shared(one: CacheRequest, other: CacheRequest) -> int:
    return common_prefix(one.prompt.tokens, other.prompt.tokens)


def _goes_on(tokens: Tokens, warm_up: Request) -> bool:
    """Whether a request with these has all that ``warm_up`` shares with the one before it, whose conversation went on.

    A prompt that a client sent to be made ready continues no conversation.
    """
    before = warm_up.after
    n_common = common_prefix(tokens, warm_up.prompt.tokens)
    return before is not None and n_common >= max(_shared(before, warm_up), 1)
