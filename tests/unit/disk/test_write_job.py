"""The states of a write job: the table of changes, and the rows that a job takes over."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pyctl.cache.snapshot import NOTHING, Block, PromptMatch, Segment, Snapshot, State
from pyctl.disk.write_job import CHANGES, JobState, WriteJob, detached_copy
from pyctl.errors import NotWrittenError
from pyctl.prompt import as_tokens
from tests.unit.cache.fake_rows import FakeHeldRows
from tests.unit.disk.making import conversation


def held(made: Snapshot) -> Snapshot:
    """Return the snapshot after its rows have left RAM for the device."""
    for segment in made.chain:
        segment.rows = NOTHING
        segment.held = FakeHeldRows(20, 960)
    return made


def job_of(made: Snapshot, state: JobState = JobState.READY) -> WriteJob:
    return WriteJob(detached_copy(made), weakref.ref(made), True, 1.0, state)


def from_device(segments: Sequence[Segment]) -> list[Block]:
    """Return rows that show which segment they are of."""
    return [np.full(8, each.start, np.uint8) for each in segments]


@pytest.mark.parametrize(("before", "after"), [*itertools.product(JobState, repeat=2)])
def test_only_changes_of_the_table_are_made(before: JobState, after: JobState) -> None:
    job = job_of(conversation(1)[0], before)
    if after in CHANGES[before]:
        job.change(after)
        assert job.state is after
    else:
        with pytest.raises(AssertionError, match=f"from {before.name} to {after.name}"):
            job.change(after)
        assert job.state is before


def test_every_state_can_be_reached_and_ends() -> None:
    assert CHANGES.keys() == set(JobState)
    starts = {JobState.READY, JobState.COPYING}
    reachable = starts.union(*CHANGES.values())
    assert reachable == set(JobState)
    for state in JobState:
        seen = {state}
        for _ in JobState:
            seen = seen.union(*(CHANGES[each] for each in seen))
        assert JobState.ENDED in seen
    assert not CHANGES[JobState.ENDED]


def test_cancelled_jobs_come_first_then_chosen_ones_then_those_in_ram() -> None:
    made = conversation(1)[0]
    spilled = WriteJob(
        detached_copy(made), weakref.ref(made), False, 9.0, JobState.COPYING, n_bytes=100
    )
    denser = replace(spilled, value=5.0, n_bytes=10)
    chosen = job_of(made)
    evicted = replace(chosen, n_bytes=100)
    cancelled = replace(spilled, state=JobState.CANCELLED)
    jobs = [spilled, denser, chosen, evicted, cancelled]
    assert sorted(jobs, key=lambda job: job.rank) == jobs


def test_an_evicted_job_takes_the_rows_from_its_next_segment_on() -> None:
    made = held(conversation(1)[-1])
    job = job_of(made)
    top, middle, bottom = job.snapshot.chain
    job.next_segment = middle
    job.take_rows(made, from_device)
    assert [int(each.rows[0]) for each in (middle, top)] == [20, 40]
    assert [each.held for each in (middle, top)] == [None, None]
    assert not bottom.rows.size, "it is written already"
    assert job.needs_device_rows
    job.restart()
    assert all(each.rows.size for each in (middle, top)), "the job alone has these"


def test_rows_on_disk_are_dropped_and_not_copied() -> None:
    made = held(conversation(1)[-1])
    job = job_of(made)
    list(job.snapshot.chain)[-1].file.is_there = True
    asked: list[int] = []

    def rows_of(segments: Sequence[Segment]) -> list[Block]:
        asked.extend(each.start for each in segments)
        return from_device(segments)

    job.take_rows(made, rows_of)
    assert asked == [40, 20]
    assert not job.needs_device_rows


def test_rows_of_a_snapshot_that_is_gone_are_not_asked_for() -> None:
    made = held(conversation(1)[0])
    job = job_of(made)
    assert job.rows_from_cache(job.snapshot.segment, from_device)[0] == 0
    made.segment.dropped = True
    with pytest.raises(NotWrittenError, match="others needed"):
        job.rows_from_cache(job.snapshot.segment, from_device)
    made.segment.dropped = False
    job.mark_handled()
    assert not made.facts.for_disk
    with pytest.raises(NotWrittenError, match="it was dropped"):
        job.rows_from_cache(job.snapshot.segment, from_device)


def test_a_segment_that_reaches_past_its_child_gets_its_own_rows() -> None:
    """Found by `python -m bench.simulate`: the file of the parent got the rows of the child."""
    parent = Segment(0, as_tokens(np.arange(40)), NOTHING, None)
    child = Segment(20, as_tokens(np.arange(20, 60)), NOTHING, parent)
    prefix = PromptMatch(as_tokens(np.arange(60))).prefix(60)
    made = held(Snapshot(prefix, child, State()))
    job = job_of(made)
    rows = {each.start: job.rows_from_cache(each, from_device) for each in job.snapshot.chain}
    assert {start: int(block[0]) for start, block in rows.items()} == {20: 20, 0: 0}


def test_a_copy_keeps_bytes_that_the_cache_gives_up() -> None:
    made = conversation(2)[-1]
    copy = detached_copy(made)
    rows = [each.rows.tobytes() for each in made.chain]
    for segment in made.chain:
        segment.drop()
    assert [each.rows.tobytes() for each in copy.chain] == rows
    assert [each.file for each in copy.chain] == [each.file for each in made.chain]
