"""What the engine shows of itself: counters, views of its sequences, and lines in the log during a long prefill."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field

from pyctl.cache import BlockBytes, CacheView, DeviceCounts
from pyctl.engine.engine_settings import Clock
from pyctl.engine.pool import StreamCounts
from pyctl.engine.request import DraftCounts, Request, Timings
from pyctl.limit import limit

__all__ = [
    "MOST_REPLIES",
    "EngineCounters",
    "EngineMemory",
    "EngineStats",
    "PrefillLog",
    "RecentReplies",
    "SequenceFile",
    "SequenceView",
]


@dataclass
class EngineCounters:
    """Sums since the start; ``n_*`` are tokens except for the calls of llama_decode, times are milliseconds.

    ``n_busy`` adds up the sequences of each call, ``n_longest`` is the longest sequence seen, ``n_suspended`` counts
    how often a reply had to give its cells to others. What a request evaluates,
    predicts and drafts counts when it is served; requests that were cancelled count as calls only.
    """

    n_calls: int = 0
    n_busy: int = 0
    n_longest: int = 0
    n_cached: int = 0
    n_evaluated: int = 0
    prompt_ms: float = 0.0
    n_predicted: int = 0
    predicted_ms: float = 0.0
    n_suspended: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)

    def count_call(self, n_seqs: int, length: int) -> None:
        """One call for ``n_seqs`` sequences, the longest of which has ``length`` tokens now."""
        self.n_calls += 1
        self.n_busy += n_seqs
        self.n_longest = max(self.n_longest, length)

    def count_embedded(self, n_tokens: int, ms: float) -> None:
        """A text was evaluated for its embeddings or its rank."""
        self.n_calls += 1
        self.n_busy += 1
        self.n_evaluated += n_tokens
        self.prompt_ms += ms

    def count_reply(self, timings: Timings) -> None:
        """A request ended with a reply."""
        self.n_cached += timings.n_cached
        self.n_evaluated += timings.n_evaluated
        self.prompt_ms += timings.prompt_ms
        self.n_predicted += timings.n_predicted
        self.predicted_ms += timings.predicted_ms
        self.drafts += timings.drafts


MOST_REPLIES = limit(128, "replies whose speeds GET /cache tells", "the oldest are forgotten", "memory")

_HOUR = 3600.0


class RecentReplies:
    """What the last replies of the last hour took."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._replies: deque[tuple[float, Timings]] = deque(maxlen=MOST_REPLIES)

    def add(self, timings: Timings) -> None:
        """A request ended with a reply."""
        self._replies.append((self._clock(), timings))

    def by_age(self) -> list[tuple[float, Timings]]:
        """Each with its age in seconds, the oldest first."""
        now = self._clock()
        return [(now - at, timings) for at, timings in self._replies if now - at < _HOUR]


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of the snapshots in RAM, of all saved blocks, of the recent prompts, of texts to draft from, of images."""

    snapshots: int
    blocks: BlockBytes
    recent_prompts: int
    draft_texts: int = 0
    images: int = 0


@dataclass(frozen=True)
class EngineStats:
    """What was done since the start, and ``recent``ly, since it was asked for last; how many requests run and wait now.

    Of those that wait, ``n_suspended`` replies have begun and hold ``suspended_bytes`` of RAM, part of the cache's.
    ``n_cells`` of the context are there, ``n_cells_used`` taken by sequences and ``n_cells_held`` by rows of snapshots
    alone; ``device`` counts what became of these. ``streamed`` is what attention read from RAM, None without a pool.
    """

    total: EngineCounters
    recent: EngineCounters
    n_processing: int
    n_waiting: int
    n_suspended: int
    suspended_bytes: int
    n_cells: int
    n_cells_used: int
    n_cells_held: int
    device: DeviceCounts
    cache: CacheView
    memory: EngineMemory
    streamed: StreamCounts | None = None


@dataclass(frozen=True)
class SequenceView:
    """One sequence. ``task`` counts the requests and is -1 before the first, whose ``request`` is None.

    ``n_tokens`` are in the sequence, of which ``prompt`` arrived and ``reply`` was generated. The other counts are of
    the request that is served now, 0 for none: prompt tokens restored and evaluated, and tokens predicted.
    """

    id: int
    n_ctx: int
    busy: bool
    task: int = -1
    request: Request | None = None
    n_tokens: int = 0
    n_cached: int = 0
    n_evaluated: int = 0
    n_predicted: int = 0
    prompt: tuple[int, ...] = ()
    reply: tuple[int, ...] = ()


@dataclass(frozen=True)
class SequenceFile:
    """A sequence was saved or restored: tokens, bytes of the file, milliseconds."""

    n_tokens: int
    n_bytes: int
    ms: float


LINE_SECONDS = 5.0
"""Between two lines; a prefill that is shorter gets none."""

log = logging.getLogger(__name__)


class PrefillLog:
    """Tells how far the prefill of request ``task`` has come, from ``start`` to ``n_prompt`` tokens."""

    def __init__(self, task: int, start: int, n_prompt: int) -> None:
        self._task, self._start, self._n_prompt = task, start, n_prompt
        self._began = time.monotonic()
        self._next_line = self._began + LINE_SECONDS

    def reached(self, n: int) -> None:
        """The first ``n`` tokens are evaluated."""
        now = time.monotonic()
        if now < self._next_line or n >= self._n_prompt:
            return
        self._next_line = now + LINE_SECONDS
        speed = (n - self._start) / (now - self._began)
        log.info(
            "prefill      %7s of %s tokens  %3d %%  %6.0f tok/s  %4.0f s left  request %d",
            *(f"{n:,}", f"{self._n_prompt:,}", 100 * n // self._n_prompt),
            *(speed, (self._n_prompt - n) / speed, self._task),
        )
