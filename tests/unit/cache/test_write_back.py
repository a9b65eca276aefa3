"""Snapshots on their way to the disk: complete bytes, copies from the device, and a bound."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.snapshot import PromptFacts, Snapshot
from tests.unit.cache.fake_disk import FakeDisk
from tests.unit.cache.steps import Steps, prompt_of


def saved(steps: Steps, *lengths: int) -> list[Snapshot]:
    """Return snapshots of one prompt, whose bytes are still on their way."""
    prompt = prompt_of(1, 600)
    for n in lengths:
        steps.evaluate(prompt.tokens[steps.seq.n : n])
        steps.cache.saver.save(steps.seq, steps.plan_of(prompt), RequestStats(600))
    return steps.ram.snapshots()


def test_bytes_are_complete_before_the_disk_has_them() -> None:
    disk = FakeDisk()
    steps = Steps(disk=disk)
    snapshots = saved(steps, 100, 300)
    assert steps.memory.block_bytes().in_flight > 0
    steps.cache.write_back.write(snapshots, has_last=True)
    assert disk.written == [(snapshots[0], False), (snapshots[1], True)]
    assert steps.memory.block_bytes().in_flight == 0
    disk.written.clear()
    steps.cache.write_back.write(snapshots)
    assert [is_last for _, is_last in disk.written] == [False, False]


def test_rows_on_the_device_are_copied_for_the_thread_that_waits() -> None:
    disk = FakeDisk()
    steps = Steps(disk=disk, can_hold=True)
    (snapshot,) = saved(steps, 300)
    snapshot.segment.rows = snapshot.segment.rows[:0]
    assert snapshot.segment.held is not None
    steps.cache.write_back.flush_copies()
    assert disk.served == [], "nothing waits"
    disk.needed = [snapshot.segment]
    steps.cache.write_back.flush_copies()
    ((block,),) = disk.served
    assert block.size == snapshot.segment.held.n_bytes
    assert block.any(), "it is there"


def test_a_backlog_is_dropped_until_it_fits_or_nothing_is_left() -> None:
    disk = FakeDisk()
    steps = Steps(disk=disk)
    disk.n_evicted = 5
    steps.cache.write_back.trim_backlog()
    assert disk.n_evicted == 5, "there is none"
    steps.cache.device.copies.is_backlog_full = Mock(side_effect=[True, True, False])  # type: ignore[method-assign]
    steps.cache.write_back.trim_backlog()
    assert disk.n_evicted == 3
    steps.cache.device.copies.is_backlog_full = Mock(return_value=True)  # type: ignore[method-assign]
    steps.cache.write_back.trim_backlog()
    assert disk.n_evicted == 0


@pytest.mark.parametrize("policy", ["full", "off"])
def test_idle_moments_copy_rows_and_then_write_what_would_take_too_long(policy: str) -> None:
    disk = FakeDisk()
    disk.policy = type(disk.policy).parse(policy)
    steps = Steps(disk=disk, can_hold=True)
    steps.seq.facts = PromptFacts(for_disk=False)  # else rows are copied when they are saved
    snapshots = saved(steps, 300, 600)
    n_copies = 0
    while steps.cache.write_back.copy_next():
        n_copies += 1
    assert n_copies == sum(bool(each.segment.held) for each in snapshots)
    assert disk.written == []
    steps.cache.device.copies.exceeds_backlog = Mock(return_value=True)  # type: ignore[method-assign]
    assert not steps.cache.write_back.copy_next()
    assert [each for each, _ in disk.written] == snapshots[1:] * (policy != "off")


def test_without_a_disk_nothing_is_done() -> None:
    steps = Steps()
    (snapshot,) = saved(steps, 300)
    steps.cache.write_back.write([snapshot])
    steps.cache.write_back.flush_copies()
    steps.cache.write_back.trim_backlog()
    assert steps.memory.block_bytes().in_flight > 0
    assert not steps.cache.write_back.wants(snapshot)
    assert not steps.cache.write_back.copy_next()
