"""The invariants of the cache, checked from scratch."""

from __future__ import annotations

from collections import Counter

import numpy as np

from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import PromptMatch, Segment, Snapshot
from pyctl.prompt import Tokens, as_tokens


def tokens_of(snapshot: Snapshot) -> Tokens:
    """The tokens that a snapshot covers, from its chain."""
    parts = [segment.tokens[: last - segment.start] for segment, last in snapshot.chain.items()]
    return as_tokens(np.concatenate(parts[::-1]))


def check_invariants(cache: RamCache) -> None:
    """Keys, references and bytes agree with what is stored; the budget and the number of snapshots hold."""
    assert not cache.n_slots or len(cache.snapshots()) + len(cache.ends) <= cache.n_slots
    assert set(cache.snapshots()) == {node.key for node in cache.tree}
    for snapshot in cache.snapshots():
        assert cache.get(snapshot.prefix) is snapshot
        tokens = tokens_of(snapshot)
        assert tokens.size == snapshot.n == snapshot.prefix.n
        assert PromptMatch(tokens).prefix(snapshot.n) == snapshot.prefix, (
            "the key does not name what the snapshot holds"
        )
        rows = snapshot.spans(0, snapshot.n)
        assert [first for _, first, _ in rows] == [0, *(last for _, _, last in rows[:-1])]
        assert rows[-1][2] == snapshot.n
    for snapshot in cache.snapshots()[:3]:
        match = PromptMatch(tokens_of(snapshot))
        begins = {each for each in cache.snapshots() if match.shared(each) == each.n}
        found = cache.lookup(match, snapshot.n)
        assert (set(found), [each.n for each in found]) == (begins, sorted((each.n for each in begins), reverse=True))
    for end in list(cache.ends):
        assert end.state.output.size
        assert PromptMatch(tokens_of(end)).prefix(end.n) == end.prefix

    references: Counter[int] = Counter()
    segments: dict[int, Segment] = {}
    for snapshot in [*cache.snapshots(), *cache.retained, *cache.ends]:
        references[id(snapshot.segment)] += 1
        for segment, _ in snapshot.chain.items():
            segments[id(segment)] = segment
    for segment in segments.values():
        if segment.parent is not None:
            references[id(segment.parent)] += 1
            assert segment.parent.end >= segment.start
            assert id(segment.parent) in segments
    for key, segment in segments.items():
        assert segment.references == references[key]
    n_bytes = sum(segment.n_bytes for segment in segments.values())
    states = [snapshot.state for snapshot in [*cache.snapshots(), *cache.retained, *cache.ends]]
    n_bytes += sum(state.own_bytes for state in states)
    n_bytes += sum({id(block): int(block.nbytes) for state in states for block in state.shared}.values())
    assert cache.n_bytes == n_bytes
    assert cache.pinned <= set(cache.snapshots())
    fixed = cache.retained or cache.pinned
    assert cache.budget is None or cache.n_bytes <= cache.budget or fixed
