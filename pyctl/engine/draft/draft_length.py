"""Draft lengths: the controller chooses the length with the most expected tokens per second.

`expected_gain` is the formula, `step_costs` measures its costs, and `accepted_share` estimates its
probabilities. The controller adds three rules. While the best gain of a draft model is below
`MIN_GAIN`, the model pauses, for all of several replies together, and a short probe ends each
pause. Texts never pause: their proposals are compared with the reply whether they were evaluated or
not. A budget limits the time lost, and beside other replies an account of measured steps limits the
time that texts lose (`company_account`).

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
from pyctl.engine.draft.step_widths import StepWidths, WidthChange

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

PROBE_STEPS = 3
"""Steps of a probe after which its costs alone may end it: one of two may be disturbed."""

BEST_SHARE = 0.98
"""Share of right tokens that a draft model reaches at best: a probe ends where that does not pay,
by the costs that it has measured.
"""

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
        self.n_probed = 0  # steps since the last pause
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
        self.n_probed = 0

    def shorten_pause(self, n_tokens: int) -> None:
        """Count ``n_tokens`` of the reply."""
        n_left = self.pause_left - n_tokens
        self.pause_left = max(n_left, 0)


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
        # Tokens, by the number of requests and the draft model.
        self._next_pause: defaultdict[tuple[int, Origin], int] = defaultdict(lambda: MIN_PAUSE)
        # Of a draft model beside other replies, by their number: it drafts for all of them.
        self._together: dict[tuple[int, Origin], _DraftState] = {}
        self._learnt: dict[Origin, tuple[int, int]] = {}  # its drafts of one step, and right ones
        self.proposal_ms: defaultdict[int, CostCurve] = defaultdict(CostCurve)
        """Milliseconds in which a draft model drafts, by the number of requests."""
        self._widths = StepWidths()
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
        state = self._state(key, origin, n_seqs)
        if limit <= 0 or costs.needs_plain() or state.pause_left:
            return 0
        costs_age = costs.n_steps // DECISION_STEPS
        inputs = _Inputs(
            limit=limit,
            n_before=n_before,
            n_seqs=n_seqs,
            costs_age=costs_age,
            last_width=self._widths.last,
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

    def may_copy(self, n_seqs: int) -> bool:
        """Return whether any draft of a text is allowed in a step of ``n_seqs`` requests. It is not
        while the account is below the cost of one token.
        """
        if n_seqs == 1:
            return True
        shortest = DraftOffer(1, BEST_SHARE, is_copy=True)
        return self._gain(shortest, self.costs(n_seqs)).cost <= self._account.limit

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

    def _state(self, key: int, origin: Origin, n_seqs: int) -> _DraftState:
        """Return the state of ``origin`` in request ``key``; beside others, of a draft model in all
        of them.
        """
        if origin.is_text or n_seqs == 1:
            return self.requests[key][origin]
        if (n_seqs, origin) not in self._together:
            self._open_together(n_seqs, origin)
        state = self._together[n_seqs, origin]
        if origin in self._learnt:
            state.add(*self._learnt.pop(origin))
        return state

    def _open_together(self, n_seqs: int, origin: Origin) -> None:
        """Create the state of a draft model for ``n_seqs`` replies. It starts with a pause if the
        model pauses for another number of them.
        """
        is_paused = any(
            state.pause_left for (_, paused), state in self._together.items() if paused == origin
        )
        state = self._together[n_seqs, origin] = _DraftState()
        if is_paused:
            self._pause(state, origin, self.costs(n_seqs))

    def _choose(self, key: int, origin: Origin, costs: StepCosts, limit: int, n_before: int) -> int:
        """Return the length with the best gain, the length of a probe, or 0 if no draft pays."""
        state = self._state(key, origin, costs.n_seqs)
        best = self._best(key, origin, costs, limit, n_before)
        n = best.n
        if best.speed > MIN_GAIN:
            state.is_probing = False
            self._next_pause[costs.n_seqs, origin] = MIN_PAUSE
        elif origin.is_text:
            return 0
        elif not state.is_probing:
            self._pause(state, origin, costs)
            return 0
        elif state.n_probed >= PROBE_STEPS and not self._could_pay(costs, limit):
            self._next_pause[costs.n_seqs, origin] = LONGEST_DOUBLED_PAUSE
            self._pause(state, origin, costs)
            return 0
        else:
            state.n_probed += 1
            n = min(PROBE, limit)
        if best.cost > self._budget(origin, costs):
            return 0
        state.cost = best.cost
        return n

    def _could_pay(self, costs: StepCosts, limit: int) -> bool:
        """Return whether drafts of a probe would pay if nearly all of them were right."""
        for n in range(1, min(PROBE, limit) + 1):
            offer = DraftOffer(n, BEST_SHARE, is_copy=False)
            if self._gain(offer, costs).speed > MIN_GAIN:
                return True
        return False

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
        n_tokens = self._next_pause[costs.n_seqs, origin]
        n_with_graph = n_tokens * (1 + GRAPH_PAUSE * costs.graph)
        n_paused = min(n_with_graph, MAX_PAUSE)
        state.pause(round(n_paused))
        n_doubled = 2 * n_tokens
        self._next_pause[costs.n_seqs, origin] = min(n_doubled, LONGEST_DOUBLED_PAUSE)

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
        return step.gain(self._widths.last)

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
        if not origin.is_text:
            n_drafted, n_right_in_all = self._learnt.get(origin, (0, 0))
            self._learnt[origin] = n_drafted + n_counted, n_right_in_all + n_accepted

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
        n_accepted_in_all = sum(accepted.values())
        costs = self.costs(n_seqs)
        width = StepWidth(n_seqs, n_tokens)
        self._widths.add(width, has_text=self._has_text)
        lost = self._expected_loss(costs, n_tokens)
        if ms is not None:
            self._measure(costs, n_tokens, ms)
            step_ms = ms
            if proposing is not None:
                lost += self._measure_proposal(costs, *proposing)
                step_ms += proposing[1]
            n_new = n_seqs + n_accepted_in_all
            self._enter(n_seqs, n_new, step_ms)
        self._account.end_step()
        self._learnt.clear()
        for key, n_accepted in accepted.items():
            self._shorten_pauses(key, 1 + n_accepted)
        self._shorten_pauses_together(n_seqs, 1 + n_accepted_in_all // n_seqs)
        lost -= n_accepted_in_all / n_seqs
        budget = costs.budget + LOSS - lost
        budget = min(budget, 2 * BUDGET)
        costs.budget = max(budget, 0.0)

    def _enter(self, n_seqs: int, n_new: int, ms: float) -> None:
        """Enter a step in the account of texts. A new CUDA graph is part of the cost of the texts
        that require it; a step that has one since a reply began or ended counts for neither side.
        """
        if n_seqs == 1:  # a text delays no other reply
            return
        has_text = self._has_text
        if self._graph_ms and self._widths.graph_share:
            if self._widths.changed_by is WidthChange.TEXTS:
                has_text = True
            elif self._widths.changed_by is WidthChange.REPLIES and not has_text:
                return
        plain_ms = self.costs(n_seqs).plain_ms
        self._account.record(n_seqs, n_new, ms, has_text=has_text, plain_ms=plain_ms)

    def _expected_loss(self, costs: StepCosts, n_tokens: int) -> float:
        """Return the plain steps that the step took beyond one, by the costs known before it."""
        n_shared = n_tokens - self._n_in_second_batch
        lost = costs.shared(n_shared) - 1
        if self._widths.changed_by is not WidthChange.REPLIES:  # else drafts require no graph
            lost += self._widths.graph_share * costs.graph
        if self._n_in_second_batch:
            lost += costs.second(self._n_in_second_batch)
        return lost

    def _measure(self, costs: StepCosts, n_tokens: int, ms: float) -> None:
        """Add the time of a step to ``costs``, unless most of it may be a graph.

        A second evaluation is measured all the same: its costs have no other samples.
        """
        graph_share = self._widths.graph_share
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
            state.shorten_pause(n_tokens)

    def _shorten_pauses_together(self, n_seqs: int, n_tokens: int) -> None:
        """Count ``n_tokens`` of each of ``n_seqs`` replies."""
        for (n_together, _), state in self._together.items():
            if n_together == n_seqs:
                state.shorten_pause(n_tokens)

    def end(self, key: int) -> None:
        """Drop the state of an ended request."""
        self.requests.pop(key, None)
