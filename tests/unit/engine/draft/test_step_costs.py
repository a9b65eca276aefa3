"""Costs of steps: curves through measurements, and which steps are measurements."""

from __future__ import annotations

import pytest

from pyctl.engine.draft.step_costs import REMEASURE, SLOPE, CostCurve, StepCosts


def add_twice(curve: CostCurve, n: int, cost: float) -> None:
    """Add what counts: a single measurement is ignored."""
    curve.add(n, cost)
    curve.add(n, cost)


def test_a_curve_is_linear_between_its_measurements_and_beyond_them() -> None:
    curve = CostCurve(1, 1.0, slope=0.1)
    assert curve(11) == pytest.approx(2.0)
    add_twice(curve, 5, 2.0)
    add_twice(curve, 9, 4.0)
    assert curve(3) == pytest.approx(1.5)
    assert curve(7) == pytest.approx(3.0)
    assert curve(13) == pytest.approx(6.0)


def test_one_measurement_may_include_loading_kernels() -> None:
    curve = CostCurve(1, 1.0, slope=0.1)
    curve.add(2, 50.0)
    assert curve(2) == pytest.approx(1.1)


def test_a_curve_never_falls() -> None:
    curve = CostCurve(1, 1.0)
    add_twice(curve, 4, 3.0)
    add_twice(curve, 8, 2.0)
    assert curve(4) == curve(8) == pytest.approx(2.0)


def test_a_delay_by_other_processes_is_no_cost() -> None:
    curve = CostCurve(1, 1.0)
    for cost in (2.0, 9.0, 2.0, 8.0):
        curve.add(4, cost)
    assert curve(4) == pytest.approx(2.0)


def test_a_measurement_may_lie_before_the_start_of_a_curve() -> None:
    """A second evaluation has fewer tokens than the step has requests."""
    curve = CostCurve(16, 1.0, 0.1)
    for _ in range(2):
        curve.add(8, 0.5)
    assert curve(8) == 0.5
    assert curve(12) == 0.75
    assert curve(16) == 1.0
    assert curve(32) > 1.0


def test_a_curve_is_at_most_as_steep_as_it_may_be() -> None:
    curve = CostCurve(1, 1.0, steepest=0.5)
    add_twice(curve, 2, 9.0)
    assert curve(4) == pytest.approx(10.0)


@pytest.mark.parametrize(("graph_ms", "graph", "slope"), [(0.0, 0.0, 0.35), (25.0, 2.5, SLOPE)])
def test_what_few_tokens_cost_says_nothing_of_many_on_a_gpu(
    graph_ms: float, graph: float, slope: float
) -> None:
    costs = StepCosts(1, graph_ms)
    for width, ms in ((1, 10.0), (2, 10.5), (3, 14.0)):
        for _ in range(2):
            costs.add(width, ms)
    assert costs.graph == graph
    assert costs.shared(3) == pytest.approx(1.4)
    assert costs.shared(103) - costs.shared(3) == pytest.approx(100 * slope)


def test_plain_steps_are_due_at_first_and_after_a_while() -> None:
    costs = StepCosts(2, 0.0)
    assert costs.needs_plain()
    costs.add(2, 10.0)
    assert costs.needs_plain()
    costs.add(2, 10.0)
    for _ in range(REMEASURE):
        assert not costs.needs_plain()
        costs.add(8, 12.0)
    assert costs.needs_plain()


def test_a_second_evaluation_is_charged_for_what_it_adds() -> None:
    costs = StepCosts(2, 0.0)
    for _ in range(2):
        costs.add(2, 10.0)
    for _ in range(2):
        costs.add(2 + 13, 25.0, 13)
    assert costs.second(16) == pytest.approx(1.5)
    assert costs.shared(2) == 1.0
