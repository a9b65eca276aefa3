"""Snapshots of live sequences: what is saved, what is shared, and that every way out is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.resume_points import NOWHERE
from pyctl.errors import OutOfCellsError, StateError
from tests.unit.cache.checks import check_invariants
from tests.unit.cache.steps import Steps, TickingStats, cold_digest, prompt_of


def test_a_snapshot_has_only_the_rows_that_no_other_has() -> None:
    steps = Steps()
    prompt = prompt_of(1)
    stats = RequestStats(400)
    for n in (100, 250, 400):
        steps.evaluate(prompt.tokens[steps.seq.n : n])
        steps.cache.saver.save(steps.seq, steps.plan_of(prompt), stats)
    snapshots = steps.ram.snapshots()
    assert [(each.segment.start, each.segment.end) for each in snapshots] == [
        (0, 100),
        (100, 250),
        (250, 400),
    ]
    assert stats.n_saved == 3
    assert stats.saved == [each.prefix.name for each in snapshots]
    assert steps.seq.covered.n == 400
    check_invariants(steps.ram)


def test_rows_that_another_sequence_saved_are_shared() -> None:
    """The plan found that up to 400 tokens may be there."""
    steps = Steps()
    prompt = prompt_of(1)
    steps.evaluate(prompt.tokens)
    steps.cache.saver.save(steps.seq, steps.plan_of(prompt), RequestStats(400))
    (saved,) = steps.ram.snapshots()
    steps.cache.forget(steps.seq)
    longer_tokens = prompt_of(1, 400).tokens
    steps.evaluate(longer_tokens)
    steps.evaluate(prompt_of(2, 100).tokens)
    steps.seq.n_overlap = 400
    plan = steps.plan_of(type(prompt).from_ids(steps.seq.tokens.copy()))
    steps.cache.saver.save(steps.seq, plan, RequestStats(500))
    deeper = steps.ram.snapshots()[1]
    assert deeper.segment.start == 400
    assert deeper.segment.parent is saved.segment


def refuse_by_points(steps: Steps) -> None:
    steps.memory.resume_points = NOWHERE


def refuse_by_ram(steps: Steps) -> None:
    steps.ram.budget.limit = 100


def fail(steps: Steps) -> None:
    steps.memory.save_state = Mock(side_effect=StateError("no"))  # type: ignore[method-assign]


@pytest.mark.parametrize("refuse", [refuse_by_points, refuse_by_ram, fail, None])
def test_every_way_out_of_a_save_is_timed(refuse: Callable[[Steps], None] | None) -> None:
    """Whatever happens, the clock is read when the save begins and when it ends."""
    steps = Steps()
    prompt = prompt_of(1)
    steps.evaluate(prompt.tokens)
    if refuse is not None:
        refuse(steps)
    stats = TickingStats(0)
    steps.cache.saver.save(steps.seq, steps.plan_of(prompt), stats)
    assert stats.save_ms == 1000
    assert stats.n_saved == (refuse is None)
    check_invariants(steps.ram)


def test_exact_saves_no_batches_of_its_own() -> None:
    steps = Steps(exact=True)
    prompt = prompt_of(1)
    steps.evaluate(prompt.tokens)
    steps.generate(prompt_of(2, 5).tokens)
    stats = TickingStats(0)
    plan = steps.plan_of(type(prompt).from_ids(steps.seq.tokens.copy()))
    steps.cache.saver.save(steps.seq, plan, stats)
    assert steps.ram.snapshots() == []
    assert stats.save_ms == 1000


@pytest.mark.parametrize(
    ("fields", "n_ends"),
    [
        ({"n_alike": 1}, 1),
        ({"is_new": False}, 0),
        ({"is_cached": False}, 0),
        ({"fails": True}, 0),
    ],
)
def test_every_way_out_of_saving_an_end_is_timed(fields: dict[str, Any], n_ends: int) -> None:
    steps = Steps()
    prompt = prompt_of(1)
    steps.serve(prompt)
    lookup = steps.lookup(prompt, cache_prompt=fields.get("is_cached", True))
    stats = TickingStats(400)
    stats.n_evaluated = 400 if fields.get("is_new", True) else 0
    output = Mock(side_effect=MemoryError) if "fails" in fields else steps.memory.output
    steps.cache.saver.save_end(steps.seq, lookup, stats, output, fields.get("n_alike", 0))
    assert stats.save_ms == 1000
    assert len(steps.ram.prompt_ends) == n_ends
    check_invariants(steps.ram)


@pytest.mark.parametrize("kind", ["attention", "hybrid", "opaque"])
@pytest.mark.parametrize("frees_cells", [True, False])
def test_what_is_suspended_comes_back(kind: str, frees_cells: bool) -> None:
    steps = Steps(kind, can_hold=True)
    prompt = prompt_of(1)
    steps.evaluate(prompt.tokens)
    before = steps.digest()
    kept = steps.cache.saver.suspend(steps.seq, frees_cells=frees_cells)
    assert steps.memory.seqs[0].rows == []
    if frees_cells:
        assert steps.cache.device.n_cells == 0
    steps.cache.saver.resume(steps.seq, kept)
    assert steps.digest() == before
    assert steps.ram.index.retained == []
    check_invariants(steps.ram)


def test_a_suspended_request_keeps_its_rows_while_memory_lacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Found by `python -m bench.simulate`: the request failed when it came back."""
    steps = Steps(can_hold=True)
    prompt = prompt_of(1, 300)
    steps.evaluate(prompt.tokens)
    before = steps.digest()
    kept = steps.cache.saver.suspend(steps.seq, frees_cells=False)
    fetch = steps.memory.fetch
    steps.memory.fetch = Mock(side_effect=MemoryError("none left"))  # type: ignore[method-assign]
    assert not steps.cache.device.shrink(0)
    steps.memory.fetch = fetch  # type: ignore[method-assign]
    steps.cache.saver.resume(steps.seq, kept)
    assert steps.digest() == before
    assert "none left" in caplog.text
    check_invariants(steps.ram)


def test_a_suspended_request_that_finds_no_cells_is_kept() -> None:
    steps = Steps()
    prompt = prompt_of(1)
    steps.evaluate(prompt.tokens)
    kept = steps.cache.saver.suspend(steps.seq)
    real, steps.memory.restore = (  # type: ignore[method-assign]
        steps.memory.restore,
        Mock(side_effect=OutOfCellsError),
    )
    with pytest.raises(OutOfCellsError):
        steps.cache.saver.resume(steps.seq, kept)
    assert steps.ram.index.retained == [kept]
    steps.memory.restore = real  # type: ignore[method-assign]
    steps.cache.saver.resume(steps.seq, kept)
    whole = Steps()
    whole.evaluate(prompt.tokens)
    assert steps.digest() == whole.digest()


def test_a_suspension_that_fails_leaves_the_sequence() -> None:
    steps = Steps(can_hold=True)
    prompt = prompt_of(1)
    steps.evaluate(prompt.tokens)
    steps.memory.fetch = Mock(side_effect=MemoryError)  # type: ignore[method-assign]
    before = steps.digest()
    with pytest.raises(MemoryError):
        steps.cache.saver.suspend(steps.seq)
    assert steps.digest() == before
    assert steps.ram.index.retained == []
    check_invariants(steps.ram)


def test_a_cold_digest_is_that_of_the_same_batches() -> None:
    """The yardstick of these tests: a prompt in the batches of `serve`."""
    steps = Steps()
    prompt = prompt_of(1)
    steps.serve(prompt)
    assert steps.digest() == cold_digest("hybrid", prompt, len(prompt))
