"""A check resumes at a boundary before the end; some snapshots have no defined bits."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from pyctl.cache.resume_points import NOWHERE
from pyctl.engine.canary.canary_limits import CanaryLimits
from pyctl.engine.canary.canary_schedule import CanarySchedule
from pyctl.engine.canary.recheck import RecheckPlan
from pyctl.engine.canary.recheck_planner import RecheckPlanner
from pyctl.engine.canary.skipped import SkippedError
from pyctl.engine.canary.targets import TargetChoice
from tests.unit.engine.canary.bench import CanaryBench, Kind


def plan_of(bench: CanaryBench, number: int = -1) -> RecheckPlan:
    """Return the plan of a snapshot of ``bench``."""
    schedule = CanarySchedule(3600, CanaryLimits(), bench.clock)
    planner = RecheckPlanner(bench.engine.prefix_cache, TargetChoice(1), schedule)
    steps: Generator[Any, None, RecheckPlan] = planner.plan(bench.snapshots[number])
    while True:
        try:
            reads = next(steps)
        except StopIteration as end:
            plan: RecheckPlan = end.value
            return plan
        if reads is not None:
            reads.wait(1.0)


def test_where_rows_are_enough_one_batch_of_the_new_rows_is_chosen() -> None:
    bench = CanaryBench("attention")
    bench.talk()
    ends = [0, *bench.snapshots[-1].batch_ends]
    first = bench.snapshots[-1].segment.start
    for _ in range(20):
        plan = plan_of(bench)
        (batch,) = plan.batches
        assert ends.index(batch.last) - ends.index(batch.first) == 1
        assert batch.last > first
        assert plan.before is None


@pytest.mark.parametrize("kind", ["hybrid", "opaque"])
def test_a_state_in_ram_before_the_end_is_where_it_resumes(kind: Kind) -> None:
    bench = CanaryBench(kind)
    bench.talk()
    plan = plan_of(bench)
    before = bench.snapshots[-2]
    assert plan.start == before.n
    assert plan.before is before.state
    assert plan.ends[-1] == bench.snapshots[-1].n


def test_a_state_on_disk_serves_as_well(tmp_path: Path) -> None:
    bench = CanaryBench("hybrid", tmp_path / "kv")
    bench.talk()
    deepest = bench.snapshots[-1]
    stored = {prefix.n for prefix in bench.engine.prefix_cache.disk.checks.prefixes()} - {deepest.n}
    for snapshot in bench.snapshots[:-1]:
        bench.cache.drop(snapshot)
    plan = plan_of(bench)
    assert plan.start == max(n for n in stored if n < deepest.n)
    assert plan.before is not None


def test_without_a_state_all_is_evaluated() -> None:
    bench = CanaryBench("hybrid")
    bench.talk()
    for snapshot in bench.snapshots[:-1]:
        bench.cache.drop(snapshot)
    plan = plan_of(bench)
    assert plan.start == 0
    assert plan.before is None
    assert list(plan.ends) == bench.snapshots[-1].batch_ends


def test_a_state_of_other_batches_is_none() -> None:
    bench = CanaryBench("hybrid")
    bench.talk()
    bench.snapshots[-2].exact = False
    assert plan_of(bench).start == bench.snapshots[-3].n


def test_a_snapshot_that_nothing_resumes_at_is_skipped() -> None:
    bench = CanaryBench("hybrid")
    bench.talk()
    bench.backend.resume_points = NOWHERE
    with pytest.raises(SkippedError) as caught:
        plan_of(bench)
    assert caught.value.reason == "not_exact"
