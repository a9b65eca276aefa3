"""The snapshots with which a waiting request could resume, and the fetches that pay."""

from __future__ import annotations

import pytest

from tests.unit.cache.fake_disk import FakeDisk
from tests.unit.cache.steps import Asked, Steps, ends_of, longer, prompt_of


@pytest.mark.parametrize(
    ("remote", "fetched"),
    [
        ({}, []),
        ({550: 0.01}, [550]),
        ({550: 0.3, 500: 0.01}, [500]),
        ({550: 60.0}, []),
        ({440: 0.01}, []),
    ],
)
def test_a_prefix_is_fetched_if_the_prompt_is_evaluated_earlier(
    remote: dict[int, float], fetched: list[int]
) -> None:
    """The prompt has 600 tokens, 400 of them in RAM; a token costs a millisecond."""
    disk = FakeDisk(remote=remote)
    steps = Steps(disk=disk)
    steps.serve(prompt_of(1))
    reads = steps.cache.prefetch.start(Asked(longer(prompt_of(1), 2)), ends_of, [steps.seq])
    assert [prefix.n for prefix in disk.fetched] == fetched
    assert (reads is None) == (not fetched)


@pytest.mark.parametrize("fields", [{"background": True}, {"cache_prompt": False}])
def test_no_fetch_for_requests_that_wait_for_nothing(fields: dict[str, bool]) -> None:
    disk = FakeDisk(remote={550: 0.01})
    steps = Steps(disk=disk)
    request = Asked(longer(prompt_of(1), 2), **fields)
    assert steps.cache.prefetch.start(request, ends_of, [steps.seq]) is None
    assert disk.fetched == []


def test_the_tokens_that_are_ready_are_the_deepest_of_memory_and_disk() -> None:
    disk = FakeDisk()
    steps = Steps(disk=disk)
    again = longer(prompt_of(1), 2)
    n_ready = steps.cache.prefetch.n_ready
    assert n_ready(again, ends_of(again), steps.seq) == 0
    steps.serve(prompt_of(1))
    before = [(each, each.hits) for each in steps.ram.snapshots()]
    assert n_ready(again, ends_of(again), steps.seq) == 400
    disk.stored = [500]
    assert n_ready(again, ends_of(again), steps.seq) == 500
    assert [(each, each.hits) for each in steps.ram.snapshots()] == before
