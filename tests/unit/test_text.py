"""Text for logs, tables and terminals, and JSON with half a surrogate pair."""

from __future__ import annotations

import json
import re
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pyctl.text import (
    clean,
    duration,
    error_text,
    n_common,
    one_line,
    overlap,
    plain,
    random_id,
    with_whole_characters,
    without_addresses,
)

ANY_TEXT = st.text(st.characters() | st.characters(categories=["Cs", "Cc", "Cf"]), max_size=12)
SHORT = st.text("ab", max_size=6)


@given(text=ANY_TEXT)
@example(text="\x1b]0;title\x07")
@example(text="a\u202eb\u2028c\ud800")
def test_text_for_a_terminal_has_nothing_that_controls_it(text: str) -> None:
    """Every other character stays, line feeds and tabs too."""
    kept = clean(text)
    assert [sign for sign in kept if sign in "\x1b\x07\r\x9b\u202e\u2066\u2028"] == []
    assert kept.encode().decode() == kept, "it has no lone surrogate"
    assert clean(kept) == kept
    assert [sign for sign in text if sign.isprintable() or sign in "\n\t"] == [
        sign for sign in kept if sign.isprintable() or sign in "\n\t"
    ]


@given(text=ANY_TEXT)
def test_a_line_of_a_log_is_one_line_from_which_the_text_can_be_read(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    if "\\" not in text:
        assert re.sub(r"\\(x..|u.{4}|U.{8}|[nrt])", unescaped, line) == text


def unescaped(match: re.Match[str]) -> str:
    return match[0].encode().decode("unicode_escape")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<|im_start|>user\nHi<|im_end|>\n", "You: Hi"),
        ("<|im_start|>wizard\nHi", "wizard: Hi"),
        ("m_end|>\nHi", "Hi"),
        ("<think>\nhm</think>\n\nYes", "hm Yes"),
        ("a < b |> c", "a < b |> c"),
        ("  one\n\n two\t", "one two"),
        ("", ""),
    ],
)
def test_marks_of_a_prompt_are_not_shown(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_an_error_is_one_line_and_never_empty() -> None:
    assert error_text(ValueError("bad\n  value\t1")) == "bad value 1"
    assert error_text(KeyError()) == "KeyError"
    assert error_text(OSError(" \n")) == "OSError"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0.0 s"),
        (2.54, "2.5 s"),
        (10, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 0 min"),
        (7_500, "2 h 5 min"),
        (3_600_000, "1,000 h 0 min"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_addresses_are_left_out_with_all_that_may_be_a_secret() -> None:
    text = "cannot read https://u:p@host/a?key=secret, nor s3://bucket/secret; see a:b"
    shown = without_addresses(text)
    assert "secret" not in shown
    assert shown.count("(an address, in the server's log)") == 2
    assert shown.startswith("cannot read ")
    assert shown.endswith(" see a:b")


@given(one=SHORT, other=SHORT)
def test_a_common_start_is_as_long_as_it_can_be(one: str, other: str) -> None:
    n = n_common(one, other)
    assert one[:n] == other[:n]
    assert n == min(len(one), len(other)) or one[n] != other[n]


@given(text=SHORT, word=SHORT)
def test_an_overlap_is_the_longest_proper_start_of_the_word(text: str, word: str) -> None:
    """A stream holds back as many characters as could still become the word: one too few would send
    a part of a stop word.
    """
    starts = [n for n in range(1, len(word)) if text.endswith(word[:n])]
    assert overlap(text, word) == max(starts, default=0)


def test_ids_are_letters_and_digits_that_differ() -> None:
    made = {random_id() for _ in range(100)}
    assert len(made) == 100
    assert {len(each) for each in made} == {32}
    assert set("".join(made)) <= set(string.ascii_letters + string.digits)


PIECES = st.sampled_from(
    [r"\ud83d", r"\uDE00", r"\\ud83d", r"\\", r"\u00e9", r"\n", "a", "ud83d", r"\"", "é"]
)


@given(pieces=st.lists(PIECES, max_size=8))
def test_half_a_pair_is_replaced_where_a_decoder_would_find_one(pieces: list[str]) -> None:
    """The text decodes as before, but for U+FFFD in place of each lone surrogate: pairs, escaped
    backslashes and everything else stay. A strict decoder would refuse the whole body.
    """
    body = f'"{"".join(pieces)}"'.encode()
    fixed = with_whole_characters(body)
    assert json.loads(fixed) == re.sub("[\ud800-\udfff]", "\ufffd", json.loads(body))
    assert with_whole_characters(fixed) == fixed


def test_escaped_surrogates_are_bounded() -> None:
    """Each costs microseconds of Python, and a body may have millions of them."""
    assert with_whole_characters(rb"\ud83d" * 200_000) == rb"\ufffd" * 200_000
    with pytest.raises(ValueError, match="more than 200000 escaped surrogates"):
        with_whole_characters(rb"\uD83D" * 200_001)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 15, 16, 17, 1_000])
def test_backslashes_before_an_escape_are_counted_however_many_there_are(n: int) -> None:
    """Only an odd number of backslashes starts an escape; the others are text."""
    body = b"\\" * n + b"ud83d"
    escaped = b"\\" * n + b"ufffd"
    assert with_whole_characters(body) == (escaped if n % 2 else body)
