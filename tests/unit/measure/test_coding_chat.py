"""The conversations of `pyctl bench`."""

from __future__ import annotations

from pyctl.measure.coding_chat import coding_chat, turn


def test_chats_differ_from_their_first_words_and_grow_by_turns() -> None:
    one = coding_chat("one", 10_000)
    other = coding_chat("other", 10_000)
    assert one[0] != other[0]
    assert one == coding_chat("one", 10_000)
    assert 10_000 <= sum(len(message["content"]) for message in one) < 11_000
    assert turn(one, "yes", "why?")[-1] == {"role": "user", "content": "why?"}
    assert [message["role"] for message in one[1:]] == ["user", "assistant"] * 3 + ["user"]
