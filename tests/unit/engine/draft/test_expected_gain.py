"""The gain of a draft: each term of the formula by hand."""

from __future__ import annotations

import pytest

from pyctl.engine.draft.expected_gain import (
    GRAPH_STEPS,
    START_STEPS,
    DraftedStep,
    DraftOffer,
    Gain,
    Rollback,
    StepWidth,
    expected_tokens,
)
from pyctl.engine.draft.step_costs import CostCurve, StepCosts

FREE = Rollback(1024, has_state_history=False)
PLAIN_MS = 10.0
NEW_WIDTH = StepWidth(0, 0)


def costs_of(n_seqs: int = 1, graph_ms: float = 0.0) -> StepCosts:
    """Return costs of a plain step, and a tenth of it for each further token by assumption."""
    costs = StepCosts(n_seqs, graph_ms)
    for _ in range(2):
        costs.add(n_seqs, PLAIN_MS)
    return costs


def gain_of(
    offer: DraftOffer,
    n_seqs: int = 1,
    rollback: Rollback = FREE,
    *,
    draft_ms: float = 0.0,
    graph_ms: float = 0.0,
    last_width: StepWidth = NEW_WIDTH,
) -> Gain:
    proposal_ms = CostCurve(slope=draft_ms)
    step = DraftedStep(offer, costs_of(n_seqs, graph_ms), proposal_ms, rollback)
    return step.gain(last_width)


def test_expected_tokens() -> None:
    assert expected_tokens(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_tokens(0.0, 3) == 1


def test_a_copy_costs_its_verification_alone() -> None:
    gain = gain_of(DraftOffer(4, 0.5, is_copy=True))
    assert gain.cost == pytest.approx(4 * 0.1)
    assert gain.speed == pytest.approx(expected_tokens(0.5, 4) / 1.4)


def test_a_model_also_costs_the_time_in_which_it_drafts() -> None:
    gain = gain_of(DraftOffer(4, 0.5, is_copy=False), draft_ms=2.0)
    assert gain.cost == pytest.approx(4 * 0.1 + 4 * 2.0 / PLAIN_MS)


def test_a_model_drafts_for_all_requests_and_a_text_for_one() -> None:
    copy = gain_of(DraftOffer(4, 0.5, is_copy=True), 2)
    model = gain_of(DraftOffer(4, 0.5, is_copy=False), 2)
    gained = expected_tokens(0.5, 4) - 1
    assert copy.cost == pytest.approx(4 * 0.05)
    assert copy.speed == pytest.approx((1 + gained / 2) / 1.2)
    assert model.speed == pytest.approx((1 + gained) / 1.4)


def test_accepted_drafts_are_evaluated_again_where_rollback_is_not_free() -> None:
    gain = gain_of(DraftOffer(4, 0.5, is_copy=True), rollback=Rollback(3, has_state_history=False))
    n_accepted = round(expected_tokens(0.5, 4) - 1)
    repetition = (1 - 0.5**4) * n_accepted * 0.1
    assert gain.cost == pytest.approx(4 * 0.1 + repetition)


def test_a_long_draft_takes_a_second_evaluation_beside_others() -> None:
    """A second evaluation costs a plain step and half as much for each further token."""
    gain = gain_of(DraftOffer(4, 0.5, is_copy=True), 2, Rollback(3, has_state_history=True))
    n_again = 2 + round(expected_tokens(0.5, 4) - 1)
    second, again = 1 + 0.05 * (5 - 2), 1 + 0.05 * (n_again - 2)
    assert gain.cost == pytest.approx(second + (1 - 0.5**4) * again)


def test_a_short_draft_is_padded_for_all_requests_where_lengths_must_be_equal() -> None:
    gain = gain_of(DraftOffer(3, 0.5, is_copy=True), 2, Rollback(3, has_state_history=True))
    assert gain.cost == pytest.approx(2 * 3 * 0.05)


def test_what_continues_a_draft_counts_where_that_is_right() -> None:
    gain = gain_of(DraftOffer(4, 0.5, is_copy=True, n_before=2, p_before=0.9))
    without = expected_tokens(0.9, 2)
    gained = 0.9**2 * (expected_tokens(0.5, 4) - 1)
    assert gain.speed == pytest.approx((1 + gained / without) * 1.2 / 1.6)


@pytest.mark.parametrize(
    ("is_copy", "last_width", "share"),
    [
        (False, NEW_WIDTH, 1 / START_STEPS),
        (False, StepWidth(1, 3), 1 / GRAPH_STEPS),
        (True, NEW_WIDTH, (1.5 + 0.5) * (1 - 0.5)),
    ],
)
def test_a_new_width_takes_a_graph(is_copy: bool, last_width: StepWidth, share: float) -> None:
    offer = DraftOffer(1, 0.5, is_copy)
    same, other = (
        gain_of(offer, graph_ms=20.0, last_width=width) for width in (StepWidth(1, 2), last_width)
    )
    assert same.cost == other.cost == pytest.approx(0.1)
    assert same.speed / other.speed == pytest.approx((1.1 + 2.0 * share) / 1.1)
