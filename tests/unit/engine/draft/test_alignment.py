"""A reply beside the text that it copies: where it continues, and the edits that it repeats."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.engine.draft.alignment import LONGEST_EDIT, Alignment
from pyctl.engine.draft.token_index import TokenIndex
from pyctl.prompt import as_tokens
from tests.effort import examples

EQUALS, ARROW, END = 7, 8, 9
HEAD = list(range(100, 108))
LINES = [token for i in range(6) for token in (200 + i, EQUALS, 300 + i, END)]
"""Statements, each with a name and a value of its own."""


class Reply:
    """A reply that is compared token by token with an index of one text."""

    def __init__(self, source: list[int]) -> None:
        index = TokenIndex(2**12)
        index.begin()
        index.add(as_tokens(source))
        self.alignment = Alignment(index)
        self.text: list[int] = []

    def write(self, *tokens: int) -> None:
        for token in tokens:
            self.text.append(token)
            self.alignment.advance([token], self.text)

    def expected(self, n: int) -> list[int]:
        if not self.alignment.place:
            return []
        return [each.token for each in islice(self.alignment.expect(n), n)]


@pytest.fixture
def reply() -> Reply:
    reply = Reply([*HEAD, *LINES])
    reply.write(*HEAD)
    return reply


def test_a_reply_is_followed_from_the_first_tokens_that_are_found(reply: Reply) -> None:
    assert reply.expected(4) == LINES[:4]
    n = reply.alignment.length
    reply.write(*LINES[:3])
    assert reply.expected(4) == LINES[3:7]
    assert reply.alignment.length == n + 3


def test_an_edit_that_was_made_is_expected_again(reply: Reply) -> None:
    """The example of the module."""
    reply.write(LINES[0], ARROW)
    assert reply.alignment.place == 0
    assert reply.expected(3) == []
    reply.write(LINES[2])
    assert reply.expected(2) == [END, LINES[4]]
    reply.write(END, LINES[4])
    assert reply.expected(3) == [ARROW, *LINES[6:8]]
    assert reply.alignment.length == 3


def test_an_edit_that_is_not_made_again_is_soon_no_longer_expected(reply: Reply) -> None:
    reply.write(LINES[0], ARROW, *LINES[2:5])
    assert reply.expected(1) == [ARROW]
    reply.write(EQUALS)
    assert reply.expected(6) == [LINES[6], END, LINES[8], EQUALS, LINES[10], END]


def test_an_insertion_is_made_before_the_same_token_again(reply: Reply) -> None:
    reply.write(LINES[0], ARROW, ARROW, *LINES[1:5])
    assert reply.expected(4) == [ARROW, ARROW, EQUALS, LINES[6]]


def test_a_deletion_is_made_again(reply: Reply) -> None:
    reply.write(LINES[0], *LINES[2:5])
    assert reply.expected(2) == LINES[6:8]


def test_within_an_edit_the_rest_of_it_is_expected(reply: Reply) -> None:
    reply.write(LINES[0], ARROW, ARROW, *LINES[2:5], ARROW)
    assert reply.expected(3) == [ARROW, *LINES[6:8]]
    reply.write(ARROW)
    assert reply.expected(2) == LINES[6:8]


def test_an_edit_that_is_made_in_part_is_a_change_of_its_own(reply: Reply) -> None:
    reply.write(LINES[0], ARROW, ARROW, *LINES[2:5], ARROW, LINES[6])
    assert reply.expected(1) == [END]
    reply.write(*LINES[7:9])
    assert reply.expected(2) == [ARROW, LINES[10]]


def test_a_long_change_is_no_edit() -> None:
    reply = Reply([*HEAD, *LINES])
    reply.write(*HEAD, LINES[0], *range(900, 901 + LONGEST_EDIT), *LINES[2:5])
    assert reply.expected(3) == LINES[5:8]


def test_after_tokens_that_were_not_compared_the_edits_are_still_known(reply: Reply) -> None:
    reply.write(LINES[0], ARROW, *LINES[2:4])
    reply.alignment.restart()
    assert reply.alignment.preferred_place == 0
    reply.text += LINES[4:8]
    reply.alignment.advance([], reply.text)
    assert reply.expected(3) == [LINES[8], ARROW, LINES[10]]


@settings(max_examples=examples(60))
@given(
    tokens=st.lists(st.integers(0, 3), max_size=80),
    sizes=st.lists(st.integers(1, 5), min_size=80, max_size=80),
)
def test_any_reply_has_a_place_whose_text_is_the_index_s(
    tokens: list[int], sizes: list[int]
) -> None:
    """Few distinct tokens make many edits, which overlap."""
    source = np.random.default_rng(1).integers(0, 4, 200).tolist()
    reply = Reply(source)
    while tokens:
        n = sizes.pop()
        fresh, tokens = tokens[:n], tokens[n:]
        reply.text += fresh
        reply.alignment.advance(fresh, reply.text)
        assert 0 <= reply.alignment.place <= len(source) + 1
        assert (reply.alignment.length > 0) == (reply.alignment.place > 0)
        expected = reply.expected(8)
        assert len(expected) <= 8
        assert set(expected) <= set(source)
