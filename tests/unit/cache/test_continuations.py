"""The share of prompts that go on at the end of a conversation follows the clients."""

from __future__ import annotations

import pytest

from pyctl.cache.continuations import MAX_PROMPTS, PRIOR_PROMPTS, Continuations
from pyctl.cache.eviction import CostAwareEviction
from pyctl.cache.prefix_tree import PrefixTree
from tests.unit.cache.grown import grown


def counted(n_at_end: int, n_before: int) -> Continuations:
    """Return the counts after so many prompts at the end of a conversation, and before it."""
    continuations = Continuations()
    for _ in range(n_at_end):
        continuations.record(is_at_end=True)
    for _ in range(n_before):
        continuations.record(is_at_end=False)
    return continuations


def test_without_prompts_the_share_is_the_expected_one() -> None:
    assert Continuations().share(0.65) == 0.65


def test_expected_and_counted_prompts_weigh_alike() -> None:
    assert counted(PRIOR_PROMPTS, 0).share(0.5) == 0.75
    assert counted(0, PRIOR_PROMPTS).share(0.5) == 0.25
    assert counted(PRIOR_PROMPTS // 2, PRIOR_PROMPTS // 2).share(0.5) == 0.5


def test_a_change_of_clients_shows_after_many_prompts_too() -> None:
    continuations = counted(20 * MAX_PROMPTS, 0)
    assert continuations.share(0.65) > 0.98
    for _ in range(MAX_PROMPTS):
        continuations.record(is_at_end=False)
    assert continuations.share(0.65) < 0.5


def policy_of_a_chain() -> tuple[CostAwareEviction[int], list[int]]:
    """Return the policy of one conversation with three snapshots, and their keys by depth."""
    held = grown([(0, 1, False), (1, 1, False), (1, 1, False)])
    tree: PrefixTree[int] = PrefixTree()
    for key, one in enumerate(held):
        tree.add(key, one.n, one.chain.items(), one.used)
    policy = CostAwareEviction(tree, lambda _: 1, clock=lambda: 100.0)
    return policy, sorted(range(len(held)), key=lambda key: held[key].n)


@pytest.mark.parametrize(("is_at_end", "is_worth_more"), [(True, False), (False, True)])
def test_places_before_the_end_are_worth_what_clients_use_them_for(
    is_at_end: bool, is_worth_more: bool
) -> None:
    before, keys = policy_of_a_chain()
    after, _ = policy_of_a_chain()
    for _ in range(PRIOR_PROMPTS):
        after.continuations.record(is_at_end=is_at_end)
    middle = keys[1]
    assert (after.value(middle) > before.value(middle)) == is_worth_more
