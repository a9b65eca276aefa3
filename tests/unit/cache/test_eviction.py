"""The policy of evictions chooses as its rule does, written without an index."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.cache.eviction import CostAwareEviction, Likelihoods
from pyctl.cache.prefix_tree import PrefixTree
from tests.effort import examples
from tests.unit.cache.grown import Held, grown


def children_of(one: Held, held: dict[int, Held]) -> list[Held]:
    below = [other for other in held.values() if other.stems_from(one)]
    return [other for other in below if not any(other.stems_from(middle) for middle in below)]


def plain_worth(
    one: Held,
    held: dict[int, Held],
    now: float,
    half: float,
    odds: Likelihoods,
    hits: int,
    above: list[Held],
) -> float:
    """Return the worth by the rule of `CostAwareEviction`, as it would be written without an
    index.
    """

    def age(used: float) -> float:
        return 1 / (1 + (math.sqrt(2) - 1) * max(now - used, 0.0) / half) ** 2

    def newest(of: Held) -> Held:
        deeper = [other for other in held.values() if other.stems_from(of)]
        return max([of, *deeper], key=lambda other: (other.seen, other.n))

    def cut_back(end: int, first: int, last: int) -> float:
        share = math.log((end - first + odds.near_end) / (end - last + odds.near_end)) / math.log(
            1 + end / odds.near_end
        )
        return (1 - odds.end) * share

    def anew(opening: int, first: int, last: int) -> float:
        if first >= (last := min(last, opening)):
            return 0.0
        return (
            odds.head
            * math.log((opening - first + odds.near_end) / (opening - last + odds.near_end))
            / math.log(1 + opening / odds.near_end)
        )

    def cleared(system: int, first: int, last: int) -> float:
        return odds.system if system and first <= system < last else 0.0

    children = children_of(one, held)
    total = 0.0
    if not any(newest(child).seen >= one.seen for child in children):
        total += age(one.seen) * (odds.end + cut_back(one.reach, one.n, one.reach))
        total += age(one.seen) * anew(one.opening, one.n, one.reach)
        total += age(one.seen) * cleared(one.system, one.n, one.reach)
    for child in children:
        total += age(newest(child).seen) * cut_back(newest(child).reach, one.n, child.n)
        total += age(newest(child).seen) * anew(newest(child).opening, one.n, child.n)
        total += age(newest(child).seen) * cleared(newest(child).system, one.n, child.n)
    if not above and not newest(one).opening:
        total += odds.head * age(newest(one).seen)
    # Those below it along the newest branch, as deep as that goes.
    last = one
    line = []
    while below := [each for each in children_of(last, held) if newest(each).seen >= last.seen]:
        last = max(below, key=lambda each: (newest(each).seen, newest(each).n))
        line.append(last)
    if one.is_turn and not any(each.is_turn for each in line):
        total += odds.turn * age(newest(one).seen)
    total += odds.again * min(max(len(children), hits, 1) - 1, odds.max_again) * age(one.used)
    return total * (one.n - max((other.n for other in above), default=0))


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 3), st.booleans()), min_size=1, max_size=10
    ),
    st.data(),
)
@settings(max_examples=examples(80))
def test_the_policy_chooses_what_the_plain_rule_chooses(
    shapes: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    """At every step of a random history the victim is of the least value per freed byte, by a rule
    that is computed here from all snapshots anew. The policy itself updates values incrementally.
    """
    tree: PrefixTree[int] = PrefixTree()
    held = dict(enumerate(grown(shapes)))
    hits = {key: data.draw(st.integers(0, 3)) for key in held}
    for key, one in held.items():
        one.is_turn = data.draw(st.booleans())
        one.opening = data.draw(st.integers(0, 60))
        one.system = data.draw(st.integers(0, 60))
        node = tree.add(key, one.n, one.chain.items(), one.used, hits[key])
        node.is_turn = one.is_turn
        node.own.n_opening = one.opening
        node.own.n_system = one.system
    freed = {key: data.draw(st.integers(0, 1000)) for key in held}
    now = 100.0
    policy = CostAwareEviction(tree, freed.__getitem__, lambda: now)
    while held:
        now += 1
        evictable = {key for key in held if data.draw(st.booleans())}
        value = {}
        for key, one in held.items():
            above = [other for other in held.values() if one.stems_from(other)]
            worth = plain_worth(one, held, now, 60.0, Likelihoods(), hits[key], above) * 1e-3
            assert policy.value(key) == pytest.approx(worth)
            value[key] = worth / max(freed[key], 1)
        key = policy.choose_victim(evictable.__contains__)
        assert (key is None) == (not evictable)
        if key is None:
            break
        assert value[key] == pytest.approx(min(value[each] for each in evictable))
        tree.remove(key)
        gone = held.pop(key)
        above = [other for other in held.values() if gone.stems_from(other)]
        if above and gone.seen >= max(above, key=lambda other: other.n).seen:
            heir = max(above, key=lambda other: other.n)
            heir.seen = gone.seen
            heir.reach = gone.reach
            heir.opening = gone.opening
            heir.system = gone.system


@pytest.mark.parametrize(("opening", "ranked"), [(0, [20, 30, 40, 10]), (5000, [10, 20, 30, 40])])
def test_late_in_an_opening_others_are_expected_to_leave_it(
    opening: int, ranked: list[int]
) -> None:
    """The last of snapshots at even distances in an opening is worth most; without an opening, the
    first of all.
    """
    tree: PrefixTree[int] = PrefixTree()
    policy = CostAwareEviction(tree, lambda key: 1, lambda: 1.0)
    segments: list[tuple[int, int]] = []
    for key in (10, 20, 30, 40, 50, 300):
        segments.insert(0, (key, 100 * key))
        tree.add(key, 100 * key, segments, 1.0).own.n_opening = opening
    assert [key for key in policy.rank() if key <= 40] == ranked


def test_the_system_message_of_a_conversation_outlasts_its_middle() -> None:
    """A cleared conversation goes on there, however long it was and late its opening ends."""
    tree: PrefixTree[int] = PrefixTree()
    policy = CostAwareEviction(tree, lambda key: 1, lambda: 1.0)
    segments: list[tuple[int, int]] = []
    for key in (40, 140, 240, 340, 440, 1000):
        segments.insert(0, (key, 100 * key))
        node = tree.add(key, 100 * key, segments, 1.0)
        node.own.n_opening = 500 * 100
        node.own.n_system = 140 * 100
    assert policy.rank()[-3:] == [140, 440, 1000]


def test_an_idle_conversation_decays_with_the_square_of_time() -> None:
    tree: PrefixTree[int] = PrefixTree()
    now = 0.0
    policy = CostAwareEviction(tree, lambda key: 1, lambda: now, half_life=3.0)
    assert policy.expected_resumes_at_end(None) == pytest.approx(1.2)
    values = [policy.expected_resumes_at_end(-age) for age in (0.0, 3.0, 300.0, 600.0)]
    assert values[1] == pytest.approx(values[0] / 2)
    assert values[3] == pytest.approx(values[2] / 4, rel=0.05)
