"""Digests of prefixes depend on their tokens alone, in any order of calls; chains are compared link
by link.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.snapshot import NOTHING, Prefix, PromptMatch, Segment, Snapshot, State
from pyctl.prompt import as_tokens, common_prefix


@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=20))
def test_prefixes_equal_hashing_each_alone(lengths: list[int]) -> None:
    prompt = PromptMatch(as_tokens(np.arange(1000)))
    for n in lengths:
        data = np.arange(n, dtype="<i4").tobytes()
        assert prompt.prefix(n) == Prefix(hashlib.blake2b(data, digest_size=16).digest(), n)


@given(
    st.sets(st.integers(1, 200)),
    st.sets(st.integers(1, 200)),
    st.lists(st.integers(1, 200), max_size=5),
    st.booleans(),
)
def test_prefixes_found_in_one_pass_are_those_named_one_by_one(
    mine: set[int], others: set[int], before: list[int], is_known: bool
) -> None:
    prompt, other = (PromptMatch(as_tokens(np.arange(200) + start)) for start in (0, 1))
    names = {(n, prompt.prefix(n).digest) for n in mine} | {
        (n, other.prefix(n).digest) for n in others
    }
    asked = prompt if is_known else PromptMatch(prompt.tokens)
    for n in before:
        asked.prefix(n)
    assert asked.find_prefixes(names, sorted(mine | others)) == [
        prompt.prefix(n) for n in sorted(mine)
    ]
    assert [asked.prefix(n) for n in range(1, 201)] == [
        PromptMatch(prompt.tokens).prefix(n) for n in range(1, 201)
    ]


@pytest.mark.parametrize("length", [0, -1, 11])
def test_lengths_outside_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match="not a length"):
        PromptMatch(as_tokens(range(10))).prefix(length)


@given(data=st.data())
def test_shared_equals_comparing_the_whole_chain(data: st.DataObject) -> None:
    alphabet = st.integers(0, 1)
    stored = as_tokens(data.draw(st.lists(alphabet, min_size=30, max_size=30)))
    given_tokens = as_tokens(
        data.draw(st.one_of(st.just(stored.tolist()), st.lists(alphabet, min_size=1, max_size=40)))
    )
    prompt = PromptMatch(given_tokens)
    segment = None
    for stop in (*sorted(data.draw(st.sets(st.integers(1, 29), max_size=4))), 30):
        start = segment.end if segment else 0
        segment = Segment(start, as_tokens(stored[start:stop]), NOTHING, segment)
        n = data.draw(st.integers(start + 1, stop))
        snapshot = Snapshot(Prefix(b"", n), segment, State())
        assert prompt.shared(snapshot) == min(common_prefix(stored[:stop], given_tokens), n)
