"""What steps with drafts cost, measured before the first request: the first of each width loads kernels."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from pyctl.engine.backend import Evaluator, SequenceTokens
from pyctl.engine.draft.pace import LENGTHS, Pace
from pyctl.errors import EngineError
from pyctl.prompt import as_tokens

__all__ = ["calibrate"]

log = logging.getLogger(__name__)

SECONDS = 3.0
"""No measurement begins later."""

N_BEFORE, TOKEN = 8, 1
"""So much text there is before, which begins with this token, as that which is measured does."""

MOST_TOGETHER = 4
"""Company is measured for each number of requests up to this, and for all."""


def calibrate(pace: Pace, evaluator: Evaluator, longest: int, n_model: int) -> None:
    """Tell ``pace`` what drafts of up to ``longest`` tokens cost, those of the draft model up to ``n_model``.

    The sequences of ``evaluator`` are empty, before and afterwards.

    Everything is done four times: the first loads kernels, the second may build a graph, which says what it takes to
    go from one width to another, and the others count. What takes too long is left to be learnt on the way.
    """
    lengths = sorted({*range(1, n_model + 1), *(n for n in LENGTHS if n <= longest)})
    until = time.monotonic() + SECONDS
    try:
        for n_seqs in sorted({*range(1, min(evaluator.facts.n_seqs, MOST_TOGETHER) + 1), evaluator.facts.n_seqs}):
            _measure(pace, evaluator, n_seqs, [0, *lengths], n_model, until)
    except EngineError as error:
        log.warning("drafts could not be measured: %s", error)
    finally:
        for seq in range(evaluator.facts.n_seqs):
            evaluator.memory.clear(seq)


def _measure(pace: Pace, evaluator: Evaluator, n_seqs: int, lengths: Sequence[int], n_model: int, until: float) -> None:
    ends = dict.fromkeys(range(n_seqs), N_BEFORE)
    for seq in ends:
        evaluator.memory.clear(seq)
        evaluator.evaluate(seq, as_tokens(range(TOKEN, TOKEN + N_BEFORE)), 0)
    settling: list[float] = []
    facts = evaluator.facts
    for n in lengths:
        if n_seqs * (1 + n) > min(facts.n_outputs, facts.n_ubatch) or n > facts.most_drafts:
            break
        took: list[float] = []
        reading = math.inf  # of an output, which is no part of a step; the shortest, since anything may hold one up
        for attempt in range(4):
            if time.monotonic() > until:
                return
            evaluator.top_tokens(0, TOKEN, 1)  # the device has done what it was given
            began = time.perf_counter()
            if 0 < n <= n_model and facts.draft_type:
                evaluator.draft([SequenceTokens(seq, (TOKEN,), end) for seq, end in ends.items()], n)
            drafted = time.perf_counter()
            # All of them different, so that a mixture of experts needs as many as it would.
            tokens = tuple(range(TOKEN, TOKEN + 1 + n))
            evaluator.decode([SequenceTokens(seq, tokens, end) for seq, end in ends.items()])
            evaluator.top_tokens(0, TOKEN, 1)
            done = time.perf_counter()
            evaluator.top_tokens(0, TOKEN, 1)
            reading = min(reading, time.perf_counter() - done)
            for seq, end in ends.items():
                ends[seq] = evaluator.memory.rollback(seq, end + 1)
            took.append(max(done - drafted - reading, 0.0) * 1e3)
            if attempt > 1:
                pace.know_step(n_seqs, n_seqs * (1 + n), took[-1])
                if 0 < n <= n_model and facts.draft_type:
                    pace.know_proposal(facts.draft_type, n_seqs, n, (drafted - began) * 1e3 / n_seqs)
        settling.append(took[1] - min(took[2:]))
    if settling:
        pace.know_settling(n_seqs, max(sorted(settling)[(len(settling) - 1) // 2], 0.0))
