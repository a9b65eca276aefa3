"""The comparison of a prompt with the nearest remembered one, by sections."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pyctl.cache.prompt_comparison import PromptComparison, compare_prompts
from pyctl.cache.recent import RecentPrompts
from pyctl.prompt import Prompt, PromptSections
from tests.unit.cache.recent_prompts import chat

FIRST = b"1" * 8
SECOND = b"2" * 8
THIRD = b"3" * 8
OTHER = b"4" * 8
SECTIONS = PromptSections(b"tools", b"system", b"variables", FIRST + SECOND + THIRD)

EARLIER = replace(chat(600, 100, 50), sections=SECTIONS)


def compare(
    prompt: Prompt, *earlier: Prompt, may_read_prompts: bool = True
) -> PromptComparison | None:
    recent = RecentPrompts()
    for each in earlier:
        recent.add(each)
    return compare_prompts(prompt, recent.compare(prompt), may_read_prompts=may_read_prompts)


def given(prompt: Prompt, **changes: bytes) -> Prompt:
    return replace(prompt, sections=replace(SECTIONS, **changes))  # type: ignore[arg-type]


def test_a_longer_prompt_continues_the_earlier_one() -> None:
    longer = given(chat(600, 100, 50, 40), messages=FIRST + SECOND + THIRD + OTHER)
    comparison = compare(longer, EARLIER)
    assert comparison is not None
    assert comparison.is_continued
    assert comparison.section is None
    assert comparison.n_changed(len(longer)) == 0
    assert comparison.n_lost(600) == comparison.common - 600


@pytest.mark.parametrize(
    ("changes", "section"),
    [
        ({"tools": b"other"}, "tools"),
        ({"system": b"other"}, "system"),
        ({"variables": b"other"}, "variables"),
        ({"messages": FIRST + OTHER + THIRD}, "message"),
        ({"messages": FIRST + SECOND + THIRD + OTHER}, "template"),
    ],
)
def test_the_first_section_that_differs_is_named(changes: dict[str, bytes], section: str) -> None:
    """Equal messages whose tokens differ were rendered differently by the template."""
    edited = given(chat(600, 100, 50, 40, seed="edited", upto=1), **changes)
    comparison = compare(edited, EARLIER)
    assert comparison is not None
    assert comparison.section == section
    assert comparison.common == 600
    assert comparison.is_same_conversation
    assert comparison.n_changed(len(edited)) == len(EARLIER) - 600


def test_the_number_of_the_message_counts_from_one() -> None:
    edited = given(chat(600, 100, 50, seed="edited", upto=1), messages=FIRST + OTHER + THIRD)
    comparison = compare(edited, EARLIER)
    assert comparison is not None
    assert comparison.message == 2
    assert comparison.n_messages == 3


def test_an_earlier_prompt_of_the_conversation_is_preferred_to_a_longer_match() -> None:
    """A changed head shares its first tokens with any conversation of the client."""
    stranger = replace(chat(600, 900), sections=PromptSections(b"t", b"s", b"variables", OTHER))
    moved = given(chat(600, 90, 70), system=b"other")
    comparison = compare(moved, EARLIER, stranger)
    assert comparison is not None
    assert comparison.section == "system"
    assert comparison.n_earlier == len(EARLIER)


def test_raw_text_is_compared_by_tokens() -> None:
    earlier = Prompt.from_ids([1] * 300)
    comparison = compare(Prompt.from_ids([1] * 200 + [2] * 100), earlier)
    assert comparison is not None
    assert comparison.section == "text"
    assert comparison.is_same_conversation
    short = compare(Prompt.from_ids([1] * 20 + [2] * 100), earlier)
    assert short is not None
    assert not short.is_same_conversation


def test_nothing_in_common_is_no_comparison() -> None:
    assert compare(Prompt.from_ids([1, 2]), Prompt.from_ids([3, 4])) is None


@pytest.mark.parametrize("n_equal", [1, 100, 127, 128, 299])
def test_without_the_right_to_read_shared_tokens_of_others_do_not_show(n_equal: int) -> None:
    """A client could otherwise find the prompt of another one token by token."""
    secret = Prompt.from_ids(range(300))
    planted = Prompt.from_ids([*range(n_equal), 999])
    guess = Prompt.from_ids([*range(n_equal), 998, 7])
    assert compare(guess, secret, planted, may_read_prompts=False) is None
    right = Prompt.from_ids([*range(n_equal + 1), 7])
    if n_equal + 1 < len(secret):
        assert compare(right, secret, planted, may_read_prompts=False) is None


def test_a_client_without_the_right_to_read_continues_its_own_prompt() -> None:
    comparison = compare(
        Prompt.from_ids([1, 2, 3]), Prompt.from_ids([1, 2]), may_read_prompts=False
    )
    assert comparison is not None
    assert comparison.is_continued
