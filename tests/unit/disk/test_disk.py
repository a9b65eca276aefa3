"""The disk as the cache uses it: which snapshots are written, and who waits for what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pyctl.cache.disk_policy import DiskPolicy
from pyctl.cache.snapshot import Block, PromptMatch, Segment, Snapshot
from pyctl.disk.disk import Disk
from tests.unit.disk.making import conversation
from tests.unit.engine.drive import tier_on


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = tier_on(tmp_path, min_tokens=30, text_of=lambda tokens: f"{len(tokens)} tokens\n")
    yield disk
    disk.close()


def rows_of(segments: Sequence[Segment]) -> list[Block]:
    """Rows of the device: none are needed."""
    assert not segments
    return []


def written(disk: Disk) -> set[int]:
    assert disk.flush(60)
    return set(disk.folder.lengths)


def test_short_snapshots_are_only_written_as_the_last(disk: Disk) -> None:
    short, long, _ = conversation(1)
    disk.write(short)
    disk.write(long)
    assert written(disk) == {40}
    disk.write(short, is_last=True)
    assert written(disk) == {20, 40}
    assert disk.view().written.n == 2


def test_snapshots_that_are_not_for_the_disk_are_not_written(disk: Disk) -> None:
    made = conversation(1)[-1]
    made.facts = replace(made.facts, for_disk=False)
    disk.write(made)
    disk.evict(made, 1e9, rows_of)
    assert written(disk) == set()


@pytest.mark.parametrize(
    ("policy", "worth", "n"), [("spill", 1e9, 1), ("spill", 0, 0), ("full", 1e9, 0)]
)
def test_evicted_snapshots_are_written_if_they_are_worth_it(
    tmp_path: Path, policy: str, worth: float, n: int
) -> None:
    disk = tier_on(tmp_path, policy=DiskPolicy.from_flag(policy))
    made: Snapshot = conversation(1, turns=6)[-1]
    disk.evict(made, worth, rows_of)
    assert disk.awaits_rows == bool(n)
    disk.supply_rows(rows_of)
    assert len(written(disk)) == disk.view().spilled.n == n
    assert disk.close()


def test_an_interim_snapshot_goes_when_it_is_superseded(disk: Disk) -> None:
    """The rows stay, since the deeper one needs them."""
    _, shallow, deep = conversation(1)
    assert disk.write_interim(shallow)
    assert written(disk) == {40}
    assert not disk.write_interim(shallow), "the disk has it"
    assert disk.write_interim(deep)
    disk.supersede(shallow.prefix)
    assert written(disk) == {60}
    assert disk.view().interim.n == 2
    assert len(list(disk.folder.path.glob("*.rows"))) == 3


@pytest.mark.parametrize("reason", ["a hit", "a pin"])
def test_an_interim_snapshot_that_others_use_stays(disk: Disk, reason: str) -> None:
    _, shallow, deep = conversation(1)
    disk.write_interim(shallow)
    disk.write_interim(deep)
    assert written(disk) == {40, 60}
    if reason == "a hit":
        disk.count_hit(shallow)
    else:
        disk.directory.pin(shallow.prefix.name, True)
    disk.supersede(shallow.prefix)
    assert written(disk) == {40, 60}


def test_an_interim_snapshot_takes_a_part_of_the_bytes_of_a_day(tmp_path: Path) -> None:
    """The rest is for what a policy chooses."""
    made = conversation(1)[-1]
    n_bytes = made.state.n_bytes + sum(segment.n_bytes for segment in made.chain)
    disk = tier_on(tmp_path, min_tokens=30, daily_bytes=2 * n_bytes - 1)
    assert disk.write_interim(made)
    assert written(disk) == set()
    assert not disk.queue.is_queued(made.prefix)
    assert disk.close()


def test_a_hit_a_label_and_a_removal_reach_the_index(disk: Disk) -> None:
    made = conversation(1)[-1]
    disk.write(made)
    assert written(disk) == {60}
    disk.count_hit(made)
    assert disk.flush(60)
    (entry,) = disk.entries()
    assert entry.hits == 1
    assert entry.label == "12 tokens … 24 tokens"
    assert disk.remove(entry.name)
    assert not disk.remove(entry.name)
    assert not disk.contains(made.prefix)


def test_nothing_is_found_elsewhere_without_an_object_store(disk: Disk) -> None:
    made = conversation(1)[-1]
    prompt = PromptMatch(made.last_tokens(made.n))
    assert disk.find_remote(prompt, made.n) == []
    assert disk.fetch(made.prefix) is None
