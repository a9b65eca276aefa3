"""What steps of an engine cost by their width, learnt from the steps themselves."""

from __future__ import annotations

import bisect
from collections import defaultdict, deque

__all__ = ["N_SETTLING", "Curve", "Samples", "StepCosts"]

N_FIRST = 3
"""Plain steps that are measured before the first draft, if nothing was measured before the first request."""

N_PLAIN = 2
"""Plain steps that are measured in any case: the first one after a prompt may build a graph."""

N_WARM = 2
"""The first steps of each width load kernels and build graphs, as the first drafts do: their time says nothing."""

OLD = 1024
"""Measurements are forgotten after so many steps."""

REVIEW = 64
"""After so many measurements it is looked which are too old."""


N_SETTLING = 2
"""So many steps after another width took part are slow on a GPU: the first without a graph, the next captures one."""

NEGLIGIBLE = 0.1
"""What such a step takes longer, in plain steps, before it is told from others."""

N_TESTED = 3
"""Measurements of a width in use that make a typical one, whatever disturbs one of them."""


class Samples:
    """The last ``n`` measurements of one thing, but for the first ``n_ignored`` ever."""

    def __init__(self, n: int = 9, n_ignored: int = 0) -> None:
        self._values: deque[tuple[int, float]] = deque(maxlen=n)
        self._n_ignored = n_ignored

    def add(self, step: int, value: float) -> None:
        """It measured ``value`` in that step."""
        if self._n_ignored:
            self._n_ignored -= 1
        else:
            self._values.append((step, value))

    def trust(self) -> None:
        """What comes next counts."""
        self._n_ignored = 0

    def __len__(self) -> int:
        return len(self._values)

    def typical(self, step: int) -> float | None:
        """The lower median, since what disturbs a measurement makes it longer; None if all are too old."""
        while self._values and self._values[0][0] < step - OLD:
            self._values.popleft()
        values = sorted(value for _, value in self._values)
        return values[(len(values) - 1) // 2] if values else None


class Curve:
    """What something costs by the number of tokens: ``cost`` for ``start`` of them, more for more.

    Before anything is known each token beyond these costs ``slope``.
    """

    def __init__(self, start: int, cost: float, slope: float) -> None:
        self._start, self._cost, self._slope = start, cost, slope
        self._samples: defaultdict[int, Samples] = defaultdict(lambda: Samples(n_ignored=N_WARM))
        self._rough: defaultdict[int, Samples] = defaultdict(lambda: Samples(n_ignored=N_WARM))
        self._given: dict[int, float] = {}
        self._n_seen = 0
        self._typical: dict[int, float] = {}
        self._points = {start: cost}
        self._tokens: list[int] = [start]
        self._costs: list[float] = [cost]
        self._known: dict[int, tuple[float, float]] = {}

    def saw(self, step: int, n: int, cost: float, *, is_settled: bool = True) -> None:
        """``n`` tokens did cost that; where others did before, it is an estimate that counts until there is better."""
        (self._samples if is_settled else self._rough)[n].add(step, cost)
        self._n_seen += 1
        for each in {*self._samples, *self._rough} if self._n_seen % REVIEW == 0 else [n]:
            self._weigh(step, each)
        self._draw()

    def know(self, n: int, cost: float) -> None:
        """``n`` tokens cost that before the first request, and what is measured from now on counts.

        What was done meanwhile on the same device may have made it longer; so the lower of two is believed, and less
        as soon as the width is in use.
        """
        self._samples[n].trust()
        self._given[n] = min(cost, self._given.get(n, cost))
        self._weigh(0, n)
        self._draw()

    def _weigh(self, step: int, n: int) -> None:
        typical, given = self._samples[n].typical(step), self._given.get(n)
        rough = self._rough[n].typical(step)
        if typical is None and rough is not None and (given is None or len(self._rough[n]) >= N_TESTED):
            typical = rough
        elif typical is None or (given is not None and len(self._samples[n]) == 1):
            typical = min((each for each in (typical, given) if each is not None), default=None)
        if typical is None:
            self._typical.pop(n, None)
        else:
            self._typical[n] = typical

    def _draw(self) -> None:
        points, most = {self._start: self._cost}, self._cost
        for each in sorted(self._typical):
            points[each] = most = max(self._typical[each], most)
        if points != self._points:
            self._points, self._tokens, self._costs = points, list(points), list(points.values())
            self._known.clear()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known."""
        return not self._typical

    def typical(self, n: int) -> float | None:
        """What exactly ``n`` tokens cost, if that is known."""
        return self._typical.get(n)

    def is_measured(self, n: int) -> bool:
        """Whether it is known what exactly ``n`` tokens cost."""
        return n in self._points

    def floor(self, n: int) -> float:
        """What ``n`` tokens cost at least, by what is known of fewer, or of as many, from their use."""
        used = (each for each in self._typical if each <= n)
        tested = (
            self._typical[each] for each in used if max(len(self._samples[each]), len(self._rough[each])) >= N_TESTED
        )
        return max(tested, default=self._cost)

    def of(self, n: int) -> tuple[float, float]:
        """What is expected, and what it cannot exceed."""
        if n not in self._known:
            self._known[n] = self._expected(n), self._worst(n)
        return self._known[n]

    def _expected(self, n: int) -> float:
        """Between two numbers that were measured, or in line with the last two."""
        tokens, costs = self._tokens, self._costs
        at = bisect.bisect_left(tokens, n)
        if at == 0:
            return self._cost
        if at == len(tokens):
            if at == 1:
                return costs[0] + (n - tokens[0]) * self._slope
            at -= 1
        slope = (costs[at] - costs[at - 1]) / (tokens[at] - tokens[at - 1])
        return costs[at - 1] + slope * (n - tokens[at - 1])

    def _worst(self, n: int) -> float:
        """Fewer tokens cost no more, and two halves no less than the whole."""
        at = bisect.bisect_left(self._tokens, n)
        pairs = zip(self._tokens[:at], self._costs[:at], strict=True)
        bounds = [-(-n // tokens) * cost for tokens, cost in pairs if tokens]
        return min(bounds + self._costs[at : at + 1], default=self._cost)


class StepCosts:
    """What steps for ``n_seqs`` requests take: a plain one in milliseconds, wider ones in plain steps.

    The first steps of a width after one of another take longer than those that follow, and are counted for themselves.
    """

    def __init__(self, n_seqs: int) -> None:
        self._n_seqs = n_seqs
        self._plain = Samples(3)
        self.wider = Curve(n_seqs, 1.0, 0.1 / n_seqs)
        self.plain_ms: float | None = None
        self.n_plain = 0
        self.is_known = False
        self.measured = 0  # the step of the last plain one
        self._settling = [Samples() for _ in range(N_SETTLING)]
        self._given_settling = [0.0] * N_SETTLING
        self._excess = [0.0] * N_SETTLING

    def know(self, n_tokens: int, ms: float) -> None:
        """A step that was made to be measured took this, with next to no context."""
        if n_tokens <= self._n_seqs:
            self.plain_ms = min(ms, self.plain_ms or ms)
            self.is_known, self.measured = True, -OLD
        elif self.plain_ms:
            self.wider.know(n_tokens, ms / self.plain_ms)

    def know_settling(self, ms: float) -> None:
        """The second step of a width took so much longer than the next, when that was measured; the first one less."""
        if self.plain_ms:
            self._given_settling[:] = [ms / self.plain_ms / (N_SETTLING + 1), ms / self.plain_ms]
            self._excess[:] = self._given_settling

    def excess(self, place: int) -> float:
        """What the step at this ``place`` since the last of another width takes longer, from 1 on."""
        return self._excess[place - 1] if place <= N_SETTLING else 0.0

    @property
    def change(self) -> float:
        """What it costs to go to another width."""
        return sum(self._excess)

    @property
    def is_fresh(self) -> bool:
        """Whether plain steps are still to be measured after a prompt, whatever was measured before the first one."""
        return self.n_plain < (N_PLAIN if self.is_settled(1) else 1)

    def is_settled(self, place: int) -> bool:
        """Whether that step takes no longer than those that follow."""
        return self.excess(place) < NEGLIGIBLE

    def saw(self, step: int, n_tokens: int, ms: float, place: int = N_SETTLING + 1) -> None:
        """A step took so long, at this ``place`` since the last of another width."""
        is_plain, is_settled = n_tokens <= self._n_seqs, self.is_settled(place)
        if self.plain_ms and place <= N_SETTLING:
            typical = 1.0 if is_plain else self.wider.typical(n_tokens)
            if typical is not None:
                self._settling[place - 1].add(step, max(ms / self.plain_ms - typical, 0.0))
                found = self._settling[place - 1].typical(step)
                few = len(self._settling[place - 1]) < N_TESTED
                self._excess[place - 1] = self._given_settling[place - 1] if few or found is None else found
        if is_plain:
            if is_settled or not self.plain_ms:
                self.n_plain += 1
                self.is_known = self.is_known or self.n_plain >= N_FIRST
                self._plain.add(step, ms)
                self.measured = step
                self.plain_ms = self._plain.typical(step)
        elif self.plain_ms:
            # As a ratio: both grow with the context.
            ratio = ms / self.plain_ms
            self.wider.saw(
                step, n_tokens, ratio if is_settled else max(ratio - self.excess(place), 1.0), is_settled=is_settled
            )
