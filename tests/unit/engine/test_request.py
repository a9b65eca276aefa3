"""Requests and the events of their replies: counts of drafts, and the errors that clients get."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.engine.request import (
    MAX_POSITIONS,
    Done,
    DraftCounts,
    Request,
    as_client_error,
    empty_reply,
)
from pyctl.errors import EngineError, RequestError
from pyctl.prompt import Prompt

DRAFTS = st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))
"""A draft: its tokens, and how many of them were accepted."""


@given(DRAFTS)
def test_a_draft_counts_its_tokens_by_their_positions(draft: tuple[int, int]) -> None:
    n_drafted, n_accepted = draft
    counts = DraftCounts.of_draft(n_drafted, n_accepted)
    assert counts.n_drafts == 1
    assert counts.n_drafted == n_drafted
    assert counts.n_accepted == n_accepted
    assert len(counts.by_position) == min(n_drafted, MAX_POSITIONS)
    assert sum(counts.by_position) == min(n_accepted, MAX_POSITIONS)
    assert list(counts.by_position) == sorted(counts.by_position, reverse=True)


@given(st.lists(DRAFTS, max_size=6))
def test_counts_add_up_in_any_order(drafts: list[tuple[int, int]]) -> None:
    counts = [DraftCounts.of_draft(*draft) for draft in drafts]
    total = sum(counts, DraftCounts())
    assert total == sum(reversed(counts), DraftCounts())
    assert total.n_drafts == len(drafts)
    assert total.n_drafted == sum(n for n, _ in drafts)
    assert total.n_accepted == sum(n for _, n in drafts)
    for at, n in enumerate(total.by_position):
        assert n == sum(n_accepted > at for _, n_accepted in drafts)


def test_errors_for_the_client_stay_as_they_are() -> None:
    error = RequestError("n must be positive")
    assert as_client_error(error) is error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("seven"), "internal error: seven"),
        (ZeroDivisionError(), "internal error: ZeroDivisionError"),
    ],
)
def test_unexpected_errors_are_logged_and_named(
    caplog: pytest.LogCaptureFixture, error: Exception, message: str
) -> None:
    with caplog.at_level(logging.ERROR):
        reported = as_client_error(error)
    assert isinstance(reported, EngineError)
    assert str(reported) == message
    assert caplog.records[0].exc_info[1] is error


@pytest.mark.parametrize(("seq", "shown"), [(-1, 0), (0, 0), (3, 3)])
def test_the_reply_to_an_empty_prompt_has_no_token(seq: int, shown: int) -> None:
    done = empty_reply(Request(Prompt.from_ids([]), seq=seq))
    assert isinstance(done, Done)
    assert done.stop_type == "limit"
    assert done.seq == shown
    assert done.timings.n_predicted == 0
    assert done.stats.n_prompt == 0
