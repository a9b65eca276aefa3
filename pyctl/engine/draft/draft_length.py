"""Draft lengths: the controller chooses the length with the most expected tokens per second.

`expected_gain` is the formula, `step_costs` measures its costs, and `accepted_share` estimates its
probabilities. The controller adds three rules. While the best gain of a draft model is below
`MIN_GAIN`, the model pauses, and a short probe ends each pause. Texts never pause: their proposals
are compared with the reply whether they were evaluated or not. A budget limits the time lost, and
beside other replies an account of measured steps limits the time that texts lose
(`company_account`).

A draft that continues one of another source has to gain as much beyond that draft.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pyctl.engine.draft.accepted_share import AcceptedShare, Origin
from pyctl.engine.draft.company_account import CompanyAccount
from pyctl.engine.draft.expected_gain import (
    DraftedStep,
    DraftOffer,
    Gain,
    Rollback,
    StepWidth,
    expected_tokens,
)
from pyctl.engine.draft.step_costs import BUDGET, CostCurve, StepCosts

__all__ = ["LENGTHS", "DraftLengthController"]

LENGTHS = (1, 2, 3, 4, 8, 16, 32, 64, 128)
"""Lengths that are compared, in addition to the longest allowed."""

MIN_GAIN = 1.02
"""Speed below which drafts are not worth it, as a multiple of the speed without them."""

MIN_PAUSE = 6
"""Tokens of the first pause of a draft model."""

LONGEST_DOUBLED_PAUSE = 16 * MIN_PAUSE
"""Tokens up to which pauses double while drafts do not pay."""

MAX_PAUSE = 1024
"""Tokens of the longest pause, which CUDA graphs lengthen beyond `LONGEST_DOUBLED_PAUSE`."""

GRAPH_PAUSE = 16
"""Factor by which each CUDA graph, in plain steps, lengthens a pause: its probe needs one."""

PROBE = 2
"""Drafted tokens that end a pause."""

DOUBT = 0.6
"""Standard deviations that a draft model gets in its favour: one that was wrong is tried again."""

LOSS = 0.02
"""Plain steps by which the budget grows with each step: the share of time that drafts may lose."""

REQUEST_DECAY = 0.06
"""Decay of the evidence of one request, per draft."""

SOURCE_DECAY = 0.02
"""Decay of the evidence of a source in all requests, per draft."""

DECISION_STEPS = 16
"""Steps after which a length is chosen anew, since costs have changed."""

GRAPH_SHARES = (0.25, 1.0, 0.0)
"""Shares of the time of a CUDA graph that the first, second and later steps of a width take."""


class _Inputs(NamedTuple):
    """The inputs that a length was chosen for."""

    limit: int
    n_before: int
    n_seqs: int
    costs_age: int
    last_width: StepWidth


class _DraftState:
    """The state of an origin in one request: its share of right tokens, its pause, and the last
    decision.
    """

    def __init__(self) -> None:
        self.share = AcceptedShare(REQUEST_DECAY)
        self.pause_left = 0  # tokens
        self.is_probing = False
        self.inputs: _Inputs | None = None
        self.length = 0  # chosen for `inputs`, 0 if it has to be chosen
        self.cost = 0.0  # in plain steps, of that length

    def add(self, n_drafted: int, n_accepted: int) -> None:
        """Count a draft. A probe continues while half of its tokens are right."""
        self.share.add(n_drafted, n_accepted)
        self.length = 0
        is_right = 0 < n_drafted <= 2 * n_accepted
        if not is_right:
            self.is_probing = False

    def pause(self, n_tokens: int) -> None:
        """Pause for ``n_tokens``; the drafts of the probe after that decide."""
        self.share.weaken()
        self.pause_left = n_tokens
        self.is_probing = True


class DraftLengthController:
    """Chooses draft lengths and learns from results. Only the engine's thread calls it.

    Drafts over ``n_free`` tokens cost a repeated evaluation of the accepted ones on rollback. With
    ``has_state_history`` shorter ones are padded to one length for all requests, and longer ones
    need a second evaluation. ``graph_ms`` is the time of a new CUDA graph, 0 without a GPU.
    """

    def __init__(
        self, *, n_free: int = 1024, graph_ms: float = 0.0, has_state_history: bool = False
    ) -> None:
        """Start without measurements, with the priors of all origins."""
        self.n_free = n_free
        self._rollback = Rollback(n_free, has_state_history)
        self._graph_ms = graph_ms
        self._costs: dict[int, StepCosts] = {}
        self.requests: defaultdict[int, defaultdict[Origin, _DraftState]] = defaultdict(
            lambda: defaultdict(_DraftState)
        )
        self._shares: defaultdict[Origin, AcceptedShare] = defaultdict(
            lambda: AcceptedShare(SOURCE_DECAY)
        )
        self._next_pause: defaultdict[Origin, int] = defaultdict(lambda: MIN_PAUSE)
        self.proposal_ms: defaultdict[int, CostCurve] = defaultdict(CostCurve)
        """Milliseconds in which a draft model drafts, by the number of requests."""
        self._last_width = StepWidth(0, 0)
        self._n_same_width = 0  # steps of that width before the last one
        self._n_in_second_batch = 0  # tokens of this step that are evaluated after the others
        self._has_text = False  # whether this step has drafts of texts, or the rest of one
        self._account = CompanyAccount()

    def costs(self, n_seqs: int) -> StepCosts:
        """Return the costs of steps for ``n_seqs`` requests."""
        if n_seqs not in self._costs:
            self._costs[n_seqs] = StepCosts(n_seqs, self._graph_ms)
        return self._costs[n_seqs]

    # -- choices
    # ----------------------------------------------------------------------------------

    def length(
        self, key: int, origin: Origin, limit: int, n_seqs: int = 1, *, n_before: int = 0
    ) -> int:
        """Return the draft length, at most ``limit``, of ``origin`` for ``key`` in a step of
        ``n_seqs`` requests.

        All requests draft equally many tokens of a model. With ``n_before`` that many tokens are
        drafted already: ``origin`` and the result are of their continuation.
        """
        costs = self.costs(n_seqs)
        state = self.requests[key][origin]
        if limit <= 0 or costs.needs_plain() or state.pause_left:
            return 0
        costs_age = costs.n_steps // DECISION_STEPS
        inputs = _Inputs(
            limit=limit,
            n_before=n_before,
            n_seqs=n_seqs,
            costs_age=costs_age,
            last_width=self._last_width,
        )
        is_chosen = state.length > 0 and state.inputs == inputs
        if not is_chosen:
            state.inputs = inputs
            state.length = self._choose(key, origin, costs, limit, n_before)
        if not state.length:
            return 0
        delays_others = origin.is_text and n_seqs > 1
        if not delays_others:
            return state.length
        if state.cost > self._account.limit:
            return 0
        self._account.take(state.cost)
        return state.length

    def gain(self, key: int, origin: Origin, n: int, n_seqs: int = 1) -> float:
        """Return the expected speed with ``n`` drafts of ``origin``, as a multiple of the speed
        without.
        """
        costs = self.costs(n_seqs)
        if not costs.plain_ms:  # no step is measured yet
            return 1.0
        offer = self._offer(key, origin, n, n_seqs)
        return self._gain(offer, costs).speed

    def model_beats_text(
        self, key: int, model: Origin, n: int, text: Origin, n_text: int, n_seqs: int = 1
    ) -> bool:
        """Return whether ``n`` drafts of ``model``, for all ``n_seqs`` requests, gain more than
        ``n_text`` of ``text``.

        If the latter need a second evaluation, the others draft with the model all the same.
        """
        costs = self.costs(n_seqs)
        speed = self.gain(key, model, n, n_seqs)
        needs_second = self._rollback.needs_second_batch(n_seqs, n_text)
        if not costs.plain_ms or not needs_second:
            speed_by_text = self.gain(key, text, n_text, n_seqs)
            return speed > speed_by_text
        by_text = self._offer(key, text, n_text, n_seqs)
        by_model = self._offer(key, model, n, n_seqs)
        # The text's request goes without the model for this step, and if a token of the text is
        # wrong, for the step that evaluates the accepted ones again.
        p_wrong = 1 - by_text.p_right**n_text
        n_steps = 1 + p_wrong
        n_by_model = expected_tokens(by_model.p_right, n) - 1
        n_by_text = expected_tokens(by_text.p_right, n_text) - 1
        gained = n_by_text - n_steps * n_by_model
        # Tokens that all requests would make in the time that the text's drafts take.
        cost = self._gain(by_text, costs).cost
        lost = n_seqs * speed * cost
        return lost > gained

    def _choose(self, key: int, origin: Origin, costs: StepCosts, limit: int, n_before: int) -> int:
        """Return the length with the best gain, the length of a probe, or 0 if no draft pays."""
        state = self.requests[key][origin]
        best = self._best(key, origin, costs, limit, n_before)
        n = best.n
        if best.speed > MIN_GAIN:
            state.is_probing = False
            self._next_pause[origin] = MIN_PAUSE
        elif origin.is_text:
            return 0
        elif state.is_probing:
            n = min(PROBE, limit)
        else:
            self._pause(state, origin, costs)
            return 0
        if best.cost > self._budget(origin, costs):
            return 0
        state.cost = best.cost
        return n

    def _budget(self, origin: Origin, costs: StepCosts) -> float:
        """Return the plain steps that a draft of ``origin`` may cost."""
        if origin.is_text and costs.n_seqs > 1:
            return min(costs.budget, self._account.limit)
        return costs.budget

    def _best(self, key: int, origin: Origin, costs: StepCosts, limit: int, n_before: int) -> Gain:
        """Return the best gain of the lengths up to ``limit`` within the budget, or of the
        shortest.
        """
        offer = self._offer(key, origin, 0, costs.n_seqs, n_before)
        best = Gain(0.0, 0.0, 0)
        budget = self._budget(origin, costs)
        lengths = [length for length in LENGTHS if length < limit]
        lengths.append(limit)
        for n in lengths:
            longer = offer._replace(n=n)
            gain = self._gain(longer, costs)
            if best.n and gain.cost > budget:
                break
            best = max(best, gain)
        return best

    def _pause(self, state: _DraftState, origin: Origin, costs: StepCosts) -> None:
        """Pause a draft model, longer each time, and longer if its probe needs a CUDA graph."""
        n_tokens = self._next_pause[origin]
        n_with_graph = n_tokens * (1 + GRAPH_PAUSE * costs.graph)
        n_paused = min(n_with_graph, MAX_PAUSE)
        state.pause(round(n_paused))
        n_doubled = 2 * n_tokens
        self._next_pause[origin] = min(n_doubled, LONGEST_DOUBLED_PAUSE)

    def _offer(
        self, key: int, origin: Origin, n: int, n_seqs: int, n_before: int = 0
    ) -> DraftOffer:
        """Return the offer of ``n`` drafts of ``origin`` after ``n_before`` others."""
        p_right = self._share(key, origin, n_seqs)
        is_copy = origin.is_text
        if not n_before:
            return DraftOffer(n, p_right, is_copy)
        before = origin._replace(is_before=True)
        p_before = self._share(key, before, n_seqs)
        return DraftOffer(n, p_right, is_copy, n_before, p_before)

    def _share(self, key: int, origin: Origin, n_seqs: int) -> float:
        """Return the estimated share of right tokens of ``origin`` for ``key``."""
        is_model = not origin.is_text
        doubt = 0.0
        if is_model:
            doubt = DOUBT
        share = self._shares[origin]
        in_all = share.estimate(origin.prior, doubt)
        if is_model and n_seqs > 1:
            return in_all  # the model drafts for all requests
        state = self.requests[key][origin]
        return state.share.estimate(in_all, doubt)

    def _gain(self, offer: DraftOffer, costs: StepCosts) -> Gain:
        proposal_ms = self.proposal_ms[costs.n_seqs]
        step = DraftedStep(
            offer=offer,
            costs=costs,
            proposal_ms=proposal_ms,
            rollback=self._rollback,
        )
        return step.gain(self._last_width)

    # -- results
    # ----------------------------------------------------------------------------------

    def record_batches(self, sizes: Sequence[tuple[int, int]], *, has_text: bool = False) -> None:
        """Record the ``sizes`` of a step, sure tokens and drafts by request, some of which need a
        second evaluation; ``has_text``: some drafts are copied from a text.
        """
        has_repeated = any(n_sure > 1 for n_sure, _ in sizes)
        self._has_text = has_text or has_repeated
        self._n_in_second_batch = 0
        if not self._rollback.has_state_history or len(sizes) <= 1:
            return
        for n_sure, n_drafts in sizes:
            if n_sure > 1 or n_drafts > self.n_free:
                self._n_in_second_batch += n_sure + n_drafts

    def learn(self, key: int, origin: Origin, n: int, n_right: int) -> None:
        """Count a proposal of ``n`` tokens, of which the first ``n_right`` are those of the
        reply.
        """
        n_counted = origin.counted(n)
        n_accepted = origin.counted(n_right)
        self._shares[origin].add(n_counted, n_accepted)
        self.requests[key][origin].add(n_counted, n_accepted)

    def record(
        self,
        accepted: Mapping[int, int],
        n_tokens: int,
        ms: float | None,
        proposing: tuple[int, float] | None = None,
    ) -> None:
        """Record a step of ``n_tokens``, and how many drafts of each request were ``accepted``.

        ``ms`` is None if the step did other work. ``proposing`` is how many tokens a model drafted
        for each request, and its milliseconds.
        """
        n_seqs = len(accepted)
        costs = self.costs(n_seqs)
        width = StepWidth(n_seqs, n_tokens)
        if width == self._last_width:
            self._n_same_width += 1
        else:
            self._n_same_width = 0
        last_index = len(GRAPH_SHARES) - 1
        index = min(self._n_same_width, last_index)
        graph_share = GRAPH_SHARES[index]
        lost = self._expected_loss(costs, n_tokens, graph_share)
        if ms is not None:
            self._measure(costs, n_tokens, ms, graph_share)
            step_ms = ms
            if proposing is not None:
                lost += self._measure_proposal(costs, *proposing)
                step_ms += proposing[1]
            n_accepted_in_all = sum(accepted.values())
            n_new = n_seqs + n_accepted_in_all
            self._account.record(n_seqs, n_new, step_ms, has_text=self._has_text)
        self._account.end_step()
        self._last_width = width
        for key, n_accepted in accepted.items():
            self._shorten_pauses(key, 1 + n_accepted)
            lost -= n_accepted / n_seqs
        budget = costs.budget + LOSS - lost
        budget = min(budget, 2 * BUDGET)
        costs.budget = max(budget, 0.0)

    def _expected_loss(self, costs: StepCosts, n_tokens: int, graph_share: float) -> float:
        """Return the plain steps that the step took beyond one, by the costs known before it."""
        n_shared = n_tokens - self._n_in_second_batch
        lost = costs.shared(n_shared) - 1
        if self._last_width.n_seqs == costs.n_seqs:  # else the graph is not the drafts' fault
            lost += graph_share * costs.graph
        if self._n_in_second_batch:
            lost += costs.second(self._n_in_second_batch)
        return lost

    def _measure(self, costs: StepCosts, n_tokens: int, ms: float, graph_share: float) -> None:
        """Add the time of a step to ``costs``, unless most of it may be a graph.

        A second evaluation is measured all the same: its costs have no other samples.
        """
        captures_graph = graph_share == 1 and costs.graph_ms > 0
        if captures_graph and not self._n_in_second_batch:
            return
        graph_ms = graph_share * costs.graph_ms
        without_graph = ms - graph_ms
        costs.add(n_tokens, without_graph, self._n_in_second_batch)

    def _measure_proposal(self, costs: StepCosts, n: int, ms: float) -> float:
        """Add the time in which a model drafted ``n`` tokens for each; return it in plain steps."""
        self.proposal_ms[costs.n_seqs].add(n, ms)
        if not costs.plain_ms:  # no step is measured yet
            return 0.0
        return ms / costs.plain_ms

    def _shorten_pauses(self, key: int, n_tokens: int) -> None:
        """Count ``n_tokens`` of a reply that may have ended, which has no state then."""
        if key not in self.requests:
            return
        for state in self.requests[key].values():
            n_left = state.pause_left - n_tokens
            state.pause_left = max(n_left, 0)

    def end(self, key: int) -> None:
        """Drop the state of an ended request."""
        self.requests.pop(key, None)
