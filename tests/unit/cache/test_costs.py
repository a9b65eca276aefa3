"""Estimates of evaluation time follow the measurements, not the initial values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.costs import Costs


@given(
    st.floats(1e-5, 0.1),
    st.floats(0, 5),
    st.lists(st.integers(0, 100_000), min_size=30, max_size=60),
)
def test_tokens_cost_more_the_deeper_they_stand(
    base: float, growth: float, starts: list[int]
) -> None:
    """``growth``: by how much more at 100,000 tokens than at the beginning."""

    def seconds(first: int, last: int) -> float:
        return (last - first) * base * (1 + growth * (first + last) / 2e5)

    costs = Costs()
    # So much at the beginning that the guess, which is made there, is nothing beside it.
    for start in [*[0] * 16, 100_000, *starts] * 3:
        costs.record_evaluated(start, start + 2048, seconds(start, start + 2048))
    for first, last in ((0, 1000), (50_000, 52_000), (100_000, 101_000)):
        assert costs.evaluate(first, last) == pytest.approx(seconds(first, last), rel=0.4)
    assert costs.evaluate(500, 1500) + costs.evaluate(1500, 2500) == pytest.approx(
        costs.evaluate(500, 2500)
    )


@given(
    st.lists(
        st.tuples(st.integers(-5, 200_000), st.integers(-5, 5000), st.floats(-1, 1e4)), max_size=20
    )
)
def test_nothing_that_is_noted_makes_anything_free(noted: list[tuple[int, int, float]]) -> None:
    costs = Costs()
    for first, n, seconds in noted:
        costs.record_evaluated(first, first + n, seconds)
        costs.record_read(n, seconds)
    assert costs.evaluate(0, 1000) > 0
    assert costs.evaluate(150_000, 151_000) > 0
    assert costs.load(10**9) > 0
    assert costs.read(1) > 0


def test_old_measurements_count_for_less() -> None:
    costs = Costs()
    for seconds in [10.0] * 50 + [1.0] * 1500:
        costs.record_evaluated(0, 1000, seconds)
        costs.record_read(10**9, seconds)
    assert costs.evaluate(0, 1000) == pytest.approx(1.0, rel=0.1)
    assert costs.read(10**9) == pytest.approx(1.0, rel=0.1)
