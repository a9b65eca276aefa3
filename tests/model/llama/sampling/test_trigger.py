"""Triggers of lazy grammars do not depend on how a reply is split into tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.errors import RequestError
from pyctl.llama.sampling.trigger import TriggerWatch

CALL = "(<call>)"
THOUGHT = ("<think>", "</think>")


def woken(
    text: str, *patterns: str, hidden: tuple[str, str] | None = None, size: int = 1
) -> list[bytes]:
    """Return the texts that activate the grammar while it reads ``text`` in pieces of ``size``
    bytes.
    """
    watch = TriggerWatch(patterns, hidden)
    data = text.encode()
    found = (watch.feed(data[at : at + size]) for at in range(0, len(data), size))
    return [text for text in found if text is not None]


@pytest.mark.parametrize(
    ("text", "hidden", "n"),
    [
        ("Well. <call>", None, 1),
        ("<think>Shall I <call>? No.</think>Well.", THOUGHT, 0),
        (" <think>Shall I <call>? Yes.</think>\n\n<call>", THOUGHT, 1),
        ("Well. <think><call>", THOUGHT, 1),
        ("<thin <call>", THOUGHT, 1),
        ("I <call>? No.</think>Well.", ("", "</think>"), 0),
        ("I <call>? Yes.</think><call>", ("", "</think>"), 1),
        ("<call>", ("", "</think>"), 0),
        ("<call> again <call>", None, 2),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_call_wakes_and_one_in_a_hidden_stretch_does_not(
    text: str, hidden: tuple[str, str] | None, n: int, size: int
) -> None:
    found = woken(text, CALL, hidden=hidden, size=size)
    assert len(found) == (min(n, 1) if size == 100 else n)
    assert all(each.startswith(b"<call>") for each in found)


def test_the_first_group_says_where_the_grammar_begins() -> None:
    assert woken("say: call", r"say: (call)") == [b"call"]
    assert woken("say: call", r"say: call") == [b"say: call"]


def test_an_anchored_trigger_counts_where_the_content_begins_only() -> None:
    anchored = r'^\s*(\{"name")'
    assert woken(' {"name"', anchored) == [b'{"name"']
    assert woken('So: {"name"', anchored) == []
    assert woken('So\n{"name"', anchored) == []
    assert woken('<think>So</think>\n{"name"', anchored, hidden=THOUGHT) == [b'{"name"']
    assert woken("x" * 5000 + '{"name"', anchored) == []


@given(st.text("<cal>x", max_size=60), st.integers(1, 9))
def test_the_pieces_do_not_matter(text: str, size: int) -> None:
    assert bool(woken(text, CALL, size=size)) == ("<call>" in text)


def test_a_long_reply_is_not_searched_again_and_again() -> None:
    watch = TriggerWatch([CALL])
    for _ in range(200_000):  # seconds, if each piece were searched with all before it
        assert watch.feed(b"words ") is None
    assert watch.feed(b"<call>") == b"<call>"


def test_a_broken_trigger_is_refused() -> None:
    with pytest.raises(RequestError):
        TriggerWatch(["("])
