"""Bounds of numbers in a JSON schema."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.chat.number_bounds import number_bounds
from pyctl.errors import RequestError

SAFE = 2**53 - 1


@pytest.mark.parametrize(
    ("schema", "bounds"),
    [
        ({}, {"minimum": -SAFE, "maximum": SAFE}),
        ({"minimum": 0.5, "maximum": 2.5}, {"minimum": 1, "maximum": 2}),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 3}, {"minimum": 2, "maximum": 2}),
        ({"minimum": 1, "exclusiveMinimum": 4}, {"minimum": 5, "maximum": SAFE}),
        ({"minimum": 2**53}, {"minimum": 2**53, "maximum": 2**64 - 1}),
        ({"maximum": -(2**53)}, {"minimum": -(2**63), "maximum": -(2**53)}),
        ({"exclusiveMinimum": True}, {"minimum": -SAFE, "maximum": SAFE}),
        ({"maximum": 9, "multipleOf": 3.0}, {"minimum": -SAFE, "maximum": 9, "multipleOf": 3}),
        ({"maximum": 9, "multipleOf": 0.5}, {"minimum": -SAFE, "maximum": 9}),
    ],
)
def test_an_integer_has_both_bounds(schema: dict[str, Any], bounds: dict[str, int]) -> None:
    assert number_bounds(schema, whole=True) == bounds


@pytest.mark.parametrize(
    ("schema", "bounds"),
    [
        ({}, {}),
        ({"minimum": 0, "maximum": 1.5}, {"minimum": 0, "maximum": 1.5}),
        ({"minimum": 1e-7, "maximum": 1e16}, {}),
        ({"exclusiveMinimum": -1e15}, {"exclusiveMinimum": -1e15}),
    ],
)
def test_bounds_of_other_numbers_are_dropped_where_too_fine_or_too_large(
    schema: dict[str, Any], bounds: dict[str, float]
) -> None:
    assert number_bounds(schema, whole=False) == bounds


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"minimum": "1"}, "'minimum' in a JSON schema must be a number of 64 bits"),
        ({"maximum": 2**65}, "'maximum' in a JSON schema must be a number of 64 bits"),
        ({"minimum": 0.2, "maximum": 0.8}, "there is no integer between minimum 1 and maximum 0"),
    ],
)
def test_bounds_that_no_integer_fits(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        number_bounds(schema, whole=True)
