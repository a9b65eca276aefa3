"""A prompt on its way into its sequence, batch by batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from pyctl.cache.cache_stats import RequestStats
from pyctl.engine.admission import ActiveRequest, Steps
from pyctl.engine.engine_stats import PrefillLog
from pyctl.engine.request import Progress
from pyctl.engine.sequence import LiveSequence

__all__ = ["PrefillTurns", "prefill"]


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


def prefill(
    active: ActiveRequest,
    seq: LiveSequence,
    ends: Sequence[int],
    n_full: int,
    evaluate: Callable[[int], bool],
    after: Callable[[int], None],
) -> Steps:
    """Have ``evaluate`` append what is missing of the prompt up to each of ``ends``, as soon as it finds room for it.

    A batch of ``n_full`` tokens is full. ``after`` is called when an end has been reached.
    """
    assert active.stats is not None
    prompt, stats = active.handle.request.prompt, active.stats
    began, save_before = time.perf_counter(), stats.save_ms
    shown = PrefillLog(active.id, seq.n, len(prompt))
    _tell_progress(active, seq, stats)
    for previous, end in itertools.pairwise([0, *ends]):
        if end <= seq.n:
            continue
        while not evaluate(end):
            yield None
        # The very end of a prompt is a batch end of longer prompts only if it fills its batch.
        seq.append(prompt.tokens[seq.n : end], exact=end < len(prompt) or end - previous == n_full)
        shown.reached(end)
        after(end)
        _tell_progress(active, seq, stats)
        if end < len(prompt):
            yield None
    stats.n_evaluated = len(prompt) - stats.n_cached
    stats.prefill_ms = (time.perf_counter() - began) * 1e3 - (stats.save_ms - save_before)


def _tell_progress(active: ActiveRequest, seq: LiveSequence, stats: RequestStats) -> None:
    if active.handle.request.return_progress:
        ms = (time.perf_counter() - active.started) * 1e3
        active.handle.put(Progress(stats.n_prompt, stats.n_cached, seq.n, ms, stats.source, seq.id))
