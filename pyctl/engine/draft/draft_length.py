"""Draft lengths: the controller chooses the length with the most expected tokens per second.

The unit of cost is a plain step, in which each decoding request gets one token without drafts. With
p the moving share of accepted drafts, the gain of n drafts is (1 + p + ... + p^n) / cost. The cost
sums the proposal of n tokens, the measured step of that width, the repeated evaluation of accepted
drafts after a rollback, and a new CUDA graph. While the best gain is below `MIN_GAIN`, a model
pauses; a short probe ends each pause. Texts need none: what they propose is compared with the
reply, evaluated or not. A budget limits the time lost. What continues a draft of another source has
to gain as much beyond that draft.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

__all__ = ["GRAPH_MS", "LENGTHS", "DraftLengthController", "Origin"]

LENGTHS = (1, 2, 3, 4, 8, 16, 32, 64, 128)  # compared, in addition to the longest allowed
MIN_GAIN = 1.02  # speedup by drafts below which a source pauses
# tokens; pauses double, up to 16 times, while drafts do not pay
MIN_PAUSE = 6
MAX_PAUSE = 512
PROBE = 2
# drafts may lose this share of time and this many plain steps; credit is capped at twice
LOSS = 0.02
BUDGET = 24.0
# prior of the accepted share, and its weight in drafts
PRIOR = 0.8
PRIOR_WEIGHT = 3.0
DOUBT = 0.6  # standard deviations
MATCHED = (1, 4, 16, 64)  # matching tokens from which on shares differ
# decay of evidence per draft, in a request and in a source
REQUEST_DECAY = 0.06
SOURCE_DECAY = 0.02
# steps between measurements of plain ones; steps per CUDA graph of a draft model
REMEASURE = 256
GRAPH_STEPS = 16
# assumed: plain steps for each further token; milliseconds of a new CUDA graph
SLOPE = 0.1
GRAPH_MS = 12.0


class Origin(NamedTuple):
    """Where drafts come from: a model, or the place of a text where so many tokens ``matched``, of
    `MATCHED`.

    With ``is_before`` they are those that ``source`` continues there.
    """

    source: str
    matched: int = 0
    is_before: bool = False

    @classmethod
    def of(cls, source: str, n_matched: int) -> Origin:
        """Return the origin of drafts after ``n_matched`` tokens."""
        return cls(source, max((n for n in MATCHED if n <= n_matched), default=0))

    @property
    def prior(self) -> float:
        """The share of right tokens before any is known: what a text went on with for n tokens ends
        in one of n + 1.
        """
        return self.matched / (1 + self.matched) if self.matched else PRIOR

    def counted(self, n: int) -> int:
        """Return how many of ``n`` drafts are evidence: after as many right ones, more tokens would
        have matched.
        """
        return min(n, self.matched) if self.matched else n


class CostCurve:
    """A non-decreasing cost, plain steps or ms, by number of tokens: linear between measurements,
    ``slope`` before any, and beyond all of them at most ``steepest``.
    """

    def __init__(
        self, start: int = 0, cost: float = 0.0, slope: float = 0.0, steepest: float = math.inf
    ) -> None:
        self._steepest = steepest
        self._samples: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=8))
        self._known: dict[int, float] = {}
        self._tokens = [start, start + 4096]
        self._costs = [cost, cost + 4096 * slope]

    def add(self, n: int, cost: float) -> None:
        """Add a measurement in plain steps or ms. A single one per ``n`` is ignored: it may include
        loading kernels.
        """
        self._samples[n].append(cost)
        found = {self._tokens[0]: self._costs[0]}
        found |= {
            each: _quartile(samples)
            for each, samples in sorted(self._samples.items())
            if len(samples) > 1
        }
        if len(found) > 1:
            tokens = list(found)
            costs = [*accumulate([*found.values()][::-1], min)][::-1]
            slope = min((costs[-1] - costs[-2]) / (tokens[-1] - tokens[-2]), self._steepest)
            self._tokens = [*tokens, tokens[-1] + 4096]
            self._costs = [*costs, costs[-1] + 4096 * slope]
            self._known.clear()

    def __call__(self, n: int) -> float:
        if n not in self._known:
            self._known[n] = float(np.interp(n, self._tokens, self._costs))
        return self._known[n]


def _quartile(samples: deque[float]) -> float:
    return sorted(samples)[(len(samples) - 1) // 4]  # other processes may delay a step


class StepCosts:
    """Costs of steps for ``n_seqs`` requests, measured while decoding; ``graph_ms`` is what a new
    CUDA graph takes.
    """

    def __init__(self, n_seqs: int, graph_ms: float) -> None:
        slope = SLOPE / n_seqs
        # On a GPU the first few tokens beyond a plain step cost more each than those of wide steps.
        self.of = CostCurve(n_seqs, 1.0, slope, slope if graph_ms else math.inf)
        self.apart = CostCurve(n_seqs, 1.0, SLOPE / 2)
        self.n_seqs = n_seqs
        self.plain_ms = 0.0
        self.graph_ms = graph_ms
        self.n_steps = 0
        self._measured = 0
        self.budget = BUDGET  # plain steps that drafts may lose
        self.plain: deque[float] = deque(maxlen=4)  # milliseconds, at the current context length

    @property
    def graph(self) -> float:
        """What a new CUDA graph costs, in plain steps: the second step of a width captures it."""
        return self.graph_ms / self.plain_ms if self.plain_ms else 0.0

    def needs_plain(self) -> bool:
        """Whether the next step should have no drafts."""
        return len(self.plain) < 2 or self.n_steps - self._measured >= REMEASURE * (1 + self.graph)

    def add(self, n_tokens: int, ms: float, n_apart: int = 0) -> None:
        """Count a step of ``n_tokens``, ``n_apart`` of them in a second evaluation, that took
        ``ms``.
        """
        self.n_steps += 1
        if n_apart:
            others = self.plain_ms * self.of(n_tokens - n_apart)
            self.apart.add(-(-n_apart // 8) * 8, max(ms - others, 0.0) / (self.plain_ms or ms))
        elif n_tokens <= self.n_seqs:
            self.plain.append(ms)
            self.plain_ms = _quartile(self.plain)
            self._measured = self.n_steps
        elif self.plain_ms:  # as a ratio, since both grow with the context
            self.of.add(n_tokens, max(ms / self.plain_ms, 1.0))


class DraftState:
    """The moving share of accepted drafts of a source, in one request or in all, and the last
    decision.
    """

    def __init__(self, decay: float = REQUEST_DECAY) -> None:
        self._keep = 1 - decay
        self._n_tried = 0.0
        self._n_right = 0.0
        # tokens left of a pause, which a probe ends
        self.pause = 0
        self.is_probing = False
        # inputs for which `length` was chosen
        self.inputs = (0, 0, 0, 0, (0, 0))
        self.length = 0

    def add(self, n_drafted: int, n_accepted: int) -> None:
        """Count a draft."""
        self._n_tried = self._n_tried * self._keep + min(n_accepted + 1, n_drafted)
        self._n_right = self._n_right * self._keep + n_accepted
        right = 0 < n_drafted <= 2 * n_accepted
        self.length = 0
        self.is_probing = self.is_probing and right

    def rest(self, n_tokens: int) -> None:
        """Pause for ``n_tokens`` and reduce the evidence to the prior's weight, so that the next
        drafts decide.
        """
        scale = PRIOR_WEIGHT / max(self._n_tried, PRIOR_WEIGHT)
        self._n_tried = self._n_tried * scale
        self._n_right = self._n_right * scale
        self.pause = n_tokens
        self.is_probing = True

    def share(self, prior: float, doubt: float = 0.0) -> float:
        """Return the estimated share of right tokens, ``doubt`` deviations higher where that is at
        most ``prior``.
        """
        n = self._n_tried + PRIOR_WEIGHT
        seen = (self._n_right + PRIOR_WEIGHT * prior) / n
        return min(max(seen, min(seen + doubt * math.sqrt(seen * (1 - seen) / n), prior)), 0.999)


class _ExpectedGain(NamedTuple):
    """``n`` drafts: the speed with them, as a multiple of that without, and what they cost in plain
    steps.
    """

    gain: float
    cost: float
    n: int


def _sum(p: float, n: int) -> float:
    """Return the tokens expected of a step with ``n`` drafts."""
    return (1 - p ** (n + 1)) / (1 - p)


class DraftLengthController:
    """Chooses draft lengths and learns from results. Only the engine's thread calls it.

    Drafts over ``n_free`` tokens cost a repeated evaluation of the accepted ones on rollback. With
    ``has_planes`` shorter ones are padded to one length for all requests, and longer ones need a
    second evaluation. ``graph_ms`` is the time of a new CUDA graph, 0 without a GPU.
    """

    def __init__(
        self, n_free: int = 1024, graph_ms: float = 0.0, *, has_planes: bool = False
    ) -> None:
        self.n_free = n_free
        self._graph_ms = graph_ms
        self._has_planes = has_planes
        self._costs: dict[int, StepCosts] = {}
        self.proposing: defaultdict[int, CostCurve] = defaultdict(
            CostCurve
        )  # ms of a model by requests
        self._origins: defaultdict[Origin, DraftState] = defaultdict(
            lambda: DraftState(SOURCE_DECAY)
        )
        self._next_pause: defaultdict[Origin, int] = defaultdict(lambda: MIN_PAUSE)
        self._requests: defaultdict[int, defaultdict[Origin, DraftState]] = defaultdict(
            lambda: defaultdict(DraftState)
        )
        # requests and tokens of the last step; equal steps before it
        self._width = (0, 0)
        self._place = 0
        self._n_apart = 0  # tokens of this step that others wait for

    def costs(self, n_seqs: int) -> StepCosts:
        """Return the costs of steps for ``n_seqs`` requests."""
        if n_seqs not in self._costs:
            self._costs[n_seqs] = StepCosts(n_seqs, self._graph_ms)
        return self._costs[n_seqs]

    def length(
        self, key: int, origin: Origin, limit: int, n_seqs: int = 1, *, n_before: int = 0
    ) -> int:
        """Return the draft length, at most ``limit``, of ``origin`` for ``key`` in a step of
        ``n_seqs`` requests.

        All requests draft equally many tokens of a model. With ``n_before`` so many tokens are
        drafted already: ``origin`` is of what continues them, and the result is how many more
        follow.
        """
        costs = self.costs(n_seqs)
        drafts = self._requests[key][origin]
        if limit <= 0 or costs.needs_plain() or drafts.pause:
            return 0
        inputs = limit, n_before, n_seqs, costs.n_steps // 16, self._width
        if drafts.inputs != inputs or not drafts.length:
            gain, cost, n = self._best(key, origin, costs, limit, n_before)
            drafts.inputs = inputs
            drafts.length = 0
            if gain > MIN_GAIN:
                drafts.is_probing = False
                self._next_pause[origin] = MIN_PAUSE
            elif origin.matched:
                return 0
            elif drafts.is_probing:
                n = min(PROBE, limit)
            else:
                pause = self._next_pause[origin]
                drafts.rest(round(min(pause * (1 + GRAPH_STEPS * costs.graph), MAX_PAUSE)))
                self._next_pause[origin] = min(2 * pause, 16 * MIN_PAUSE)
                return 0
            drafts.length = n if cost <= costs.budget else 0
        return drafts.length

    def gain(self, key: int, origin: Origin, n: int, n_seqs: int = 1) -> float:
        """Return the expected speed with ``n`` drafts of ``origin`` as a multiple of that of a
        plain step.
        """
        costs = self.costs(n_seqs)
        return (
            self._expected_gain(origin, costs, self._share(key, origin, n_seqs), n).gain
            if costs.plain_ms
            else 1.0
        )

    def leads(
        self, key: int, model: Origin, n: int, text: Origin, n_text: int, n_seqs: int = 1
    ) -> bool:
        """Return whether ``n`` drafts of ``model``, for all ``n_seqs`` requests, gain more than
        ``n_text`` of ``text``.

        If the latter need a second evaluation, the others draft with the model all the same.
        """
        costs = self.costs(n_seqs)
        gain = self.gain(key, model, n, n_seqs)
        if not costs.plain_ms or not self._is_apart(n_seqs, n_text):
            return gain > self.gain(key, text, n_text, n_seqs)
        p = self._share(key, text, n_seqs)
        share = self._share(key, model, n_seqs)
        more = (
            _sum(p, n_text) - 1 - (2 - p**n_text) * (_sum(share, n) - 1)
        )  # one or two steps without the model
        return n_seqs * gain * self._expected_gain(text, costs, p, n_text).cost > more

    def split(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Set the ``sizes`` of a step, sure tokens and drafts by request: some of them need a
        second evaluation.
        """
        is_split = self._has_planes and len(sizes) > 1
        self._n_apart = (
            sum(sure + n for sure, n in sizes if sure > 1 or n > self.n_free) if is_split else 0
        )

    def _is_apart(self, n_seqs: int, n: int) -> bool:
        return self._has_planes and n_seqs > 1 and n > self.n_free

    def _share(self, key: int, origin: Origin, n_seqs: int) -> float:
        doubt = 0.0 if origin.matched else DOUBT  # a model that was wrong is to be tried again
        known = self._origins[origin].share(origin.prior, doubt)
        return known if doubt and n_seqs > 1 else self._requests[key][origin].share(known, doubt)

    def _best(
        self, key: int, origin: Origin, costs: StepCosts, limit: int, n_before: int
    ) -> _ExpectedGain:
        share = self._share(key, origin._replace(is_before=True), costs.n_seqs) if n_before else 0.0
        p = self._share(key, origin, costs.n_seqs)
        best = _ExpectedGain(0.0, 0.0, 0)
        for n in [*(n for n in LENGTHS if n < limit), limit]:
            expected = self._expected_gain(origin, costs, p, n, (n_before, share))
            if best.n and expected.cost > costs.budget:
                break
            best = max(best, expected)
        return best

    def _expected_gain(
        self,
        origin: Origin,
        costs: StepCosts,
        p: float,
        n: int,
        first: tuple[int, float] = (0, 0.0),
    ) -> _ExpectedGain:
        """Return what ``n`` drafts, right with ``p``, promise beyond the ``first``: how many those
        are, and their p.

        A model drafts equally many for all requests, a text for one: the others go on as they are.
        """
        (n_before, share), n_seqs = first, costs.n_seqs
        n_own = 1 if origin.matched else n_seqs  # requests that draft
        yielded = _sum(share, n_before)
        reached = share**n_before
        all_right = reached * p**n
        more = reached * (_sum(p, n) - 1)
        before = n_seqs * (1 + n_before)
        is_apart = self._is_apart(n_seqs, n_before + n)
        width = before + (n_seqs if self._has_planes and not is_apart else n_own) * n
        known = costs.of(before)
        cost = costs.apart(1 + n) if is_apart else costs.of(width) - known
        if not origin.matched:
            cost += self.proposing[n_seqs](n) / costs.plain_ms
        if is_apart:
            cost += (1 - all_right) * costs.apart(2 + round(more))
        elif n_before + n > self.n_free:  # right ones are evaluated again
            cost += (1 - all_right) * (costs.of(n_seqs + n_own * round(yielded - 1 + more)) - 1)
        total = known + cost
        if self._width != (n_seqs, width):
            # Second steps of a width capture a graph: here if a copy is all right and goes on, and
            # on the way back.
            total += costs.graph * (
                (1.5 + all_right) * (1 - all_right) if origin.matched else 1 / GRAPH_STEPS
            )
        return _ExpectedGain((1 + n_own * more / (n_seqs * yielded)) * known / total, cost, n)

    def learn(self, key: int, origin: Origin, n: int, n_right: int) -> None:
        """Count a proposal of ``n`` tokens, of which the first ``n_right`` are those of the
        reply.
        """
        for drafts in (self._origins[origin], self._requests[key][origin]):
            drafts.add(origin.counted(n), origin.counted(n_right))

    def record(
        self,
        accepted: Mapping[int, int],
        n_tokens: int,
        ms: float | None,
        proposing: tuple[int, float] | None = None,
    ) -> None:
        """Record a step of ``n_tokens`` with so many drafts ``accepted`` by request.

        ``ms`` is None if it did other work. ``proposing`` is how many tokens a model drafted for
        each, and its time.
        """
        n_seqs = len(accepted)
        width = (len(accepted), n_tokens)
        costs = self.costs(len(accepted))
        self._place = 0 if width != self._width else self._place + 1
        new_graph = (0.25, 1.0, 0.0)[min(self._place, 2)]
        n_apart = self._n_apart
        lost = (
            costs.of(n_tokens - n_apart)
            - 1
            + (new_graph * costs.graph if self._width[0] == n_seqs else 0.0)
        )
        lost += costs.apart(n_apart) if n_apart else 0.0
        if ms is not None:
            if new_graph < 1 or not costs.graph_ms or n_apart:
                costs.add(n_tokens, ms - new_graph * costs.graph_ms, n_apart)
            if proposing is not None:
                self.proposing[n_seqs].add(*proposing)
                lost += proposing[1] / costs.plain_ms if costs.plain_ms else 0.0
        self._width = width
        for key, n_accepted in accepted.items():
            for state in self._requests.get(key, {}).values():  # none after its end
                state.pause = max(state.pause - 1 - n_accepted, 0)
            lost -= n_accepted / n_seqs
        costs.budget = max(min(costs.budget + LOSS - lost, 2 * BUDGET), 0.0)

    def end(self, key: int) -> None:
        """Drop the state of an ended request."""
        self._requests.pop(key, None)
