"""Origins of drafts, and the moving share of their right tokens."""

from __future__ import annotations

import pytest

from pyctl.engine.draft.accepted_share import AcceptedShare, Origin


@pytest.mark.parametrize(
    ("n_matched", "matched", "prior"),
    [(0, 0, 0.8), (1, 1, 0.5), (3, 1, 0.5), (4, 4, 0.8), (63, 16, 16 / 17), (900, 64, 64 / 65)],
)
def test_the_more_tokens_match_the_more_a_text_promises(
    n_matched: int, matched: int, prior: float
) -> None:
    origin = Origin.from_match("some", n_matched)
    assert origin.matched == matched
    assert origin.prior == pytest.approx(prior)


def test_a_text_counts_as_many_drafts_as_tokens_matched() -> None:
    assert Origin("some", 4).counted(64) == 4
    assert Origin("some", 4).counted(3) == 3
    assert Origin("head").counted(64) == 64


def test_a_share_starts_at_its_prior_and_follows_the_drafts() -> None:
    share = AcceptedShare(decay=0.1)
    assert share.estimate(0.8) == pytest.approx(0.8)
    for _ in range(100):
        share.add(4, 0)
    assert share.estimate(0.8) < 0.25
    for _ in range(100):
        share.add(4, 4)
    assert share.estimate(0.8) > 0.95


def test_only_the_first_wrong_token_is_evidence() -> None:
    """A wrong token is the last evidence: the tokens after it would have been drafted
    differently.
    """
    short, long = AcceptedShare(0.1), AcceptedShare(0.1)
    short.add(2, 1)
    long.add(64, 1)
    assert short.estimate(0.5) == long.estimate(0.5)


def test_weak_evidence_lets_the_next_drafts_decide() -> None:
    strong, weak = AcceptedShare(0.02), AcceptedShare(0.02)
    for share in (strong, weak):
        for _ in range(40):
            share.add(4, 0)
    weak.weaken()
    assert weak.estimate(0.8) > strong.estimate(0.8)
    for share in (strong, weak):
        share.add(8, 8)
    assert strong.estimate(0.8) < 0.5 < weak.estimate(0.8)


def test_doubt_raises_a_low_share_up_to_the_prior() -> None:
    share = AcceptedShare(0.1)
    share.add(1, 0)
    assert share.estimate(0.8) < share.estimate(0.8, doubt=0.5) < 0.8
    assert share.estimate(0.8, doubt=100.0) == 0.8
    for _ in range(50):
        share.add(4, 4)
    assert share.estimate(0.8, doubt=100.0) == share.estimate(0.8) > 0.8
