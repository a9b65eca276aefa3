"""The parsed form of a grammar: the characters that text may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.llama.sampling.gbnf_rules import ANY, MAX_CODE_POINT, Characters, in_text, letter

CODES = st.integers(0, MAX_CODE_POINT)


def is_text(code: int) -> bool:
    return code > 0 and not 0xD800 <= code <= 0xDFFF


@given(
    ranges=st.lists(st.tuples(CODES, CODES).map(lambda pair: (min(pair), max(pair))), max_size=4),
    code=CODES,
)
def test_ranges_keep_what_text_may_have(ranges: list[tuple[int, int]], code: int) -> None:
    kept = in_text(ranges)
    was_in = any(low <= code <= high for low, high in ranges)
    assert any(low <= code <= high for low, high in kept) == (was_in and is_text(code))
    assert list(kept) == sorted(kept)


@pytest.mark.parametrize(
    ("ranges", "kept"),
    [
        ([(0, 0)], ()),
        ([(0xD800, 0xDFFF)], ()),
        ([(0xD000, 0xE001)], ((0xD000, 0xD7FF), (0xE000, 0xE001))),
        ([(98, 99), (97, 97), (98, 99)], ((97, 97), (98, 99))),
    ],
)
def test_neither_nul_nor_surrogates_are_text(
    ranges: list[tuple[int, int]], kept: tuple[tuple[int, int], ...]
) -> None:
    assert in_text(ranges) == kept


def test_a_letter_matches_itself_alone() -> None:
    assert letter("a") == Characters(((97, 97),))
    assert letter("a") is letter("a"), "it is made once"


def test_any_character_is_one_outside_of_none() -> None:
    assert Characters((), other=True) == ANY
