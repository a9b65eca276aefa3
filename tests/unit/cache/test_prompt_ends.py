"""The snapshots at prompt ends: they leave before all others, the least recently used first."""

from __future__ import annotations

import pytest

from pyctl.cache.check import find_inconsistencies
from pyctl.cache.prompt_ends import MAX_ENDS
from pyctl.cache.ram import RamCache
from tests.unit.cache.snapshots import STATE, n_bytes_of, snapshot


def test_the_least_recently_used_leaves_first() -> None:
    cache = RamCache(0, 3 * n_bytes_of(100))
    ends = [snapshot(seed, 100) for seed in range(4)]
    for end in ends[:3]:
        assert cache.prompt_ends.add(end, is_wanted=False)
    cache.prompt_ends.touch(ends[0])
    assert cache.prompt_ends.add(ends[3], is_wanted=False)
    assert list(cache.prompt_ends) == [ends[2], ends[0], ends[3]]
    assert find_inconsistencies(cache) == []


def test_one_prompt_has_one_end() -> None:
    cache = RamCache(0, None)
    older = snapshot(1, 100)
    newer = snapshot(1, 100)
    assert cache.prompt_ends.add(older, is_wanted=False)
    assert cache.prompt_ends.add(newer, is_wanted=False)
    assert list(cache.prompt_ends) == [newer]
    assert find_inconsistencies(cache) == []


def test_a_locked_end_stays() -> None:
    cache = RamCache(0, n_bytes_of(100))
    first = snapshot(1, 100)
    second = snapshot(2, 100)
    cache.prompt_ends.add(first, is_wanted=False)
    with cache.locked(first, second):
        assert not cache.prompt_ends.add(second, is_wanted=False)
    assert list(cache.prompt_ends) == [first]


def test_there_are_no_more_than_the_maximum() -> None:
    cache = RamCache(0, None)
    ends = [snapshot(seed, 100) for seed in range(MAX_ENDS + 2)]
    for end in ends:
        cache.prompt_ends.add(end, is_wanted=False)
    assert list(cache.prompt_ends) == ends[2:]


@pytest.mark.parametrize("is_wanted", [False, True])
def test_only_a_wanted_end_takes_room_from_conversations(is_wanted: bool) -> None:
    cache = RamCache(0, n_bytes_of(100))
    conversation = snapshot(1, 100)
    assert cache.add(conversation)
    end = snapshot(2, 100)
    with cache.locked(end):
        assert cache.prompt_ends.may_add(end.n_bytes, is_wanted=is_wanted) == is_wanted
        assert cache.prompt_ends.add(end, is_wanted=is_wanted) == is_wanted
    assert cache.snapshots() == ([] if is_wanted else [conversation])
    assert find_inconsistencies(cache) == []


def test_ends_pay_before_conversations() -> None:
    cache = RamCache(0, 2 * n_bytes_of(100))
    conversation = snapshot(1, 100)
    assert cache.add(conversation)
    assert cache.prompt_ends.add(snapshot(2, 100), is_wanted=False)
    assert cache.add(snapshot(3, 100))
    assert len(cache.prompt_ends) == 0
    assert conversation in cache.snapshots()


def test_a_slot_of_a_conversation_is_none_for_an_end() -> None:
    cache = RamCache(2, None)
    assert cache.prompt_ends.add(snapshot(1, 100), is_wanted=False)
    for seed in (2, 3):
        assert cache.add(snapshot(seed, 100))
    assert len(cache.prompt_ends) == 0
    assert not cache.prompt_ends.may_add(0, is_wanted=True)


def test_the_bytes_of_all_states_become_free() -> None:
    cache = RamCache(0, None)
    for seed in (1, 2):
        cache.prompt_ends.add(snapshot(seed, 100), is_wanted=False)
    assert cache.prompt_ends.n_bytes == 2 * STATE


def test_ends_of_a_dropped_prefix_go_with_it() -> None:
    cache = RamCache(0, None)
    prefix = snapshot(1, 50)
    deeper = snapshot(1, 100, prefix.segment)
    other = snapshot(2, 100)
    assert cache.add(prefix)
    for end in (deeper, other):
        assert cache.prompt_ends.add(end, is_wanted=False)
    assert cache.prompt_ends.through(prefix.segment) == [deeper]
    cache.prompt_ends.drop_descendants(prefix)
    assert list(cache.prompt_ends) == [other]
    assert find_inconsistencies(cache) == []


def test_an_end_on_dropped_rows_is_an_error() -> None:
    cache = RamCache(0, None)
    prefix = snapshot(1, 50)
    assert cache.add(prefix)
    cache.drop(prefix)
    with pytest.raises(ValueError, match="rows that were dropped"):
        cache.prompt_ends.add(snapshot(1, 100, prefix.segment), is_wanted=False)
