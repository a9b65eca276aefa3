"""Admission: requests that wait for a sequence and cells, by arrival."""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.reads import Reads
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import Snapshot
from pyctl.engine.backend import VerifyOutputs
from pyctl.engine.handle import RequestHandle
from pyctl.errors import OutOfCellsError
from pyctl.settings.limit import limit

__all__ = ["ActiveRequest", "Admission", "Occupancy", "Step", "Steps", "TurnState"]

MAX_PASSED = limit(
    8,
    "younger requests that may pass a request that waits for cells",
    "they wait for it",
    "request",
)

TURN_TOKENS = 64
"""Tokens that a reply evaluates before it may give way to a prompt. On a 27B they take one to two
seconds, and a copy of 20,000 rows to RAM and back 0.1 (bench/schedule.py).
"""

MAX_RESERVE = 2048
"""Tokens reserved for a reply when it starts, or an eighth of the context if that is less."""

Step: TypeAlias = tuple[int, ...] | Reads | OutOfCellsError | None
Steps: TypeAlias = Generator[Step, VerifyOutputs, None]
"""Yields None after a prefill batch, the next sure tokens while decoding (sent: Verify), Reads
during disk reads, and OutOfCellsError if a batch waits for cells of other requests.
"""


@dataclass
class TurnState:
    """The wait of a request, and its turns.

    ``n_overtakes`` counts younger requests that started while this one had no room, or was
    suspended. ``queue_position`` is its place among the waiting requests, 1 for the next; 0 once it
    runs. ``started`` is the clock's time at the start of its turn, ``n_start`` the tokens of its
    sequence then, with the whole prompt. ``has_stopped_reading``: a turn ended while it read from
    disk. ``keeps_cells``: its sequence could not be copied to RAM, so it gives way to no other.
    """

    n_overtakes: int = 0
    queue_position: int = 0
    started: float = 0.0
    n_start: int = 0
    has_stopped_reading: bool = False
    keeps_cells: bool = False


@dataclass(eq=False)
class ActiveRequest:
    """A request in the engine, with its sequence and the generator ``steps`` that runs it.

    It waits for ``step``. ``arrived`` numbers requests by arrival, ``id`` by start; ``stats`` is
    None before the start. ``submitted`` and ``started`` are seconds of the performance counter.
    ``suspended_snapshot`` holds a suspended request's sequence. ``ran_concurrently``: others ran at
    the same time. A background request starts after ``quiet`` seconds without a client's request;
    ``n_prewarmed`` counts its evaluated tokens across interruptions.
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
    suspended_snapshot: Snapshot | None = None
    turn: TurnState = field(default_factory=TurnState)
    ran_concurrently: bool = False
    quiet: float = 0.0
    n_prewarmed: int = 0

    @property
    def n_needed(self) -> int:
        """Cells for the whole prompt, or for the sequence if that is longer."""
        n_prompt = len(self.handle.request.prompt)
        if self.seq is None or self.stats is None:
            return n_prompt
        return max(self.seq.n, n_prompt)

    @property
    def pending(self) -> tuple[int, ...] | None:
        """Tokens of the reply that wait for evaluation after those in ``seq``; None during
        prefill.
        """
        return self.step if isinstance(self.step, tuple) else None

    @property
    def reads(self) -> Reads | None:
        """Pending disk reads, before the start also fetches from a store; None for none."""
        return self.step if isinstance(self.step, Reads) else None

    @property
    def can_yield(self) -> bool:
        """Return whether it can stop here and continue later.

        A read from disk starts again, so only the first one stops. An image continues only where
        its rows are.
        """
        if self.seq is None or self.stats is None or self.handle.request.background:
            return False
        if self.reads is not None:
            return not self.turn.has_stopped_reading
        return self.seq.n > 0 and not self.seq.in_image

    def reset(self) -> None:
        """Return to the state before the start."""
        if self.steps is not None:
            self.steps.close()
        self.seq = None
        self.steps = None
        self.stats = None
        self.step = None


class Occupancy:
    """Assignment of ``running`` requests to ``sequences``, and the ``last`` request of each
    sequence id.

    ``named`` are ids of sequences that clients requested by number and may request again.
    """

    def __init__(self, sequences: list[LiveSequence]) -> None:
        self.sequences = sequences
        self.running: list[ActiveRequest] = []
        self.last: dict[int, ActiveRequest] = {}
        self.named: set[int] = set()

    def owner(self, seq: LiveSequence) -> ActiveRequest | None:
        """Return the request that owns ``seq``; None if it is free."""
        return next((active for active in self.running if active.seq is seq), None)

    def used(self, seq: LiveSequence) -> int:
        """Return the id of the last request of ``seq``, -1 for none."""
        last = self.last.get(seq.id)
        return last.id if last is not None else -1

    def free_for(self, active: ActiveRequest) -> list[LiveSequence]:
        """Return the free sequences for ``active``: all, or only the requested one."""
        free = [seq for seq in self.sequences if self.owner(seq) is None]
        requested = active.handle.request.seq
        if requested < 0:
            return free
        return [seq for seq in free if seq.id == requested]

    def to_park(self) -> list[LiveSequence]:
        """Return nonempty sequences of ended requests: free ones, and those whose owner has not
        started.
        """
        owned = {
            active.seq.id
            for active in self.running
            if active.seq is not None and active.stats is not None
        }
        return [seq for seq in self.sequences if seq.n and seq.id not in owned]


class Admission:
    """Starts or resumes a request when its prompt and a reserve for its reply fit into the free
    cells.

    ``n_cells`` include the cells of running requests; a request that runs alone always fits.
    Prompts start in order of arrival, but up to MAX_PASSED younger ones that fit may pass one that
    does not. Suspended requests resume in order of arrival, after the prompts that wait, of which
    at most MAX_PASSED younger ones pass. ``queue`` and ``suspended`` are ordered by arrival.

    A prompt that has no room does not wait for the end of a reply: the youngest replies give way
    (`replies_to_suspend`). The oldest request never does, so every request ends.
    """

    def __init__(self, n_cells: int, n_ctx: int) -> None:
        self.queue: deque[ActiveRequest] = deque()
        self.suspended: list[ActiveRequest] = []
        self._n_cells = n_cells
        self._n_ctx = n_ctx
        self._reserve = max(min(n_ctx // 8, MAX_RESERVE), 1)

    def __bool__(self) -> bool:
        return bool(self.queue or self.suspended)

    def __iter__(self) -> Iterator[ActiveRequest]:
        """Iterate over all waiting requests by arrival."""
        return heapq.merge(self.suspended, self.queue, key=attrgetter("arrived"))

    def expected_order(self) -> Iterable[ActiveRequest]:
        """Return the waiting requests in the order in which they are expected to run."""
        passed = [each for each in self.suspended if each.turn.n_overtakes >= MAX_PASSED]
        others = [each for each in self.suspended if each.turn.n_overtakes < MAX_PASSED]
        return [*passed, *self.queue, *others]

    def n_alike(self, active: ActiveRequest, running: Sequence[ActiveRequest]) -> int:
        """Return how many requests that have not started share the prompt of ``active``: choices of
        one API request.
        """
        prompt = active.handle.request.prompt
        return sum(
            each.stats is None and each.handle.request.prompt is prompt
            for each in (*self.queue, *running)
        )

    def put_back(self, active: ActiveRequest) -> None:
        """Insert a request by arrival, among the suspended ones if it has a snapshot."""
        is_suspended = active.suspended_snapshot is not None
        insort(self.suspended if is_suspended else self.queue, active, key=attrgetter("arrived"))

    def clear(self) -> None:
        """Remove all waiting requests."""
        self.queue.clear()
        self.suspended.clear()

    def take_cancelled(self) -> list[ActiveRequest]:
        """Remove and return the cancelled requests."""
        cancelled = [active for active in self if active.handle.cancelled]
        for active in cancelled:
            self._take(active)
        return cancelled

    def take_next(self, occupancy: Occupancy) -> ActiveRequest | None:
        """Remove and return the request that starts or resumes now, None for none."""
        running = occupancy.running
        n_seqs = len(occupancy.sequences)
        if len(running) >= n_seqs:
            return None
        claimed = sum(map(self._claim, running))
        blocked: list[ActiveRequest] = []
        for active in self.expected_order():
            if not occupancy.free_for(active) or not _is_ready(active):
                continue
            if not running or claimed + self._claim(active) <= self._n_cells:
                _count_overtakes(active, {*blocked, *self.suspended})
                self._take(active)
                return active
            blocked.append(active)
            # Suspended requests take memory: start no more that may be suspended.
            if active.turn.n_overtakes >= MAX_PASSED or len(self.suspended) >= n_seqs:
                break
        return None

    def replies_to_suspend(self, occupancy: Occupancy) -> list[ActiveRequest]:
        """Return the running replies that give way to the first prompt that waits, the youngest
        first; none if that makes no room for it.

        A reply gives way after TURN_TOKENS, and while no prompt is evaluated: the device evaluates
        one at a time. The oldest request and those on a sequence of their client's choice stay.
        The suspended ones are at most as many as there are sequences, and fit into the context
        together, since RAM holds their rows.
        """
        running = occupancy.running
        prompt = self._prompt_without_room(running)
        if prompt is None:
            return []
        has_sequence = bool(occupancy.free_for(prompt))
        if not has_sequence and prompt.handle.request.seq >= 0:
            return []  # it waits for the sequence that its client named
        n_excess = sum(map(self._claim, running)) + self._claim(prompt) - self._n_cells
        n_in_ram = sum(each.n_needed for each in self.suspended)
        chosen: list[ActiveRequest] = []
        by_arrival = sorted(running, key=attrgetter("arrived"))
        for active in reversed(by_arrival[1:]):
            if n_excess <= 0 and (has_sequence or chosen):
                break
            if _gives_way(active):
                chosen.append(active)
                n_excess -= self._claim(active)
                n_in_ram += active.n_needed
        has_room = n_excess <= 0
        n_suspended = len(self.suspended) + len(chosen)
        has_ram = n_suspended <= len(occupancy.sequences) and n_in_ram <= self._n_cells
        return chosen if has_room and has_ram else []

    def _prompt_without_room(self, running: Sequence[ActiveRequest]) -> ActiveRequest | None:
        """Return the first prompt that waits, if ``running`` replies may give way to it; None if
        another request goes first.
        """
        prompt = next(filter(_is_ready, self.queue), None)
        if prompt is None or prompt.handle.cancelled or len(running) < 2:
            return None
        if any(each.turn.n_overtakes >= MAX_PASSED for each in self.suspended):
            return None  # a suspended one resumes before the prompt starts
        if any(active.pending is None for active in running):
            return None  # another prompt is evaluated
        return prompt

    def must_yield(self, running: Sequence[ActiveRequest]) -> ActiveRequest | None:
        """Return a running request whose turn is over; None where requests run at the same time."""
        return None

    def _claim(self, active: ActiveRequest) -> int:
        """Return the cells of a request and its reserve."""
        request = active.handle.request
        claim = min(active.n_needed + self._reserve, self._n_ctx)
        if request.max_tokens < 0:
            return claim
        return min(claim, len(request.prompt) + request.max_tokens)

    def _take(self, active: ActiveRequest) -> None:
        active.turn.n_start = active.n_needed
        if active.suspended_snapshot is None:
            self.queue.remove(active)
        else:
            self.suspended.remove(active)


def _count_overtakes(active: ActiveRequest, waiting: Iterable[ActiveRequest]) -> None:
    """Count that ``active`` passes those of the ``waiting`` requests that arrived before it."""
    for other in waiting:
        if other.arrived < active.arrived:
            other.turn.n_overtakes += 1


def _is_ready(active: ActiveRequest) -> bool:
    """Return whether a waiting request has no reads from an object store before it."""
    return active.reads is None or active.reads.ready()


def _gives_way(active: ActiveRequest) -> bool:
    """Return whether a running reply has had its turn, and can continue later."""
    if active.handle.request.seq >= 0 or active.turn.keeps_cells or not active.can_yield:
        return False
    return active.n_needed - active.turn.n_start >= TURN_TOKENS
