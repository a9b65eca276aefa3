"""Rows on the device: what is held, how it leaves when cells run short, and what stays."""

from __future__ import annotations

from typing import Any

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.device_limits import DeviceLimits
from pyctl.cache.device_tier import DeviceTier
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import NOTHING, PromptMatch, Segment, Snapshot
from pyctl.errors import StateError
from tests.unit.cache.checks import check_invariants
from tests.unit.cache.steps import CAPACITY, Steps, prompt_of


def holding(*seeds: int, budget: int | None = None, n: int = 300) -> tuple[Steps, list[Snapshot]]:
    """Return a cache with a snapshot of ``n`` tokens for each of ``seeds``, whose rows only the
    device has, and whose sequences are gone.
    """
    steps = Steps(can_hold=True, budget=budget)
    made = []
    for seed in seeds:
        prompt = prompt_of(seed, n)
        steps.seq = LiveSequence(0, CAPACITY)
        steps.evaluate(prompt.tokens)
        steps.cache.saver.save(steps.seq, steps.plan_of(prompt), RequestStats(n))
        made.append(steps.ram.snapshots()[-1])
        steps.memory.clear(0)
    steps.seq = LiveSequence(0, CAPACITY)
    steps.memory.synchronize()
    return steps, made


def test_a_saved_segment_stays_on_the_device() -> None:
    steps, (snapshot,) = holding(1)
    assert snapshot.segment.held is not None
    assert snapshot.segment.rows.size == 0
    assert steps.cache.device.counts.kept == 300
    assert steps.cache.device.n_cells == 300


def test_a_new_tier_releases_what_the_memory_held_before() -> None:
    steps, _ = holding(1)
    DeviceTier(steps.memory, steps.ram)
    assert steps.memory.n_held_cells == 0


def test_only_copies_of_rows_in_ram_are_released_where_nothing_may_be_lost() -> None:
    steps, made = holding(1, 2, 3)
    device = steps.cache.device
    assert not device.release_copies(600, ()), "RAM has none of them"
    assert device.n_cells == 900
    while device.copies.copy_one():
        pass
    staying = made[0].chain
    assert device.release_copies(600, staying)
    assert device.n_cells == 600
    assert not device.release_copies(0, staying)
    assert [each.segment.held is not None for each in made] == [True, False, False]
    assert device.counts.to_ram == 0
    check_invariants(steps.ram)


def test_shrinking_moves_rows_to_ram_until_there_are_few_enough() -> None:
    steps, made = holding(1, 2, 3)
    device = steps.cache.device
    assert device.shrink(600)
    assert device.n_cells == 600
    assert device.counts.to_ram == 300
    (moved,) = [each for each in made if each.segment.held is None]
    assert moved.segment.rows.size > 0
    assert steps.ram.snapshots() == made, "no snapshot is lost"
    check_invariants(steps.ram)


def test_cells_that_two_segments_hold_are_freed_by_evicting_both() -> None:
    """The device can shrink where two segments hold each cell, so that none of them frees a cell
    alone.
    """
    steps, made = holding(1)
    first = made[0].segment
    tokens = prompt_of(2, 300).tokens
    steps.memory.restore(0, 0, made[0].spans(0, 300), made[0].state)
    second = Segment(0, tokens, NOTHING, None, made[0].batch_ends)
    second.held = steps.memory.cells.hold_rows(0, 0, 300)
    steps.memory.clear(0)
    assert steps.ram.add(Snapshot(PromptMatch(tokens).prefix(300), second, made[0].state))
    device = steps.cache.device
    assert device.n_cells == 300
    for segment in (first, second):
        assert steps.memory.cells.n_exclusive_cells(segment.held, 0, 300) == 0
    assert device.shrink(0)
    assert device.n_cells == 0
    check_invariants(steps.ram)


def test_shrinking_to_what_is_there_changes_nothing() -> None:
    steps, made = holding(1)
    assert steps.cache.device.shrink(300)
    assert made[0].segment.held is not None


def test_rows_without_room_in_ram_go_with_their_snapshots() -> None:
    steps, made = holding(1, 2)
    steps.ram.budget.limit = steps.ram.n_bytes
    steps.ram.budget.shared.n_bytes = steps.ram.n_bytes
    with steps.ram.locked(made[0]):
        assert steps.cache.device.shrink(300)
    assert steps.cache.device.counts.lost == 300
    assert steps.ram.snapshots() == made[:1]
    check_invariants(steps.ram)


def test_rows_of_a_locked_snapshot_that_ram_has_no_room_for_stay() -> None:
    steps, made = holding(1)
    steps.ram.budget.limit = steps.ram.n_bytes
    steps.ram.budget.shared.n_bytes = steps.ram.n_bytes
    with steps.ram.locked(*made):
        assert not steps.cache.device.shrink(0)
    assert made[0].segment.held is not None


def test_a_copy_that_fails_costs_the_snapshot_and_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps, _ = holding(1)

    def fail(*args: Any) -> Any:
        raise StateError("device busy")

    steps.memory.fetch = fail
    assert steps.cache.device.shrink(0)
    assert steps.ram.snapshots() == []
    assert "device busy" in caplog.text


def test_rows_that_ram_has_too_can_leave_at_no_cost() -> None:
    steps, (snapshot,) = holding(1)
    device = steps.cache.device
    assert not device.can_shrink(0, 0.0)
    assert device.can_shrink(300, 0.0)
    device.copies.copy_within_headroom(snapshot.segment)
    assert snapshot.segment.rows.size > 0
    assert device.can_shrink(0, 0.0)


def test_rows_that_are_likely_to_be_used_do_not_leave_for_others() -> None:
    steps, _ = holding(1)
    assert steps.cache.device.can_shrink(0, 1e9)
    assert not steps.cache.device.can_shrink(0, 0.0)


def test_rows_that_the_disk_has_are_not_copied_for_it() -> None:
    steps, (snapshot,) = holding(1)
    snapshot.segment.file.is_there = True
    steps.cache.device.copies.copy_within_headroom(snapshot.segment)
    assert snapshot.segment.rows.size == 0


def test_blocks_for_the_disk_are_complete_and_fetched_once() -> None:
    steps, (snapshot,) = holding(1)
    fetched: list[int] = []
    real = steps.memory.fetch

    def fetch(held: Any, first: int, last: int) -> Any:
        fetched.append(first)
        return real(held, first, last)

    steps.memory.fetch = fetch
    (block,) = steps.cache.device.copies.fetch_rows_now([snapshot.segment])
    assert steps.memory.block_bytes().in_flight == 0
    steps.cache.device.to_ram(snapshot)
    assert fetched == [0]
    assert snapshot.segment.rows is block


def test_a_retained_snapshot_moves_to_ram_with_all_its_rows() -> None:
    steps, (snapshot,) = holding(1)
    steps.cache.device.to_ram(snapshot)
    assert all(each.held is None and each.rows.size for each in snapshot.chain)
    assert steps.cache.device.n_cells == 0
    check_invariants(steps.ram)


def test_before_the_device_is_freed_everything_is_in_ram() -> None:
    steps, made = holding(1, 2)
    steps.cache.device.evict_all()
    assert steps.cache.device.n_cells == 0
    assert all(each.segment.rows.size for each in made)
    assert steps.memory.block_bytes().in_flight == 0
    check_invariants(steps.ram)


def test_long_rows_are_split_at_batch_ends() -> None:
    row = Steps(can_hold=True).memory.shape.sizes.row
    steps = Steps(can_hold=True, limits=DeviceLimits(piece_bytes=150 * row))
    prompt = prompt_of(1, 400)
    steps.evaluate(prompt.tokens)
    steps.cache.saver.save(steps.seq, steps.plan_of(prompt), RequestStats(400))
    (snapshot,) = steps.ram.snapshots()
    lengths = [each.end - each.start for each in reversed(snapshot.chain)]
    assert sum(lengths) == 400
    assert len(lengths) > 2
    assert all(length <= 150 for length in lengths)
    assert all(each.end % 64 == 0 for each in list(snapshot.chain)[1:])


def test_a_memory_that_holds_nothing_copies_at_once() -> None:
    steps = Steps(can_hold=False)
    prompt = prompt_of(1, 300)
    steps.evaluate(prompt.tokens)
    steps.cache.saver.save(steps.seq, steps.plan_of(prompt), RequestStats(300))
    assert steps.cache.device.n_cells == 0
    assert steps.ram.snapshots()[0].segment.rows.size > 0
    assert steps.cache.device.rows_size(0, 300) >= 300 * steps.memory.shape.sizes.row


def test_a_save_that_fails_leaves_no_held_rows() -> None:
    row = Steps(can_hold=True).memory.shape.sizes.row
    steps = Steps(can_hold=True, limits=DeviceLimits(piece_bytes=100 * row))
    prompt = prompt_of(1, 400)
    steps.evaluate(prompt.tokens)
    real = steps.memory.save_rows

    def fail_late(seq: int, first: int, last: int, *, hold: bool = False) -> Any:
        if first:
            raise StateError("no")
        return real(seq, first, last, hold=hold)

    steps.memory.save_rows = fail_late
    with pytest.raises(StateError):
        steps.cache.device.segment(steps.seq, steps.seq.covered)
    assert steps.memory.n_held_cells == 0
