"""Bounds for policies: two prompts that take turns in little memory, and recorded sessions."""

from __future__ import annotations

from functools import cache

import pytest

from bench.traces.bound import (
    Access,
    Rows,
    Served,
    accesses_of,
    evaluated_by_any,
    evaluated_oldest_first,
    main,
    served_of,
)
from bench.traces.recording import read_sessions

N_CELLS = 131_072


@cache
def recorded() -> list[Served]:
    """Return the requests of the first three sessions."""
    return served_of(read_sessions()[:3], 3, N_CELLS)


def turns(n_each: int) -> tuple[list[Access], list[int]]:
    """Return two prompts of ten rows that are asked ``n_each`` times by turns."""
    prompts = [Access([number], 1, 10) for number in (0, 1)]
    return prompts * n_each, [10, 10]


@pytest.mark.parametrize(
    ("capacity", "by_any", "oldest_first"),
    [
        # Both fit: each is evaluated once, later one token of it.
        (20, 24, 24),
        # The first one stays if the future is known; the second one loses half, or all.
        (15, 32, 40),
        (10, 42, 60),
        (0, 60, 60),
    ],
)
def test_two_prompts_by_turns(capacity: int, by_any: int, oldest_first: int) -> None:
    accesses, sizes = turns(3)
    assert evaluated_by_any(accesses, sizes, capacity) == by_any
    assert evaluated_oldest_first(accesses, sizes, capacity) == oldest_first


def test_a_prompt_is_evaluated_from_the_first_row_that_is_missing() -> None:
    accesses = [Access([0, 1], 2, 10), Access([0], 1, 1), Access([0, 1], 2, 1)]
    sizes = [6, 4]
    assert evaluated_oldest_first(accesses, sizes, 8) == 10 + 1 + 2
    assert evaluated_oldest_first(accesses, sizes, 4) == 10 + 2 + 6


def test_rows_are_split_where_a_request_leaves_another_one() -> None:
    served = [
        Served(10, 10, [Rows(0, 0, 12)]),
        Served(9, 5, [Rows(0, 0, 4), Rows(1, 4, 9)]),
    ]
    accesses, sizes = accesses_of(served)
    assert [[sizes[piece] for piece in access.pieces] for access in accesses] == [[4, 6, 2], [4, 5]]
    assert [access.n_prompt for access in accesses] == [2, 2]
    assert accesses[0].pieces[0] == accesses[1].pieces[0]


def test_chains_have_the_rows_of_their_prompts() -> None:
    for number, request in enumerate(recorded()):
        places = [0, *(rows.last for rows in request.chain)]
        assert [rows.first for rows in request.chain] == places[:-1]
        assert request.chain[-1].owner == number
        assert places[-1] >= request.n_prompt


def test_with_enough_memory_nothing_is_evaluated_twice() -> None:
    accesses, sizes = accesses_of(recorded())
    floor = sum(request.floor for request in recorded())
    assert evaluated_by_any(accesses, sizes, sum(sizes)) == floor
    assert evaluated_oldest_first(accesses, sizes, sum(sizes)) == floor


def test_knowing_the_future_is_never_worse() -> None:
    accesses, sizes = accesses_of(recorded())
    floor = sum(request.floor for request in recorded())
    before = 0
    for capacity in (400_000, 200_000, 100_000):
        by_any = evaluated_by_any(accesses, sizes, capacity)
        assert floor <= by_any <= evaluated_oldest_first(accesses, sizes, capacity)
        assert by_any >= before
        before = by_any


def test_the_table_has_a_row_for_each_machine_and_part(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick"])
    text = capsys.readouterr().out
    assert "2 recorded sessions, 3 at once: bounds" in text
    assert text.count("1.0000") == 12
