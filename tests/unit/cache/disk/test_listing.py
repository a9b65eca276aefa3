"""A prompt is looked up among all that a store holds, at the cost of what continues its own beginning."""

from __future__ import annotations

import hashlib
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.cache.disk.file_format import Name, SegmentName, StateName
from pyctl.cache.disk.listing import Link, Listing
from pyctl.cache.snapshot import PromptMatch
from pyctl.prompt import Tokens, as_tokens
from tests.effort import examples, work

Objects = dict[Name, Link]

HEAD = as_tokens(range(1000, 1064))


def digest(tokens: Tokens) -> bytes:
    return PromptMatch(tokens).prefix(tokens.size).digest


def add(objects: Objects, tokens: Tokens, ends: list[int], parent: SegmentName | None = None) -> SegmentName | None:
    """A segment and a state at each of ``ends``, the first one from the end of ``parent`` on."""
    for end in ends:
        of, start = digest(tokens[:end]), parent.end if parent is not None else 0
        segment = SegmentName(start, end, of, hashlib.blake2b(of + bytes([start % 251]), digest_size=8).digest())
        objects[segment], objects[StateName(end, of)] = Link(parent, True), Link(segment, True)
        parent = segment
    return parent


def listed(objects: Objects) -> Listing:
    return Listing.of(dict.fromkeys(objects, 1), objects)


def lengths_of(listing: Listing, tokens: Tokens, limit: int = 10**6) -> list[int]:
    return [prefix.n for prefix in listing.matching(PromptMatch(tokens), min(limit, tokens.size))]


def conversation(seed: int, n_turns: int, head: Tokens) -> tuple[Tokens, list[int]]:
    random = np.random.default_rng(seed)
    turns = random.integers(5, 60, n_turns)
    ends = list(accumulate(map(int, turns), initial=head.size))
    return as_tokens(np.concatenate([head, random.integers(0, 900, ends[-1] - head.size)])), ends


def fleet(n: int, n_turns: int, head: Tokens) -> Objects:
    """So many conversations that have ``head`` in common, with one segment for it."""
    objects: Objects = {}
    for seed in range(n):
        add(objects, *conversation(seed, n_turns, head))
    return objects


def test_what_a_prompt_begins_with_is_found_shortest_first() -> None:
    listing = listed(fleet(20, 5, HEAD))
    tokens, ends = conversation(7, 5, HEAD)
    longer = as_tokens(np.concatenate([tokens, HEAD]))
    assert lengths_of(listing, longer) == ends
    assert lengths_of(listing, longer, ends[-1] - 1) == ends[:-1]
    assert lengths_of(listing, as_tokens(np.concatenate([HEAD, [7] * 500]))) == [HEAD.size]
    assert lengths_of(listing, as_tokens([7] * 500)) == []
    assert lengths_of(Listing(), tokens) == []


def test_branches_within_a_segment_are_found() -> None:
    """A branch hangs on a segment of which its prompt has the beginning only."""
    objects: Objects = {}
    tokens, _ = conversation(1, 4, HEAD)
    trunk = add(objects, tokens, [50, tokens.size])
    other = as_tokens(np.concatenate([tokens[:60], [5] * 40]))
    branch = SegmentName(60, 100, digest(other), b"8 bytes.")
    objects[branch], objects[StateName(100, digest(other))] = Link(trunk, True), Link(branch, True)
    objects[StateName(90, digest(other[:90]))] = Link(branch, True)
    assert lengths_of(listed(objects), other) == [50, 90, 100]
    assert lengths_of(listed(objects), as_tokens(np.concatenate([other[:95], [9] * 9]))) == [50, 90]
    assert listed(objects).chain(StateName(100, digest(other)))[1:3] == [branch, trunk]


def test_what_lacks_a_part_is_not_found() -> None:
    tokens, ends = conversation(1, 3, HEAD)
    objects: Objects = {}
    add(objects, tokens, ends)
    (middle,) = [each for each in objects if isinstance(each, SegmentName) and each.end == ends[1]]
    sizes = dict.fromkeys(objects, 1)
    del sizes[middle]
    assert lengths_of(Listing.of(sizes, objects), tokens) == ends[:1]
    del objects[middle]
    assert lengths_of(listed(objects), tokens) == ends[:1]
    assert listed(objects).chain(StateName(tokens.size, digest(tokens))) == []
    objects[middle] = Link(middle, True)
    assert lengths_of(listed(objects), tokens) == ends[:1], "it cannot hang on itself"


def test_names_that_lie_about_their_lengths_find_nothing() -> None:
    tokens, ends = conversation(1, 3, HEAD)
    objects: Objects = {}
    last = add(objects, tokens, ends)
    for n in (5, 10**9):
        objects[StateName(n, bytes(16))] = Link(last, True)
    objects[SegmentName(5, 9, bytes(16), bytes(8))] = Link(last, True)
    objects[SegmentName(tokens.size, 10**9, bytes(16), bytes(8))] = Link(last, True)
    assert lengths_of(listed(objects), tokens) == ends


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_all_that_matches_is_found_and_nothing_else(data: st.DataObject) -> None:
    """Of any tree of segments, with branches anywhere."""
    objects: Objects = {}
    texts: dict[SegmentName, Tokens] = {}
    for number in range(data.draw(st.integers(1, 12))):
        parent = data.draw(st.sampled_from([None, *texts]))
        start = data.draw(st.integers(parent.start + 1, parent.end)) if parent is not None else 0
        below = texts[parent][:start] if parent is not None else as_tokens([])
        own = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
        tokens = as_tokens([*below.tolist(), *own])
        segment = SegmentName(start, tokens.size, digest(tokens), number.to_bytes(8, "little"))
        objects[segment], texts[segment] = Link(parent, True), tokens
        for n in data.draw(st.sets(st.integers(start + 1, tokens.size), max_size=3)):
            objects[StateName(n, digest(tokens[:n]))] = Link(segment, True)
    listing = listed(objects)
    prompt = as_tokens(
        data.draw(st.sampled_from(list(texts.values()))).tolist() + data.draw(st.lists(st.integers(0, 1)))
    )
    states = {each for each in objects if isinstance(each, StateName)}
    wanted = [n for n in range(1, prompt.size + 1) if StateName(n, digest(prompt[:n])) in states]
    assert lengths_of(listing, prompt) == wanted


def test_the_cost_is_that_of_the_prompts_own_beginning() -> None:
    """Ten times as many conversations of others cost nothing, longer ones with the same head neither."""
    tokens, ends = conversation(3, 8, HEAD)

    def cost(*others: Objects) -> int:
        objects: Objects = {}
        add(objects, tokens, ends)
        for each in others:
            objects |= each
        listing, prompt = listed(objects), PromptMatch(tokens)
        return work(lambda: listing.matching(prompt, tokens.size))

    elsewhere = as_tokens([3] * 64)
    alone = cost()
    assert cost(fleet(30, 8, elsewhere)) == cost(fleet(300, 8, elsewhere)) <= alone + 20
    assert cost(fleet(30, 20, HEAD)) <= cost(fleet(30, 2, HEAD)) + 20


def test_the_lengths_that_are_compared_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyctl.cache.disk.listing.MOST_LENGTHS", 3)
    tokens, ends = conversation(3, 8, HEAD)
    objects: Objects = {}
    add(objects, tokens, ends)
    assert lengths_of(listed(objects), tokens) == ends[:3]
