"""Observability of the engine: counters, views of its sequences, and log lines during a long
prefill.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import msgspec

from pyctl.cache.cache_stats import CacheView
from pyctl.cache.costs import Costs
from pyctl.cache.device_tier import DeviceCounts
from pyctl.cache.snapshot import BlockBytes
from pyctl.engine.engine_settings import Clock
from pyctl.engine.histograms import ReplyHistograms, ReplySource
from pyctl.engine.request import DraftCounts, Request, Timings

__all__ = [
    "EngineCounters",
    "EngineMemory",
    "EngineStats",
    "PrefillLog",
    "SequenceFile",
    "SequenceView",
]


@dataclass
class EngineCounters:
    """Totals since the start; ``n_*`` are tokens except as noted, times are milliseconds.

    ``n_calls`` counts llama_decode calls, ``n_busy`` sums their sequences, ``n_longest`` is the
    length of the longest sequence, ``n_suspended`` counts suspended replies, ``n_turns_yielded``
    turns with --exact that ended for another request. ``n_loops`` counts replies with a loop,
    ``n_loops_ended`` those that --loop-guard ended. Tokens of a request count when it ends with a
    reply; cancelled requests count as calls only.
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
    n_turns_yielded: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    replies: ReplyHistograms = field(default_factory=ReplyHistograms)
    n_loops: int = 0
    n_loops_ended: int = 0

    def count_call(self, n_seqs: int, length: int) -> None:
        """Count one call for ``n_seqs`` sequences, the longest with ``length`` tokens after it."""
        self.n_calls += 1
        self.n_busy += n_seqs
        self.n_longest = max(self.n_longest, length)

    def count_embedded(self, n_tokens: int, ms: float) -> None:
        """Count one text evaluated for embeddings or rank."""
        self.n_calls += 1
        self.n_busy += 1
        self.n_evaluated += n_tokens
        self.prompt_ms += ms

    def count_reply(self, timings: Timings, source: ReplySource = "none") -> None:
        """Count a request that ended with a reply, and that resumed at a prefix from ``source``."""
        self.n_cached += timings.n_cached
        self.n_evaluated += timings.n_evaluated
        self.prompt_ms += timings.prompt_ms
        self.n_predicted += timings.n_predicted
        self.predicted_ms += timings.predicted_ms
        self.drafts += timings.drafts
        if timings.loop is not None:
            self.n_loops += 1
            self.n_loops_ended += timings.loop.is_ended
        if timings.n_predicted:
            self.replies.count_reply(timings, source)


class EngineMemory(msgspec.Struct, frozen=True):
    """Bytes of RAM snapshots, all saved blocks, recent prompts, texts to draft from, and encoded
    images.
    """

    snapshots: int
    blocks: BlockBytes
    recent_prompts: int
    draft_texts: int = 0
    images: int = 0


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since the start (``total``) and since the previous query (``recent``), and the
    current load.

    Of ``n_waiting`` requests, ``n_suspended`` have started and hold ``suspended_bytes`` of the
    cache's RAM. The context has ``n_cells``: sequences use ``n_cells_used``, held rows
    ``n_cells_held``; ``device`` counts uses of held rows.
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


@dataclass(frozen=True)
class SequenceView:
    """A sequence. ``task`` is the id of its last request; before the first it is -1 and
    ``request`` is None.

    The sequence holds ``n_tokens``. ``n_cached``, ``n_evaluated``, ``n_predicted`` and
    ``has_new_line``, of the reply, belong to the running request, 0 for none; so do the received
    ``prompt`` and the generated ``reply``, if asked for.
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
    has_new_line: bool = False
    prompt: tuple[int, ...] = ()
    reply: tuple[int, ...] = ()


class SequenceFile(msgspec.Struct, frozen=True):
    """Result of saving or restoring a sequence: tokens, bytes of the file, milliseconds."""

    n_tokens: int
    n_bytes: int
    ms: float


LINE_SECONDS = 5.0
"""Seconds between two lines; a shorter prefill logs none."""

log = logging.getLogger(__name__)


class PrefillLog:
    """Logs the progress of the prefill of request ``task``, from ``start`` to ``n_prompt`` tokens.

    The rest takes as many times the prediction of ``costs`` as the tokens that are evaluated took.
    """

    def __init__(
        self, task: int, start: int, n_prompt: int, costs: Costs, clock: Clock = time.monotonic
    ) -> None:
        self._task = task
        self._start = start
        self._n_prompt = n_prompt
        self._costs = costs
        self._clock = clock
        self._began = clock()
        self._next_line = self._began + LINE_SECONDS
        self.seconds_left = 0.0
        """Seconds until the prompt is evaluated; 0 if unknown."""

    def reached(self, n: int) -> None:
        """Record that the first ``n`` tokens are evaluated."""
        now = self._clock()
        n_new = n - self._start
        passed = now - self._began
        expected = self._costs.evaluate(self._start, n)
        self.seconds_left = (
            passed * self._costs.evaluate(n, self._n_prompt) / expected if expected else 0.0
        )
        if now < self._next_line or n >= self._n_prompt:
            return
        self._next_line = now + LINE_SECONDS
        log.info(
            "prefill      %7s of %s tokens evaluated  %3d %%  %6.0f tok/s  %4.0f s to go  "
            "request %d",
            *(f"{n:,}", f"{self._n_prompt:,}", 100 * n // self._n_prompt),
            *(n_new / passed if passed else 0.0, self.seconds_left, self._task),
        )
