"""Loops of replies: a model that repeats the same tokens until a limit ends the reply.

A reply has period p over its last n tokens if each of them equals the token p places before it.
Real text is periodic as well, in tables, separators and data; `bench.loops` counts the files that
the rule takes for a loop (bench/results/loops.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyctl.prompt import Tokens

__all__ = ["LoopDetector", "ReplyLoop"]

MAX_PERIOD = 512
"""Longest period in tokens, about a paragraph or a function; the cost of a token grows with it."""

MIN_TOKENS = 400
"""Fewer periodic tokens are not a loop."""

MIN_REPEATS = 5
"""Fewer repetitions of the first block are not a loop."""


@dataclass(frozen=True)
class ReplyLoop:
    """The loop of a reply.

    Attributes:
        period: The tokens of the block that is repeated.
        n_tokens: The tokens that repeat it, without its first occurrence.
        is_ended: Whether --loop-guard ended the reply because of it.
    """

    period: int
    n_tokens: int
    is_ended: bool = False


class LoopDetector:
    """The detector of loops in one reply to ``prompt``, shape (n,).

    `observe` costs the same for each token: one comparison with each of the last MAX_PERIOD tokens.
    The reply may also repeat a block that the prompt repeats: the prompt is searched each
    time that the length of a run has doubled, so a reply of n tokens takes log2(n) searches.
    """

    def __init__(self, prompt: Tokens) -> None:
        self._prompt = prompt
        # The last tokens, twice in a row: a slice has them in order at any time.
        self._recent = np.full(2 * MAX_PERIOD, -1, np.int32)
        self._place = 0
        # By the distance to the token before, from MAX_PERIOD to 1: equal tokens up to now.
        self._runs = np.zeros(MAX_PERIOD, np.int32)
        distances = np.arange(MAX_PERIOD, 0, -1, dtype=np.int32)
        self._thresholds = np.maximum(MIN_REPEATS * distances, MIN_TOKENS)
        self._next_run = MIN_TOKENS

    def observe(self, token: int) -> ReplyLoop | None:
        """Record a token of the reply; return the loop if it makes one."""
        recent = self._recent[self._place : self._place + MAX_PERIOD]
        self._runs += 1
        self._runs *= recent == token
        self._recent[self._place] = token
        self._recent[self._place + MAX_PERIOD] = token
        self._place = (self._place + 1) % MAX_PERIOD
        if int(self._runs.max()) < self._next_run:
            return None
        return self._find_loop()

    def _find_loop(self) -> ReplyLoop | None:
        """Return the loop of the shortest period whose run is long enough; None if there is none,
        or the prompt repeats its block.
        """
        loops = np.flatnonzero(self._runs >= self._thresholds)
        if not loops.size:
            return None
        index = int(loops[-1])
        period = MAX_PERIOD - index
        n_tokens = int(self._runs[index])
        last = self._recent[self._place : self._place + MAX_PERIOD][-period:]
        if self._is_in_prompt(last):
            self._next_run = 2 * n_tokens
            return None
        return ReplyLoop(period, n_tokens)

    def _is_in_prompt(self, block: Tokens) -> bool:
        """Return whether the prompt has ``block`` twice in a row."""
        twice = np.concatenate([block, block]).tobytes()
        text = self._prompt.tobytes()
        place = text.find(twice)
        while place >= 0 and place % self._prompt.itemsize:
            place = text.find(twice, place + 1)
        return place >= 0
