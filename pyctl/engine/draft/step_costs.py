"""Costs of steps, measured while decoding.

The unit is a plain step, in which each decoding request gets one token without drafts. Ratios to a
plain step hold longer than milliseconds, since both grow with the context.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from itertools import accumulate

import numpy as np

__all__ = ["BUDGET", "GRAPH_MS", "SLOPE", "CostCurve", "StepCosts"]

SLOPE = 0.1
"""Assumed cost of each further token of a step, in plain steps, until it is measured."""

GRAPH_MS = 12.0
"""Assumed milliseconds to capture a new CUDA graph."""

BUDGET = 24.0
"""Plain steps that drafts may lose before any have gained."""

REMEASURE = 256
"""Steps between measurements of plain ones."""

SAMPLES = 8
"""Latest measurements of a number of tokens that a curve keeps."""

PLAIN_SAMPLES = 4
"""Latest plain steps of which the time is taken: few, since it grows with the context."""

EXTENSION = 4096
"""Tokens beyond the last measurement up to which a curve continues as a line."""

SECOND_BATCH_UNIT = 8
"""Tokens of a second evaluation are rounded up to a multiple of this, so that samples repeat."""


class CostCurve:
    """A non-decreasing cost, in plain steps or milliseconds, by number of tokens.

    It is linear between measurements. Beyond all of them it continues with their last slope, at
    most ``steepest``. Before any it rises by ``slope`` from ``cost`` at ``start`` tokens.
    """

    def __init__(
        self,
        start: int = 0,
        cost: float = 0.0,
        slope: float = 0.0,
        steepest: float = math.inf,
    ) -> None:
        self._steepest = steepest
        self._samples: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=SAMPLES))
        self._tokens = [start, start + EXTENSION]
        self._costs = [cost, cost + EXTENSION * slope]
        self._computed: dict[int, float] = {}

    def add(self, n: int, cost: float) -> None:
        """Add a measurement in plain steps or ms. A single one per ``n`` is ignored: it may include
        loading kernels.
        """
        self._samples[n].append(cost)
        points = {self._tokens[0]: self._costs[0]}
        for n_tokens, samples in self._samples.items():
            if len(samples) > 1:
                points[n_tokens] = _quartile(samples)
        if len(points) > 1:
            tokens = sorted(points)  # a measurement may lie before the start
            costs = [points[n_tokens] for n_tokens in tokens]
            self._fit(tokens, costs)

    def _fit(self, tokens: list[int], costs: list[float]) -> None:
        """Lay the curve through two or more points, in order of their ``tokens``."""
        # More tokens cost no less: where measurements disagree, the earlier ones are lowered.
        costs = list(accumulate(reversed(costs), min))
        costs.reverse()
        cost_of_last = costs[-1] - costs[-2]
        n_last = tokens[-1] - tokens[-2]
        slope = min(cost_of_last / n_last, self._steepest)
        end = tokens[-1] + EXTENSION
        cost_at_end = costs[-1] + EXTENSION * slope
        self._tokens = [*tokens, end]
        self._costs = [*costs, cost_at_end]
        self._computed.clear()

    def __call__(self, n: int) -> float:
        cost = self._computed.get(n)
        if cost is None:
            cost = float(np.interp(n, self._tokens, self._costs))
            self._computed[n] = cost
        return cost


def _quartile(samples: deque[float]) -> float:
    """Return the lower quartile: other processes delay steps, and none makes one faster."""
    quarter = (len(samples) - 1) // 4
    return sorted(samples)[quarter]


class StepCosts:
    """Costs of steps for ``n_seqs`` requests; ``graph_ms`` is the time of a new CUDA graph.

    ``shared`` is the cost of a step by all its tokens, ``second`` the cost of a second evaluation
    in the same step by the tokens in it. ``budget`` is the plain steps that drafts may still lose.
    """

    def __init__(self, n_seqs: int, graph_ms: float) -> None:
        slope = SLOPE / n_seqs
        steepest = math.inf
        if graph_ms:
            # On a GPU the first tokens beyond a plain step cost more each than in wide steps.
            steepest = slope
        self.shared = CostCurve(n_seqs, 1.0, slope, steepest)
        self.second = CostCurve(n_seqs, 1.0, SLOPE / 2)
        self.n_seqs = n_seqs
        self.graph_ms = graph_ms
        self.plain_ms = 0.0
        self.n_steps = 0
        self.budget = BUDGET
        self._plain: deque[float] = deque(maxlen=PLAIN_SAMPLES)
        self._plain_measured_at = 0

    @property
    def graph(self) -> float:
        """Plain steps that a new CUDA graph takes; the second step of a width captures it."""
        if not self.plain_ms:  # not measured yet
            return 0.0
        return self.graph_ms / self.plain_ms

    def needs_plain(self) -> bool:
        """Return whether the next step should have no drafts."""
        if len(self._plain) < 2:
            return True
        n_since = self.n_steps - self._plain_measured_at
        n_between = REMEASURE * (1 + self.graph)
        return n_since >= n_between

    def add(self, n_tokens: int, ms: float, n_second: int = 0) -> None:
        """Count a step of ``n_tokens`` that took ``ms``, ``n_second`` of them in a second
        evaluation.
        """
        self.n_steps += 1
        if n_second:
            self._add_second(n_tokens, ms, n_second)
        elif n_tokens <= self.n_seqs:
            self._plain.append(ms)
            self.plain_ms = _quartile(self._plain)
            self._plain_measured_at = self.n_steps
        elif self.plain_ms:
            cost = max(ms / self.plain_ms, 1.0)
            self.shared.add(n_tokens, cost)

    def _add_second(self, n_tokens: int, ms: float, n_second: int) -> None:
        first_ms = self.plain_ms * self.shared(n_tokens - n_second)
        second_ms = max(ms - first_ms, 0.0)
        plain_ms = self.plain_ms or ms
        n_units = math.ceil(n_second / SECOND_BATCH_UNIT)
        n_rounded = n_units * SECOND_BATCH_UNIT
        self.second.add(n_rounded, second_ms / plain_ms)
