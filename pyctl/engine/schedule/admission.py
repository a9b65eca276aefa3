"""Requests that wait for a sequence and for cells, in the order in which they came."""

from __future__ import annotations

import contextlib
import heapq
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeAlias, TypeVar

from pyctl.cache import LiveSequence, Reads, RequestStats, Snapshot
from pyctl.engine.decode import PendingTokens, Verify
from pyctl.engine.handle import RequestHandle
from pyctl.errors import OutOfCellsError
from pyctl.limit import limit

__all__ = ["ActiveRequest", "Admission", "Job", "Occupancy", "Step", "Steps"]

R = TypeVar("R")

MOST_PASSED = limit(
    8, "younger requests that may pass one for whose cells there is no room yet", "they wait for it", "request"
)

MOST_RESERVE = 2048
"""Tokens of a reply, or an eighth of the context if that is less, for which there is room when it begins."""

Step: TypeAlias = PendingTokens | Reads | OutOfCellsError | None
Steps: TypeAlias = Generator[Step, Verify, None]
"""None after a prefill batch, PendingTokens while decoding, which Verify answers, Reads while the disk is read, and
the error where a batch has to wait until another request makes way."""


@dataclass(eq=False)
class ActiveRequest:
    """A request on its way, the sequence that serves it, and the generator that does.

    ``step`` is what it waits for. ``arrived`` counts requests as they come, ``id`` as they begin; ``stats`` is there
    when the work has begun. ``submitted`` and ``started`` are seconds of the performance counter. A suspended one has
    ``kept`` what its sequence held. ``passed`` is how many younger ones began while there was no room for it,
    ``in_company`` says that others ran at the same time. A background request begins after ``quiet`` seconds without a
    client's request, and has evaluated ``n_warmed`` tokens, whenever it ran.
    """

    handle: RequestHandle
    arrived: int = 0
    id: int = -1
    stats: RequestStats | None = None
    submitted: float = field(default_factory=time.perf_counter)
    seq: LiveSequence | None = None
    steps: Steps | None = None
    step: Step = None
    started: float = 0.0
    kept: Snapshot | None = None
    passed: int = 0
    in_company: bool = False
    quiet: float = 0.0
    n_warmed: int = 0

    @property
    def n_needed(self) -> int:
        """Cells that it holds, with those for all of its prompt."""
        n_prompt = len(self.handle.request.prompt)
        return n_prompt if self.seq is None or self.stats is None else max(self.seq.n, n_prompt)

    @property
    def pending(self) -> PendingTokens | None:
        """Tokens of its reply that wait to be evaluated; None while its prompt is."""
        return self.step if isinstance(self.step, PendingTokens) else None

    @property
    def reads(self) -> Reads | None:
        """What it reads from disk; None if it does not."""
        return self.step if isinstance(self.step, Reads) else None

    @property
    def n_pending(self) -> int:
        """Tokens of its reply that wait to be evaluated."""
        return len(self.pending.tokens) if self.pending is not None else 0

    @property
    def n_missing(self) -> int:
        """Tokens of its prompt that are not evaluated; all of them as long as it has not begun."""
        n_prompt = len(self.handle.request.prompt)
        return n_prompt if self.seq is None or self.stats is None else n_prompt - self.seq.n

    def unbegin(self) -> None:
        """Let nothing be begun of it."""
        if self.steps is not None:
            self.steps.close()
        self.seq, self.steps, self.stats, self.step = None, None, None, None


class Job(Generic[R]):
    """A function to be called between two steps, as soon as no request owns sequence ``seq``, and its result.

    ``seq`` -1 is none. With ``needs_model`` a model that is freed is loaded for it.
    """

    def __init__(self, function: Callable[[], R], *, needs_model: bool = False, seq: int = -1) -> None:
        self.future: Future[R] = Future()
        self.needs_model, self.seq = needs_model, seq
        self._function = function

    def run(self) -> None:
        """Call the function, unless the future was cancelled."""
        if self.future.set_running_or_notify_cancel():
            try:
                result = self._function()
            except BaseException as error:
                with contextlib.suppress(Exception):  # it has failed already if the thread was given up
                    self.future.set_exception(error)
            else:
                with contextlib.suppress(Exception):
                    self.future.set_result(result)

    def fail(self, error: Exception | None) -> None:
        """Say that it will never be called, or not end: with ``error``, or as cancelled."""
        with contextlib.suppress(Exception):
            if error is None:
                self.future.cancel()
            elif self.future.running() or self.future.set_running_or_notify_cancel():
                self.future.set_exception(error)


class Occupancy:
    """Which of the ``running`` requests owns which of ``sequences``, and which one each served ``last``.

    ``named`` are the ids of sequences that clients called by number, so that they may come back to them.
    """

    def __init__(self, sequences: list[LiveSequence]) -> None:
        self.sequences = sequences
        self.running: list[ActiveRequest] = []
        self.last: dict[int, ActiveRequest] = {}
        self.named: set[int] = set()

    def owner(self, seq: LiveSequence) -> ActiveRequest | None:
        """The request that owns ``seq``; None if it is free."""
        return next((active for active in self.running if active.seq is seq), None)

    def used(self, seq: LiveSequence) -> int:
        """The number of the request that ``seq`` served last, -1 for none."""
        return self.last[seq.id].id if seq.id in self.last else -1

    def free_for(self, active: ActiveRequest) -> list[LiveSequence]:
        """The free sequences that ``active`` may have: all, or the one that it asks for."""
        asked = active.handle.request.seq
        return [seq for seq in self.sequences if asked in (-1, seq.id) and self.owner(seq) is None]

    def to_park(self) -> list[LiveSequence]:
        """The sequences with tokens of a request that is over: free ones, and those whose owner has not begun."""
        owned = {active.seq.id for active in self.running if active.seq is not None and active.stats is not None}
        return [seq for seq in self.sequences if seq.n and seq.id not in owned]


class Admission:
    """Lets a request begin, or a suspended one resume, when its prompt and a reserve for its reply fit.

    They have to fit into ``n_cells`` in addition to the cells of the running ones; a request alone, of at most
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
        """The cancelled ones; they are out of the queue then."""
        found = [active for active in self if active.handle.cancelled]
        for active in found:
            self._take(active)
        return found

    def take_next(self, occupancy: Occupancy) -> ActiveRequest | None:
        """The one that begins or resumes now, out of the queue then; None if there is none."""
        running, n_seqs = occupancy.running, len(occupancy.sequences)
        claimed = sum(map(self._claim, running))
        blocked: list[ActiveRequest] = []
        for active in self if len(running) < n_seqs else ():
            if not occupancy.free_for(active):
                continue
            if not running or claimed + self._claim(active) <= self._n_cells:
                for older in blocked:
                    older.passed += 1
                self._take(active)
                return active
            blocked.append(active)
            # Suspended requests take memory, so no more begin that may have to be suspended.
            if active.passed >= MOST_PASSED or len(self.suspended) >= n_seqs:
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
