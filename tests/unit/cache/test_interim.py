"""Interim snapshots: when one is due, which are written, and which one stays on disk."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.interim import INTERIM_PART, InterimSnapshots
from pyctl.cache.lookup import CachePlan
from pyctl.cache.snapshot import Prefix, PromptMatch, Snapshot
from tests.unit.cache.fake_disk import FakeDisk
from tests.unit.cache.steps import N_UBATCH, Asked, Steps, prompt_of
from tests.unit.engine.drive import ManualClock

N_PROMPT = 10 * N_UBATCH + 10


class QueueingDisk(FakeDisk):
    """A disk that writes interim snapshots in `write_all`, or loses them in `refuse_all`."""

    def __init__(self, seconds: float = 5.0) -> None:
        super().__init__()
        self.interim_seconds = seconds
        self.queued: list[Prefix] = []
        self.held: list[Prefix] = []
        self.superseded: list[int] = []

    def write_interim(self, snapshot: Snapshot) -> bool:
        self.queued.append(snapshot.prefix)
        return True

    def is_queued(self, prefix: Prefix) -> bool:
        return prefix in self.queued

    def contains(self, prefix: Prefix) -> bool:
        return prefix in self.held

    def supersede(self, prefix: Prefix) -> None:
        self.superseded.append(prefix.n)

    def write_all(self) -> None:
        self.held += self.queued
        self.queued.clear()

    def refuse_all(self) -> None:
        self.queued.clear()


class Prefilling(NamedTuple):
    """A prompt that is evaluated batch by batch."""

    steps: Steps
    plan: CachePlan
    interim: InterimSnapshots
    clock: ManualClock

    def batch(self, seconds: float) -> bool:
        """Evaluate one batch in ``seconds``; return whether its end was due, and then save and
        write it.
        """
        seq = self.steps.seq
        self.steps.evaluate(self.plan.match.tokens[seq.n : seq.n + N_UBATCH])
        self.clock.advance(seconds)
        is_due = self.interim.is_due(seq.n)
        if is_due:
            self.steps.cache.saver.save(seq, self.plan, RequestStats(N_PROMPT))
            self.interim.write(seq.n)
        return is_due


def prefilling(
    disk: FakeDisk | None,
    *,
    persist: tuple[int, ...] = (),
    background: bool = False,
    budget: int | None = None,
) -> Prefilling:
    """Return a prompt of N_PROMPT tokens, none of which is evaluated yet."""
    steps = Steps(disk=disk, budget=budget)
    prompt = prompt_of(1, N_PROMPT)
    clock = ManualClock()
    plan = CachePlan(PromptMatch(prompt.tokens), persist=persist)
    request = Asked(prompt, background=background)
    interim = steps.cache.interim_snapshots(request, plan, steps.seq, clock)
    return Prefilling(steps, plan, interim, clock)


def test_one_is_due_when_seconds_of_evaluation_are_not_on_disk() -> None:
    disk = QueueingDisk(5.0)
    prompt = prefilling(disk)
    assert not prompt.batch(4.0)
    assert prompt.batch(1.0)
    disk.write_all()
    assert not prompt.batch(4.9)
    assert prompt.batch(0.2)
    assert [prefix.n for prefix in disk.held] == [2 * N_UBATCH]
    assert [prefix.n for prefix in disk.queued] == [4 * N_UBATCH]


def test_a_long_prompt_writes_one_for_each_part_of_it() -> None:
    """However slow the evaluation is."""
    disk = QueueingDisk(5.0)
    steps = Steps(disk=disk)
    prompt = prompt_of(1, 640)
    clock = ManualClock()
    plan = CachePlan(PromptMatch(prompt.tokens))
    interim = steps.cache.interim_snapshots(Asked(prompt), plan, steps.seq, clock)
    clock.advance(1000)
    assert not interim.is_due(640 // INTERIM_PART - 1)
    assert interim.is_due(640 // INTERIM_PART)


@pytest.mark.parametrize("case", ["no disk", "0 seconds", "background"])
def test_none_is_due(case: str) -> None:
    """Without a disk, with --kv-cache-interim 0, and for a request that no client waits for."""
    disk = None if case == "no disk" else QueueingDisk(0.0 if case == "0 seconds" else 5.0)
    prompt = prefilling(disk, background=case == "background")
    assert not prompt.batch(1000.0)


def test_one_is_written_at_a_time() -> None:
    """While the disk writes one, none is due: a slow disk gets fewer."""
    disk = QueueingDisk()
    prompt = prefilling(disk)
    assert prompt.batch(5.0)
    assert not prompt.batch(5.0)
    assert not prompt.batch(5.0)
    disk.write_all()
    assert prompt.batch(5.0)


def test_each_replaces_the_one_before_once_it_is_stored() -> None:
    """At every moment the disk has the deepest that was written."""
    disk = QueueingDisk()
    prompt = prefilling(disk)
    for n_batches, superseded in ((1, []), (2, []), (3, [1]), (4, [1, 2])):
        assert prompt.batch(5.0)
        assert disk.superseded == [n * N_UBATCH for n in superseded], n_batches
        disk.write_all()


def test_the_policys_own_are_not_replaced() -> None:
    disk = QueueingDisk()
    prompt = prefilling(disk, persist=(N_UBATCH,))
    for _ in range(4):
        assert prompt.batch(5.0)
        disk.write_all()
    assert disk.superseded == [2 * N_UBATCH]


def test_after_a_refusal_the_pause_is_twice_as_long() -> None:
    """The disk is full, slow, or has no bytes left for the day: what it has, stays."""
    disk = QueueingDisk()
    prompt = prefilling(disk)
    for _ in range(2):
        assert prompt.batch(5.0)
        disk.write_all()
    assert prompt.batch(5.0)
    assert disk.superseded == [N_UBATCH]
    disk.refuse_all()
    assert prompt.batch(5.0)
    disk.write_all()
    assert disk.superseded == [N_UBATCH], "the second is the deepest that the disk had"
    assert not prompt.batch(5.0)
    assert prompt.batch(5.0)
    assert disk.superseded == [N_UBATCH, 2 * N_UBATCH]


def test_a_snapshot_that_ram_refuses_is_not_written() -> None:
    disk = QueueingDisk()
    prompt = prefilling(disk, budget=1)
    assert prompt.batch(5.0)
    assert disk.queued == []
    assert prompt.batch(0.0), "the next may fit"
