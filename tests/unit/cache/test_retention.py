"""Announcements of clients: what they change for evictions, and what a request leaves."""

from __future__ import annotations

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.eviction import CostAwareEviction
from pyctl.cache.prefix_tree import PrefixTree
from pyctl.cache.retention import NO_RETENTION, Retention
from tests.unit.cache.checks import check_invariants
from tests.unit.cache.steps import Asked, Steps, longer, prompt_of
from tests.unit.cache.test_evictor import filled
from tests.unit.engine.drive import ManualClock

HOUR = 3600


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def ranked(clock: ManualClock) -> CostAwareEviction[str]:
    """Return a policy of an old and a new snapshot of equal size."""
    tree = PrefixTree[str]()
    tree.add("old", 100, iter([("a", 100)]), used=1.0)
    tree.add("new", 100, iter([("b", 100)]), used=9.0)
    return CostAwareEviction(tree, lambda key: 100, lambda: 10.0, half_life=3.0, seconds=clock)


def test_an_announced_snapshot_outlasts_a_newer_one(clock: ManualClock) -> None:
    policy = ranked(clock)
    assert policy.rank() == ["old", "new"]
    policy.announce("old", HOUR)
    assert policy.rank() == ["new", "old"]
    assert policy.is_announced("old")
    assert not policy.is_announced("new")


def test_an_announcement_ends_with_its_time(clock: ManualClock) -> None:
    policy = ranked(clock)
    policy.announce("old", HOUR)
    clock.advance(HOUR)
    assert not policy.is_announced("old")
    assert policy.rank() == ["old", "new"]


def test_the_later_of_two_announcements_counts(clock: ManualClock) -> None:
    policy = ranked(clock)
    policy.announce("old", HOUR)
    policy.announce("old", 300)
    clock.advance(HOUR - 1)
    assert policy.is_announced("old")


def test_an_announcement_can_be_withdrawn(clock: ManualClock) -> None:
    policy = ranked(clock)
    policy.announce("old", HOUR)
    policy.withdraw("old")
    assert policy.rank() == ["old", "new"]


def test_all_announced_rank_as_if_none_were(clock: ManualClock) -> None:
    policy = ranked(clock)
    for key in ("old", "new"):
        policy.announce(key, HOUR)
    assert policy.rank() == ["old", "new"]


def test_early_evictions_are_counted() -> None:
    cache, (lowest, middle, _) = filled()
    cache.policy.announce(middle, HOUR)
    cache.evictor.evict(lowest)
    assert cache.evictor.n_evicted_early == 0
    cache.evictor.evict(middle)
    assert cache.evictor.n_evicted == 2
    assert cache.evictor.n_evicted_early == 1


def announced(steps: Steps) -> list[int]:
    policy = steps.ram.policy
    return sorted(each.n for each in steps.ram.snapshots() if policy.is_announced(each))


def test_head_and_end_of_a_prompt_are_announced() -> None:
    steps = Steps()
    steps.serve(prompt_of(1), retention=Retention(prompt_seconds=300, head_seconds=HOUR))
    found = [each.n for each in steps.ram.snapshots()]
    head = max(n for n in found if n <= 100)
    assert announced(steps) == [head, max(found)]


def test_an_announcement_moves_on_with_its_conversation() -> None:
    steps = Steps()
    announcing = Retention(prompt_seconds=300)
    first = prompt_of(1)
    steps.serve(first, retention=announcing)
    (before,) = announced(steps)
    steps.serve(longer(longer(first, 2), 3), retention=announcing)
    (after,) = announced(steps)
    assert before < after


@pytest.mark.parametrize(
    ("cache_prompt", "retention"), [(True, NO_RETENTION), (False, Retention(300, 300))]
)
def test_nothing_is_announced_without_a_word_or_a_cache(
    cache_prompt: bool, retention: Retention
) -> None:
    steps = Steps()
    steps.serve(prompt_of(1))
    steps.serve(prompt_of(1), cache_prompt=cache_prompt, retention=retention)
    assert announced(steps) == []


def test_a_request_that_is_evicted_on_completion_leaves_nothing() -> None:
    """It resumes at the snapshots of others, and neither its prompt nor its reply stays."""
    steps = Steps()
    first = prompt_of(1)
    steps.serve(first)
    steps.cache.park(steps.seq)
    before = steps.ram.snapshots()
    stats = steps.serve(longer(first, 2), retention=Retention(evict_on_complete=True))
    steps.generate(prompt_of(3, 100).tokens)
    steps.cache.park(steps.seq)
    assert stats.n_cached > 0
    assert stats.n_written == 0
    assert steps.ram.snapshots() == before
    assert len(steps.cache.recent) == 1
    check_invariants(steps.ram)


def test_a_request_may_save_unless_its_client_forbids_it() -> None:
    assert Asked(prompt_of(1)).may_save
    assert not Asked(prompt_of(1), cache_prompt=False).may_save
    assert not Asked(prompt_of(1), retention=Retention(evict_on_complete=True)).may_save


def test_written_tokens_end_at_the_deepest_snapshot() -> None:
    stats = RequestStats(100, n_cached=40)
    stats.count_saved("60-a", 60)
    stats.count_saved("90-b", 90)
    assert stats.n_written == 50
    assert RequestStats(100, n_cached=100).n_written == 0
