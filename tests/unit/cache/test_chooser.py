"""The order in which candidates on disk and in memory are tried."""

from __future__ import annotations

import pytest

from pyctl.cache.reads import finish
from pyctl.cache.restorer import Chooser
from tests.unit.cache.fake_disk import FakeDisk
from tests.unit.cache.steps import Steps, longer, prompt_of


def tried(steps: Steps, disk: FakeDisk, chooser: Chooser) -> list[int]:
    """Return the positions in memory, after all reads from disk."""
    found = []
    while (candidate := finish(chooser.next_candidate(steps.seq))) is not None:
        assert not steps.ram.index.retained, "rows for the disk stay only as long as it is read"
        found.append(candidate.n)
    return found


def chooser_of(steps: Steps, disk: FakeDisk, seed: int = 9) -> Chooser:
    lookup = steps.lookup(longer(prompt_of(1), seed))
    return Chooser(lookup, steps.memory.shape.sizes, steps.ram, steps.cache.device, disk)


def served(disk: FakeDisk) -> Steps:
    """Memory has a prompt up to 400 tokens, and some shallower positions."""
    steps = Steps(disk=disk)
    steps.serve(prompt_of(1))
    steps.serve(prompt_of(2))
    return steps


def test_what_disk_has_is_read_deepest_first_and_then_memory() -> None:
    disk = FakeDisk()
    steps = served(disk)
    disk.stored = [550, 500, 300]
    with chooser_of(steps, disk) as chooser:
        positions = tried(steps, disk, chooser)
    assert disk.opened == [(550, 400), (500, 400)], "RAM has 400 rows of both; 300 is no gain"
    assert positions[0] == 400
    assert positions == sorted(positions, reverse=True)


@pytest.mark.parametrize(
    ("stored", "read_seconds", "opened"),
    [
        ([440], 0.0, [(440, 400)]),
        ([400], 0.0, []),
        ([440], 1e6, []),
        ([550], 1e6, []),
    ],
)
def test_of_about_equal_times_the_deeper_position_wins_and_memory_a_tie(
    stored: list[int], read_seconds: float, opened: list[tuple[int, int]]
) -> None:
    """40 tokens are evaluated in less than SAME_SECONDS; a slow drive reads nothing in time."""
    disk = FakeDisk()
    steps = served(disk)
    disk.stored = stored
    disk.costs.record_read(2**24, read_seconds)
    with chooser_of(steps, disk) as chooser:
        assert tried(steps, disk, chooser)[0] == 400
    assert disk.opened == opened


def test_an_exit_in_the_middle_releases_the_rows() -> None:
    disk = FakeDisk()
    steps = served(disk)
    disk.stored = [550]
    with chooser_of(steps, disk) as chooser:
        assert finish(chooser.next_candidate(steps.seq)) is not None
        assert steps.ram.index.retained == []
    with chooser_of(steps, disk):
        (base,) = steps.ram.index.retained
        assert base.n == 400
    assert steps.ram.index.retained == []


def test_a_request_that_wants_no_disk_reads_none() -> None:
    disk = FakeDisk([550])
    steps = Steps(disk=disk)
    lookup = steps.lookup(longer(prompt_of(1), 9), cache_prompt=False)
    sizes = steps.memory.shape.sizes
    with Chooser(lookup, sizes, steps.ram, steps.cache.device, disk) as chooser:
        assert tried(steps, disk, chooser) == []
    assert disk.opened == []
