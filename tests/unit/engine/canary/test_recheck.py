"""An evaluation again has the bits of the first one, and shows each that differs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pyctl.cache.reads import Reads
from pyctl.cache.snapshot import RECURRENT, Snapshot
from pyctl.engine.canary.recheck import BatchRange, Measurement, Recheck, RecheckPlan
from pyctl.engine.canary.sources import MemorySource
from pyctl.errors import OutOfCellsError, PreemptedError
from tests.unit.engine.canary.bench import CanaryBench, Kind, flip


def result_of(measuring: Generator[Reads | None, None, Measurement]) -> Measurement:
    """Run all steps, and return the result."""
    while True:
        try:
            next(measuring)
        except StopIteration as end:
            measured: Measurement = end.value
            return measured


class Measured:
    """A bench whose sequence is empty, and the measurement of its deepest snapshot."""

    def __init__(self, kind: Kind) -> None:
        self.bench = CanaryBench(kind, can_hold=False)
        self.bench.talk()
        self.bench.engine.prefix_cache.forget(self.bench.engine.sequences[0])

    @property
    def deepest(self) -> Snapshot:
        return self.bench.snapshots[-1]

    def plan(self) -> RecheckPlan:
        """Return a plan from the snapshot before the deepest."""
        before = self.bench.snapshots[-2]
        ends = tuple(end for end in self.deepest.batch_ends if end > before.n)
        has_state = self.bench.backend.kind != "attention"
        return RecheckPlan(before.n, before.state if has_state else None, ends)

    def recheck(self, plan: RecheckPlan | None = None) -> Recheck:
        engine = self.bench.engine
        source = MemorySource(self.deepest)
        return Recheck(engine.backend, engine.state_reads, 0, source, plan or self.plan())

    def measure(self, plan: RecheckPlan | None = None) -> Measurement:
        return result_of(self.recheck(plan).measure())


def test_batches_follow_from_the_ends() -> None:
    plan = RecheckPlan(10, None, (30, 35))
    assert plan.batches == [BatchRange(10, 30), BatchRange(30, 35)]


@pytest.mark.parametrize("kind", ["attention", "hybrid", "opaque"])
def test_the_bits_are_those_of_the_first_evaluation(kind: Kind) -> None:
    measured = Measured(kind).measure()
    assert measured.is_equal
    assert len(measured.restored) == len(Measured(kind).plan().batches) + 1


@pytest.mark.parametrize("kind", ["attention", "hybrid", "opaque"])
def test_all_can_be_evaluated_from_the_start(kind: Kind) -> None:
    measured = Measured(kind)
    plan = RecheckPlan(0, None, tuple(measured.deepest.batch_ends))
    assert measured.measure(plan).is_equal


def test_other_batches_have_other_bits() -> None:
    """The tests above can fail."""
    measured = Measured("attention")
    start, end, *_ = measured.deepest.batch_ends
    plan = RecheckPlan(start, None, (end - 1, end))
    assert not measured.measure(plan).is_equal


def test_the_first_difference_is_that_of_the_batch() -> None:
    measured = Measured("attention")
    rows = measured.deepest.segment.rows
    flip(rows)
    plan = measured.plan()
    found = measured.measure(plan)
    assert not found.is_equal
    assert found.first_difference() == len(plan.batches) - 1, "the last row is in the last batch"


def test_a_difference_of_the_state_alone_is_the_last() -> None:
    measured = Measured("hybrid")
    flip(measured.deepest.state.parts[RECURRENT])
    plan = measured.plan()
    assert measured.measure(plan).first_difference() == len(plan.batches)


def test_a_part_of_a_snapshot_is_enough_where_rows_are() -> None:
    measured = Measured("attention")
    ends = measured.deepest.batch_ends
    n_loaded = measured.bench.backend.n_loaded
    assert measured.measure(RecheckPlan(ends[1], None, (ends[2],))).is_equal
    assert measured.bench.backend.n_loaded - n_loaded == ends[2]


def test_a_request_may_come_between_any_two_batches() -> None:
    measured = Measured("hybrid")
    steps = measured.recheck(RecheckPlan(0, None, tuple(measured.deepest.batch_ends))).measure()
    backend = measured.bench.backend
    before = backend.n_evaluated
    evaluated: list[int] = []
    for _ in steps:
        evaluated.append(backend.n_evaluated - before)
        before = backend.n_evaluated
    assert max(evaluated) <= backend.facts.n_ubatch
    assert not backend.is_preemptible


@pytest.mark.parametrize("error", [PreemptedError("a request"), OutOfCellsError()])
def test_errors_of_the_evaluation_end_it(error: Exception) -> None:
    measured = Measured("attention")

    def evaluate(*args: Any, **options: Any) -> None:
        assert measured.bench.backend.is_preemptible
        raise error

    measured.bench.backend.evaluate = evaluate
    with pytest.raises(type(error)):
        measured.measure()
    assert not measured.bench.backend.is_preemptible
