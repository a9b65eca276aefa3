"""Device and host memory of a pool, planned before a model is loaded."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pyctl.engine.pool_plan import PoolPlan
from pyctl.llama.settings.memory_plan import MIB


@pytest.mark.parametrize(
    ("n", "resident", "n_stages"),
    [
        (16, 16, 0),
        (99, 16, 0),
        (15, 13, 2),  # one streamed layer would need as much room as if it were resident
        (11, 9, 2),
        (3, 1, 2),
        (2, 0, 2),
        (1, 0, 1),
        (0, 0, 1),
    ],
)
def test_what_does_not_fit_passes_through_stages(n: int, resident: int, n_stages: int) -> None:
    plan = PoolPlan.for_layers(n, 1024, 16, 100)
    assert plan.n_resident == resident
    assert plan.n_stages == n_stages
    assert plan.n_streamed == 16 - resident
    assert len(plan.resident) == resident
    assert plan.device_bytes == min(max(n, 1), 16) * 100
    assert plan.host_bytes == (16 - resident) * 100
    assert plan.pass_bytes(512) == plan.host_bytes // 2
    assert PoolPlan.for_layers(1, 1024, 1, 100).resident == (0,)


@pytest.mark.parametrize("n_layers", [2, 4, 10, 16])
def test_streamed_layers_are_far_apart(n_layers: int) -> None:
    for n in range(1, n_layers):
        plan = PoolPlan.for_layers(n, 1024, n_layers, 100)
        streamed = sorted(set(range(n_layers)) - set(plan.resident))
        assert len(streamed) == plan.n_streamed
        gaps = [b - a for a, b in pairwise(streamed)]
        assert not gaps or max(gaps) - min(gaps) <= 1


def test_speed_is_told_before_anybody_waits_for_it() -> None:
    """27B with q8_0: 544 MiB in each of 16 layers."""
    (line,) = PoolPlan.for_layers(11, 262_144, 16, 544 * MIB).lines()
    assert line.startswith(
        "K and V of 7 of 16 layers are in RAM and are read for each token: at 20 GB/s at most "
    )
    assert line.endswith(
        "40 at 32,768 tokens, 10 at 131,072 tokens, 5.0 at 262,144 tokens (tokens/s)"
    )
    assert list(PoolPlan.for_layers(16, 262_144, 16, 544 * MIB).lines()) == []
