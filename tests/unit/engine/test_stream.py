"""Streamed text: characters are not split, stop strings do not leak."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.engine.stream import TextStream


def stream(chunks: list[bytes], *stop: str) -> tuple[str, str]:
    text = TextStream(stop)
    sent = []
    for chunk in chunks:
        sent.append(text.feed(chunk))
        if text.stopping_word:
            break
    sent.append(text.flush())
    return "".join(sent), text.stopping_word


@given(text=st.text(max_size=60), size=st.integers(1, 5))
def test_utf8_survives_any_chunking(text: str, size: int) -> None:
    data = text.encode()
    assert stream([data[i : i + size] for i in range(0, len(data), size)]) == (text, "")


@pytest.mark.parametrize("stop", [(), ("x",)])
@pytest.mark.parametrize("letter", ["é", "€", "🙂"])
def test_half_a_character_is_held_back_and_left_out_at_the_end(letter: str, stop: tuple[str, ...]) -> None:
    for size in range(1, len(letter.encode())):
        assert stream([b"a", letter.encode()[:size]], *stop) == ("a", "")
    assert stream([b"\xc3", b"a"], *stop) == ("\ufffda", ""), "what no end explains is shown"


@given(
    text=st.text("abc ", max_size=40),
    words=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 4),
)
def test_stop_strings_across_chunks(text: str, words: list[str], size: int) -> None:
    chunks = [text[i : i + size].encode() for i in range(0, len(text), size)]
    sent, stopped = stream(chunks, *words)
    ends = [text.find(word) for word in words if word in text]
    assert bool(stopped) == bool(ends)
    assert text.startswith(sent)
    if ends:
        assert not any(word in sent for word in words)
        assert text[len(sent) :].startswith(stopped)
    else:
        assert sent == text


@pytest.mark.parametrize("stop", [(), ("",), ("xyz",)])
def test_without_a_match_everything_comes_out(stop: tuple[str, ...]) -> None:
    assert stream([b"xy", b"xyx"], *stop) == ("xyxyx", "")
