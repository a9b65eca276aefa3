"""Who may run: requests that wait for a sequence and for cells, in the order in which they came."""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from pyctl.cache import LiveSequence, Reads, RequestStats, Snapshot
from pyctl.engine.decode import PendingTokens, Verify
from pyctl.engine.handle import RequestHandle
from pyctl.errors import PyctlError
from pyctl.limit import limit

__all__ = ["ActiveRequest", "Admission", "IdleTask", "Steps"]

MOST_PASSED = limit(
    8, "younger requests that may pass one for whose cells there is no room yet", "they wait behind it", "request"
)

MOST_RESERVE = 2048
"""Tokens of a reply, or an eighth of the context if that is less, for which there is room when it begins."""

Steps: TypeAlias = Generator[PendingTokens | Reads | None, Verify, None]
"""None after a prefill batch, PendingTokens while decoding, which Verify answers, Reads while the disk is read."""


@dataclass(eq=False)
class ActiveRequest:
    """A request on its way, the sequence that serves it, and the generator that does.

    ``arrived`` counts requests as they come, ``id`` as they begin; ``stats`` is there as soon as the work has begun.
    ``submitted`` and ``started`` are seconds of the performance counter. A suspended one has ``kept`` what its sequence
    held. ``passed`` is how many younger ones began while there was no room for it. A background request begins when
    nobody has asked for ``quiet`` seconds, and has evaluated ``n_warmed`` tokens, whenever it ran.
    """

    handle: RequestHandle
    arrived: int = 0
    id: int = -1
    stats: RequestStats | None = None
    submitted: float = field(default_factory=time.perf_counter)
    seq: LiveSequence | None = None
    steps: Steps | None = None
    pending: PendingTokens | None = None
    reads: Reads | None = None
    started: float = 0.0
    kept: Snapshot | None = None
    passed: int = 0
    quiet: float = 0.0
    n_warmed: int = 0

    @property
    def n_needed(self) -> int:
        """Cells that it holds, with those for all of its prompt."""
        n_prompt = len(self.handle.request.prompt)
        return n_prompt if self.seq is None or self.stats is None else max(self.seq.n, n_prompt)

    @property
    def n_pending(self) -> int:
        """Tokens of its reply that wait to be evaluated."""
        return len(self.pending.tokens) if self.pending is not None else 0

    @property
    def n_missing(self) -> int:
        """Tokens of its prompt that are not evaluated; all of them as long as it has not begun."""
        n_prompt = len(self.handle.request.prompt)
        return n_prompt if self.seq is None or self.stats is None else n_prompt - self.seq.n

    def may_use(self, seq: LiveSequence) -> bool:
        """Whether ``seq`` is free and not another one than the request asks for."""
        return not seq.busy and self.handle.request.seq in (-1, seq.id)


@dataclass(eq=False)
class IdleTask:
    """Something to do with sequence ``seq`` as soon as no request owns it; ``fail`` is called if that never comes."""

    seq: int
    run: Callable[[], None]
    fail: Callable[[PyctlError], None]


class Admission:
    """Lets a request begin, or a suspended one go on, when its prompt and a reserve for its reply fit.

    They have to fit into ``n_cells`` beside what the running ones hold and may still take; a request alone, of at most
    ``n_ctx`` tokens, always does. First come, first served: what does not fit is passed by younger ones that do, but
    not for ever. ``queue`` and ``suspended`` are ordered by arrival.
    """

    def __init__(self, n_cells: int, n_ctx: int) -> None:
        self.queue: deque[ActiveRequest] = deque()
        self.suspended: list[ActiveRequest] = []
        self._n_cells, self._n_ctx = n_cells, n_ctx
        self._reserve = max(min(n_ctx // 8, MOST_RESERVE), 1)

    def __bool__(self) -> bool:
        return bool(self.queue or self.suspended)

    def __iter__(self) -> Iterator[ActiveRequest]:
        """All that wait, the first to come first."""
        return heapq.merge(self.suspended, self.queue, key=attrgetter("arrived"))

    def n_alike(self, active: ActiveRequest, running: Sequence[ActiveRequest]) -> int:
        """How many others that have not begun have the very prompt of ``active``: they are choices of one request."""
        prompt = active.handle.request.prompt
        return sum(each.stats is None and each.handle.request.prompt is prompt for each in (*self.queue, *running))

    def put_back(self, active: ActiveRequest) -> None:
        """Let a request wait at the place that it had; a suspended one if it has ``kept`` something."""
        insort(self.queue if active.kept is None else self.suspended, active, key=attrgetter("arrived"))

    def clear(self) -> None:
        """Forget all that wait."""
        self.queue.clear()
        self.suspended.clear()

    def take_cancelled(self) -> list[ActiveRequest]:
        """Those that nobody waits for any more; they are out of the line then."""
        found = [active for active in self if active.handle.cancelled]
        for active in found:
            self._take(active)
        return found

    def take_next(self, running: Sequence[ActiveRequest], sequences: Sequence[LiveSequence]) -> ActiveRequest | None:
        """The one that begins or goes on now, out of the line then; None if there is none."""
        claimed = sum(map(self._claim, running))
        blocked: list[ActiveRequest] = []
        for active in self if not all(seq.busy for seq in sequences) else ():
            if not any(map(active.may_use, sequences)):
                continue
            if not running or claimed + self._claim(active) <= self._n_cells:
                for older in blocked:
                    older.passed += 1
                self._take(active)
                return active
            blocked.append(active)
            # What is suspended takes memory, so no more is begun that may have to be.
            if active.passed >= MOST_PASSED or len(self.suspended) >= len(sequences):
                break
        return None

    def _claim(self, active: ActiveRequest) -> int:
        """Cells that a request holds and is likely to take soon."""
        request = active.handle.request
        most = self._n_ctx if request.max_tokens < 0 else min(len(request.prompt) + request.max_tokens, self._n_ctx)
        return min(active.n_needed + self._reserve, most)

    def _take(self, active: ActiveRequest) -> None:
        if active.kept is None:
            self.queue.remove(active)
        else:
            self.suspended.remove(active)
