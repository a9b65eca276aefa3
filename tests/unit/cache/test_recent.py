"""The list of recent prompts: its order and bounds, and what a new prompt shares with each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.recent import RecentPrompts
from pyctl.prompt import Prompt
from tests.unit.cache.recent_prompts import boundaries, chat, matches, tokens


def test_a_conversation_is_one_entry_and_the_newest_comes_first() -> None:
    log = RecentPrompts()
    first = chat(30, 10)
    second = chat(30, 10, 20, 10)
    other = chat(40, 5)
    for prompt in (first, other, second, second):
        log.add(prompt)
    assert [one.prompt for one in log.newest_first()] == [second, other]
    assert [one.boundaries_remaining for one in log.newest_first()] == [1, 0]


def test_the_list_is_bounded() -> None:
    log = RecentPrompts(capacity=3, max_tokens=100)
    for i in range(5):
        log.add(Prompt.from_ids([i] * 10))
    assert [one.prompt.tokens[0] for one in log.newest_first()] == [4, 3, 2]
    log.add(Prompt.from_ids([7] * 85))
    assert [len(one.prompt) for one in log.newest_first()] == [85, 10]
    log.add(Prompt.from_ids([8] * 101))
    assert len(log) == 0


@given(ids=st.lists(st.tuples(tokens, boundaries, st.booleans()), max_size=12), prompt=tokens)
def test_all_are_compared_with_one_comparison(
    ids: list[tuple[list[int], set[int], bool]], prompt: list[int]
) -> None:
    log = RecentPrompts(capacity=5, max_tokens=60)
    new = Prompt.from_ids(prompt)
    for each, at, for_disk in ids:
        log.add(Prompt.from_ids(each, at), for_disk=for_disk)
        assert log.compare(new).shared == matches(new, log.newest_first()).shared
    reloaded = RecentPrompts(capacity=5, max_tokens=60)
    reloaded.load(log.newest_first())
    assert reloaded.compare(new).shared == log.compare(new).shared


def test_what_stays_off_the_disk_is_compared_with_but_not_by_a_policy() -> None:
    log = RecentPrompts()
    stored = chat(600, 100)
    private = chat(600, 100, 50)
    longer = chat(600, 100, 50, 40)
    log.add(stored)
    log.add(private, for_disk=False)
    assert [one.prompt for one in log.newest_first()] == [private, stored], (
        "it takes nothing from the policy"
    )
    found = log.compare(longer)
    assert found.closest().recent.prompt is private  # type: ignore[union-attr]
    assert found.closest(1, for_disk=True).recent.prompt is stored  # type: ignore[union-attr]
    log.add(longer)
    assert [one.prompt for one in log.newest_first()] == [longer]
