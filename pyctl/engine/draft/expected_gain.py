"""The expected gain of a draft: the formula by which draft lengths are compared.

With p the share of right tokens, n drafts are expected to yield 1 + p + ... + p^n tokens. The gain
is the speed with them as a multiple of the speed without:

    gain = (tokens with / tokens without) * (cost without / cost with)

    cost with = cost without        the step as it is planned: plain, or with drafts before these
              + proposal            the draft model; texts cost nothing
              + verification        the wider evaluation, or a second one
              + repetition          accepted drafts evaluated again after a rollback
              + graph               a new CUDA graph, if the width is not the last step's

Each term is a function below. The unit of cost is a plain step, see `step_costs`.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from pyctl.engine.draft.step_costs import CostCurve, StepCosts

__all__ = ["DraftOffer", "DraftedStep", "Gain", "Rollback", "StepWidth", "expected_tokens"]

GRAPH_STEPS = 16
"""Steps that share a CUDA graph while a draft model drafts: its lengths change that often."""


START_STEPS = 48
"""Steps that share the CUDA graph with which a draft model starts after plain steps: where drafts
gain, it goes on for long. A probe that is charged more may never see the length that gains."""


def expected_tokens(p: float, n: int) -> float:
    """Return the tokens expected of a step with ``n`` drafts, each right with ``p``: 1 + p + ... +
    p^n.
    """
    return (1 - p ** (n + 1)) / (1 - p)


class StepWidth(NamedTuple):
    """Requests and tokens of a step. Steps of one width share a CUDA graph."""

    n_seqs: int
    n_tokens: int


class DraftOffer(NamedTuple):
    """``n`` drafts, each right with ``p_right``, after ``n_before`` others, right with
    ``p_before``.

    ``is_copy``: they come from a text, for one request. A model drafts for all requests.
    """

    n: int
    p_right: float
    is_copy: bool
    n_before: int = 0
    p_before: float = 0.0


class Gain(NamedTuple):
    """The expected ``speed`` with ``n`` drafts as a multiple of that without, and their ``cost`` in
    plain steps, a new graph excluded.
    """

    speed: float
    cost: float
    n: int


class Rollback(msgspec.Struct, frozen=True):
    """The removal of wrong drafts: up to ``n_free`` at no cost; after more, accepted ones are
    evaluated again.

    With ``has_state_history`` shorter drafts are padded to one length for all requests, and longer
    ones need a second evaluation.
    """

    n_free: int
    has_state_history: bool

    def needs_second_batch(self, n_seqs: int, n_drafts: int) -> bool:
        """Return whether a draft of one request of ``n_seqs`` is evaluated apart."""
        return self.has_state_history and n_seqs > 1 and n_drafts > self.n_free


class DraftedStep:
    """A step with the drafts of ``offer``.

    ``costs`` are the costs of steps of as many requests, ``proposal_ms`` the milliseconds of the
    draft model by tokens for each request.
    """

    def __init__(
        self, offer: DraftOffer, costs: StepCosts, proposal_ms: CostCurve, rollback: Rollback
    ) -> None:
        """Compute the expected tokens and the width of the step; `gain` adds the costs."""
        self._offer = offer
        self._costs = costs
        self._proposal_ms = proposal_ms
        # Requests that draft; the others continue without drafts.
        self._n_drafting = 1 if offer.is_copy else costs.n_seqs
        # Tokens expected of one request without the offer, and those that the offer adds.
        self._tokens_without = expected_tokens(offer.p_before, offer.n_before)
        p_reached = offer.p_before**offer.n_before
        self._tokens_gained = p_reached * (expected_tokens(offer.p_right, offer.n) - 1)
        self._p_all_right = p_reached * offer.p_right**offer.n
        self._p_wrong = 1 - self._p_all_right
        # Tokens of the step without the offer and with it. One batch pads it for all requests if
        # rollback needs equal lengths.
        n_drafts = offer.n_before + offer.n
        self._is_apart = rollback.needs_second_batch(costs.n_seqs, n_drafts)
        self._is_free = n_drafts <= rollback.n_free
        is_padded = rollback.has_state_history and not self._is_apart
        n_wider = costs.n_seqs if is_padded else self._n_drafting
        self._width_without = costs.n_seqs * (1 + offer.n_before)
        self._width = self._width_without + n_wider * offer.n

    def gain(self, last_width: StepWidth) -> Gain:
        """Return the gain of the step after one of ``last_width``."""
        cost_without = self._costs.shared(self._width_without)
        cost = self._verification_cost(cost_without)
        if not self._offer.is_copy:
            cost += self._proposal_cost()
        cost += self._repetition_cost()
        cost_with = cost_without + cost
        if last_width != (self._costs.n_seqs, self._width):
            follows_plain = last_width.n_tokens <= self._costs.n_seqs
            cost_with += self._graph_cost(follows_plain=follows_plain)
        gained = self._n_drafting * self._tokens_gained
        tokens_without = self._costs.n_seqs * self._tokens_without
        speed = (1 + gained / tokens_without) * cost_without / cost_with
        return Gain(speed, cost, self._offer.n)

    def _verification_cost(self, cost_without: float) -> float:
        if self._is_apart:
            return self._costs.second(1 + self._offer.n)
        return self._costs.shared(self._width) - cost_without

    def _proposal_cost(self) -> float:
        return self._proposal_ms(self._offer.n) / self._costs.plain_ms

    def _repetition_cost(self) -> float:
        """Return the cost to evaluate the accepted drafts again, unless all are right."""
        if self._is_apart:
            return self._p_wrong * self._costs.second(2 + round(self._tokens_gained))
        if self._is_free:
            return 0.0
        n_accepted = round(self._tokens_without - 1 + self._tokens_gained)
        n_tokens = self._costs.n_seqs + self._n_drafting * n_accepted
        return self._p_wrong * (self._costs.shared(n_tokens) - 1)

    def _graph_cost(self, *, follows_plain: bool) -> float:
        """Return the cost of CUDA graphs, which the second step of a width captures.

        A copy that is all right goes on, and captures one of its width; one that is wrong captures
        another on the way back. Steps of a draft model share it; more of them do after plain steps.
        """
        if not self._offer.is_copy:
            n_steps = GRAPH_STEPS
            if follows_plain:
                n_steps = START_STEPS
            return self._costs.graph / n_steps
        return self._costs.graph * ((1.5 + self._p_all_right) * self._p_wrong)
