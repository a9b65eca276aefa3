"""The last listing of a store, and the lookup of prompts in it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyctl.cache.disk.file_format import Name, SegmentName, StateName
from pyctl.cache.snapshot import Prefix, PromptMatch
from pyctl.limit import limit

__all__ = ["MOST_OBJECTS", "Link", "Listing"]

MOST_OBJECTS = limit(2**17, "objects of a model that are listed in the store", "the others are not found", "disk")

MOST_LENGTHS = limit(
    4096, "lengths at which a prompt is compared with the store", "longer snapshots are not found", "request"
)


@dataclass(frozen=True)
class Link:
    """On which segment an object hangs, and whether a state is exact."""

    parent: SegmentName | None
    exact: bool


@dataclass(frozen=True)
class Listing:
    """The bytes of each object, and on what it hangs; ``states`` are those with all that they need.

    ``lengths`` are those at which states and segments end, ascending, by the deepest prefix that a prompt must have to
    have any of them; None is no such prefix. So a prompt is compared with what continues its own beginning only.
    """

    sizes: Mapping[Name, int] = field(default_factory=dict)
    links: Mapping[Name, Link] = field(default_factory=dict)
    states: frozenset[StateName] = frozenset()
    lengths: Mapping[Prefix | None, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, sizes: Mapping[Name, int], links: Mapping[Name, Link]) -> Listing:
        """Of all objects by name, and of what is known about them."""
        states: set[StateName] = set()
        lengths: defaultdict[Prefix | None, set[int]] = defaultdict(set)
        needed: dict[SegmentName, Prefix | None] = {}  # by whole segments, before where they begin

        def above(segment: SegmentName | None, start: int) -> Prefix | None:
            """What a prompt needs to have something that hangs on ``segment`` from ``start`` on."""
            if segment is None:
                return None
            if segment.end > start:  # a branch within it
                return needed[segment]
            lengths[needed[segment]].add(segment.end)
            return Prefix(segment.digest, segment.end)

        known = [(name, links[name].parent) for name in sizes if name in links]
        segments = [(name, parent) for name, parent in known if isinstance(name, SegmentName)]
        for segment, parent in sorted(segments, key=lambda each: each[0].start):
            if parent is None or (parent in needed and parent.start < segment.start):
                needed[segment] = above(parent, segment.start)
        for name, parent in known:
            if isinstance(name, StateName) and parent in needed:
                states.add(name)
                lengths[above(parent, name.n - 1)].add(name.n)
        found = {at: tuple(sorted(each)) for at, each in lengths.items()}
        return cls(sizes, links, frozenset(states), found)

    def chain(self, state: StateName) -> list[Name]:
        """``state`` and the segments under it, the last one first; nothing if some are not known or not there."""
        if state not in self.states:
            return []
        found: list[Name] = []
        at: Name | None = state
        while at is not None:
            found.append(at)
            at = self.links[at].parent
        return found

    @property
    def n_bytes(self) -> int:
        """Of all objects."""
        return sum(self.sizes.values())

    def matching(self, prompt: PromptMatch, limit: int) -> list[Prefix]:
        """The states with which ``prompt`` begins, of ``limit`` tokens at most, the shortest first."""
        found: list[Prefix] = []
        # The next length to compare below each prefix that the prompt has; ascending, all cost one pass over it.
        coming = [(lengths[0], 0, lengths)] if (lengths := self.lengths.get(None)) else []
        last = n_compared = 0
        while coming and coming[0][0] <= limit and n_compared < MOST_LENGTHS:
            n, at, lengths = heapq.heappop(coming)
            if at + 1 < len(lengths):
                heapq.heappush(coming, (lengths[at + 1], at + 1, lengths))
            if n == last:
                continue
            last, n_compared = n, n_compared + 1
            prefix = prompt.prefix(n)
            if StateName.of(prefix) in self.states:
                found.append(prefix)
            if below := self.lengths.get(prefix):
                heapq.heappush(coming, (below[0], 0, below))
        return found
