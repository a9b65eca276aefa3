"""The token index finds the same matches as a full search, and no match spans two texts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.engine.draft.token_index import CONTEXT, GAP, GRAMS, MAX_LOOKS, TokenIndex
from pyctl.prompt import Tokens, as_tokens
from tests.effort import examples

SEEDS = st.integers(0, 2**31)


def texts_of(seed: int, n_texts: int, longest: int, n_kinds: int) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    return [as_tokens(rng.integers(0, n_kinds, rng.integers(1, longest))) for _ in range(n_texts)]


def filled(texts: list[Tokens], capacity: int = 2**14) -> TokenIndex:
    index = TokenIndex(capacity)
    for text in texts:
        index.begin()
        index.add(text)
    return index


def matches(texts: list[Tokens], end: list[int]) -> list[int]:
    """Return for each token of each text but the first the length of the end of ``end`` before it,
    by looking everywhere.
    """
    found = []
    for text in (text.tolist() for text in texts):
        for i in range(1, len(text)):
            n = 0
            while n < min(len(end), i, CONTEXT) and text[i - 1 - n] == end[-1 - n]:
                n += 1
            found.append(n)
    return found


@settings(max_examples=examples(60))
@given(seed=SEEDS, n_kinds=st.sampled_from([2, 5, 50, 100_000]))
def test_what_is_found_is_there(seed: int, n_kinds: int) -> None:
    """A match equals the end of the text, token by token, and is the longest there is unless more
    places match than the index compares. No match means that no text has one of the least length.
    """
    texts = texts_of(seed, 6, 300, n_kinds)
    index = filled(texts)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        text = texts[rng.integers(len(texts))]
        cut = int(rng.integers(1, text.size + 1))
        end = [*texts[0][:7].tolist(), *text[max(cut - int(rng.integers(1, 90)), 0) : cut].tolist()]
        place, length = index.find(end)
        every = matches(texts, end)
        if not place:
            assert sum(n >= GRAMS[0] for n in every) == 0
            continue
        assert index.ring[place - length : place].tolist() == end[-length:]
        assert index.ring[place] != GAP
        assert length <= max(every)
        if sum(n >= GRAMS[0] for n in every) <= MAX_LOOKS:
            assert length == max(every)


def test_the_newest_of_equals_or_the_one_near() -> None:
    text = as_tokens(range(100, 200))
    index = filled([text] * 3)
    end = text[:40].tolist()
    places = [1 + 40 + i * 101 for i in range(3)]
    assert index.find(end) == (places[2], 40)
    assert index.find(end, near=places[1] - 1) == (places[1], 40)


def test_the_end_of_a_text_leads_nowhere() -> None:
    texts = [as_tokens(range(10, 30)), as_tokens(range(50, 60))]
    index = filled(texts)
    assert index.find(texts[0].tolist()) == (0, 0)
    assert index.find(texts[0][:-1].tolist())[1] == 19
    assert index.read(1, 100) == texts[0].tolist()
    assert index.find([*texts[0][-3:].tolist(), *texts[1][:3].tolist()]) == (0, 0)


@settings(max_examples=examples(40))
@given(seed=SEEDS)
def test_around_the_ring(seed: int) -> None:
    """The newest texts are found, however many came before, and what is found is never of two
    texts.
    """
    index = TokenIndex(2**10)
    texts = texts_of(seed, 40, 200, 50_000)
    for text in texts:
        index.begin()
        for start in range(0, text.size, 37):
            index.add(text[start : start + 37])
    last = texts[-1]
    known = [text.tolist() for text in texts]
    for text in texts:
        for cut in range(8, text.size - 1, 11):
            place, length = index.find(text[:cut].tolist())
            if not place:
                continue
            read = index.read(place - length, length + 5)
            assert any(read == one[i : i + len(read)] for one in known for i in range(len(one)))
    if last.size > 30:
        # In two pieces, if the ring's end came in between.
        assert (
            sum(index.find(last[:cut].tolist())[0] > 0 for cut in range(5, last.size))
            >= last.size - 5 - 12
        )


def test_near_a_place() -> None:
    index = filled([as_tokens([9, 9, 1, 2, 3, 4, 5, 1, 2, 6, 7, 1, 2])])
    assert index.find_near(4, [1, 2]) == (5, 2)
    assert index.find_near(6, [1, 2]) == (10, 2)
    assert index.find_near(6, [3, 1, 2]) == (10, 2)
    assert index.find_near(4, [5, 1, 2]) == (10, 3)
    assert index.find_near(4, [2]) == (5, 1)
    assert index.find_near(4, [4]) == (0, 0)
    assert index.find_near(10, [2]) == (0, 0)
    assert index.find_near(4, [6, 1]) == (0, 0)


def test_bytes_grow_to_a_bound() -> None:
    index = TokenIndex(2**10)
    assert index.n_bytes == 0
    for _ in range(100):
        index.add(as_tokens(range(100)))
    real = index.ring.nbytes + sum(table.nbytes for table in (*index.newest, *index.before))
    assert index.n_bytes == real


@pytest.mark.parametrize("seed", range(3))
def test_asking_while_another_thread_adds(seed: int) -> None:
    """A search beside a writer returns tokens that were written and places within the ring,
    although it takes no lock. A wrong draft costs time only, but a wrong index would fail.
    """
    index = TokenIndex(2**12)
    done = threading.Event()
    texts = texts_of(seed, 300, 300, 30)

    def add() -> None:
        for text in texts:
            index.begin()
            index.add(text)
        done.set()

    thread = threading.Thread(target=add)
    thread.start()
    n = 0
    while not done.is_set() or n < 300:
        text = texts[n % len(texts)]
        place, length = index.find(text[:100].tolist(), near=n)
        assert 0 <= length <= CONTEXT
        assert all(0 <= token < 30 for token in index.read(place, 64))
        near, _ = index.find_near(place, text[:4].tolist())
        assert 0 <= near < index.capacity
        n += 1
    thread.join()
