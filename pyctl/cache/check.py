"""Check of the cache: names, chains, references and bytes, computed anew from its contents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import PromptMatch, Segment

__all__ = ["find_inconsistencies"]


def find_inconsistencies(cache: RamCache) -> list[str]:
    """Return the contradictions in ``cache``, a line each; [] for a sound cache. Takes the time of
    a hash of all tokens.
    """
    return [*_of_names(cache), *_of_sizes(cache)]


def _of_names(cache: RamCache) -> Iterator[str]:
    """Yield the contradictions between names, tokens and spans of snapshots."""
    snapshots = cache.snapshots()
    if set(snapshots) != {node.key for node in cache.index.tree}:
        yield "the tree has other snapshots than the cache"
    if cache.budget.n_slots and len(snapshots) + len(cache.prompt_ends) > cache.budget.n_slots:
        n = len(snapshots) + len(cache.prompt_ends)
        yield f"{n} snapshots, at most {cache.budget.n_slots} are allowed"
    for snapshot in [*snapshots, *cache.prompt_ends]:
        if PromptMatch(snapshot.last_tokens(snapshot.n)).prefix(snapshot.n) != snapshot.prefix:
            yield f"{snapshot.prefix.name} holds tokens that do not match its name"
        spans = snapshot.spans(0, snapshot.n)
        if [*(first for _, first, _ in spans), snapshot.n] != [0, *(last for _, _, last in spans)]:
            yield f"{snapshot.prefix.name} lacks rows"
    for snapshot in snapshots:
        if cache.get(snapshot.prefix) is not snapshot:
            yield f"{snapshot.prefix.name} is not found by its name"
    if not cache.index.pinned <= set(snapshots):
        yield "a pinned snapshot is missing"


def _of_sizes(cache: RamCache) -> Iterator[str]:
    """Yield the segments whose references are miscounted, and the errors in the count of bytes.

    Segments and blocks are collected by their ids first: each counts once, however many snapshots
    share it.
    """
    holders = [*cache.snapshots(), *cache.index.retained, *cache.prompt_ends]
    segments: dict[int, Segment] = {
        id(each): each for snapshot in holders for each, _ in snapshot.chain.items()
    }
    parents = [segment.parent for segment in segments.values() if segment.parent is not None]
    references = Counter(map(id, [*(snapshot.segment for snapshot in holders), *parents]))
    for segment in segments.values():
        if segment.references != references[id(segment)]:
            counted = f"{segment.references} references, {references[id(segment)]} are there"
            yield f"the segment at [{segment.start}, {segment.end}) counts {counted}"
    states = [snapshot.state for snapshot in holders]
    shared = {id(block): int(block.nbytes) for state in states for block in state.shared}
    n_bytes = sum(each.n_bytes for each in segments.values()) + sum(
        state.own_bytes for state in states
    )
    n_bytes += sum(shared.values())
    if cache.n_bytes != n_bytes:
        yield f"counts {cache.n_bytes} bytes, {n_bytes} are there"
    limit = cache.budget.limit
    may_exceed = cache.index.retained or cache.index.pinned
    if limit is not None and n_bytes > limit and not may_exceed:
        yield f"{n_bytes} bytes, at most {limit} are allowed"
