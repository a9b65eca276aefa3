"""Recall with --kv-select: lower bounds on the share of right answers."""

from __future__ import annotations

import pytest

from bench.selection import Prefix, Score, score

TOKENS, SEEDS = 4096, (0, 1)


@pytest.fixture(scope="module")
def prefixes() -> dict[str, Prefix]:
    """The conversations, evaluated once."""
    return {}


def test_everything_is_found_where_everything_is_attended_to(prefixes: dict[str, Prefix]) -> None:
    assert score(0, SEEDS, TOKENS, prefixes) == Score(16, 16, 16, 2)


def test_the_last_tokens_alone_do_not_do(prefixes: dict[str, Prefix]) -> None:
    recent = score(8, SEEDS, TOKENS, prefixes, recency=True)
    assert recent.alone <= 5
    assert recent.listed <= 5


@pytest.mark.parametrize(("n_chunks", "alone", "listed", "whole"), [(8, 15, 14, 1), (16, 16, 15, 1)])
def test_chosen_chunks_have_what_is_asked_for(
    prefixes: dict[str, Prefix], n_chunks: int, alone: int, listed: int, whole: int
) -> None:
    """One fact at a time, and lists of eight in one reply."""
    found = score(n_chunks, SEEDS, TOKENS, prefixes)
    assert found.alone >= alone
    assert found.listed >= listed
    assert found.whole >= whole
