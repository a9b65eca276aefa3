"""Idle sequences leave the context and come back as they were."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from pyctl.cache.condemned import Condemned
from pyctl.engine.canary.set_aside import SetAside
from pyctl.errors import StateError
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.canary.bench import NEXT, CanaryBench, Kind


def aside_of(bench: CanaryBench) -> SetAside:
    return SetAside(bench.engine.scheduler.occupancy, bench.engine.prefix_cache)


@pytest.mark.parametrize("kind", ["attention", "hybrid", "opaque"])
def test_a_sequence_comes_back_with_its_bits(kind: Kind) -> None:
    bench = CanaryBench(kind)
    bench.talk()
    (seq,) = bench.engine.sequences
    ends = list(seq.batch_ends)
    digest = bench.backend.digest(0)
    aside = aside_of(bench)
    assert aside.move_all()
    assert bench.engine.sequences[0].n == 0
    assert bench.engine.cells.n_used == 0
    assert not bench.backend.seqs[0].cells
    aside.bring_back()
    assert bench.engine.sequences == [seq]
    assert bench.backend.digest(0) == digest
    assert seq.batch_ends == ends
    assert bench.cache.index.retained == []
    check_invariants(bench.cache)


def test_an_empty_context_has_nothing_to_move() -> None:
    bench = CanaryBench()
    aside = aside_of(bench)
    assert aside.move_all()
    aside.bring_back()
    assert bench.cache.n_bytes == 0


def test_a_failure_leaves_all_where_they_are() -> None:
    bench = CanaryBench("hybrid")
    bench.talk()
    digest = bench.backend.digest(0)
    save = bench.backend.save_state
    bench.backend.save_state = Mock(side_effect=MemoryError)
    assert not aside_of(bench).move_all()
    bench.backend.save_state = save
    assert bench.backend.digest(0) == digest
    assert bench.cache.index.retained == []


def test_a_sequence_within_an_image_stays() -> None:
    bench = CanaryBench("attention")
    bench.talk()
    bench.engine.sequences[0].in_image = True
    assert not aside_of(bench).move_all()
    assert bench.engine.sequences[0].n > 0


def test_a_sequence_with_condemned_rows_stays_empty() -> None:
    bench = CanaryBench("hybrid")
    bench.talk()
    (seq,) = bench.engine.sequences
    aside = aside_of(bench)
    assert aside.move_all()
    aside.bring_back(Condemned(segments=(bench.snapshots[0].segment,)))
    assert bench.engine.sequences == [seq]
    assert seq.n == 0
    assert bench.cache.index.retained == []
    check_invariants(bench.cache)


def test_a_sequence_that_cannot_come_back_costs_time_alone() -> None:
    bench = CanaryBench("hybrid")
    bench.talk()
    aside = aside_of(bench)
    assert aside.move_all()
    restore = bench.backend.restore
    bench.backend.restore = Mock(side_effect=StateError("made to fail"))
    aside.bring_back()
    bench.backend.restore = restore
    assert bench.engine.sequences[0].n == 0
    assert bench.cache.index.retained == []
    check_invariants(bench.cache)
    assert bench.ask(NEXT).error is None


def test_rows_in_other_cells_are_no_longer_those_of_a_cold_run() -> None:
    bench = CanaryBench("attention")
    bench.talk()
    (seq,) = bench.engine.sequences
    seq.shares = True
    aside = aside_of(bench)
    assert aside.move_all()
    aside.bring_back()
    assert seq.n > 0
    assert seq.batch_ends == []
