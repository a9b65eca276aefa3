"""What a full cache loses first: the one place that knows, asked about RAM, the device and the disk.

Caches describe what they hold as a tree of prefixes, and say which of them may go at all (not what is pinned, reserved
or about to be used); the policy chooses among those by what each is worth: expected seconds saved.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pyctl.cache.costs import Costs

__all__ = ["LeastValue", "Likelihoods", "PrefixTree", "TreeNode"]

K = TypeVar("K", bound=Hashable)


@dataclass(eq=False)
class TreeNode(Generic[K]):
    """The snapshot called ``key``: ``n`` tokens, the last of them in ``segment``, used ``hits`` times.

    ``used`` is when it was used last, in units of any one clock. ``parent`` is the deepest shallower snapshot on its
    chain, where its prompts would resume without it. ``seen`` and ``reach`` say when it or a deeper one that has left
    was used last, and how deep that one was; ``newest`` and ``end``, the policy's, the same with all that are
    there, and ``has_turn`` whether one of these that is deeper ``is_turn`` (`Prompt.turn`). ``likely`` is how many
    prompts the policy expects to resume there.
    """

    key: K
    n: int
    segment: Any
    used: float
    hits: int = 0
    is_turn: bool = False
    parent: TreeNode[K] | None = None
    children: set[TreeNode[K]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.seen = self.newest = self.used
        self.reach = self.end = self.n
        self.likely = 0.0
        self.has_turn = False

    @property
    def n_lost(self) -> int:
        """Tokens to evaluate again when it is gone."""
        return self.n - (self.parent.n if self.parent is not None else 0)


@dataclass(eq=False)
class _Link:
    """Where a segment hangs: on ``parent`` up to ``last``; ``n_on`` snapshots end in it or segments hang on it."""

    parent: Any
    last: int
    children: set[Any] = field(default_factory=set)
    n_on: int = 0


class PrefixTree(Generic[K]):
    """Which snapshot continues which, kept up to date as they come and go.

    A snapshot lies on a chain of segments, each with the position up to which it counts. It stems from a shallower one
    when it shares all of that one's rows. Adding and removing cost as much as there are segments to the next snapshot.
    """

    def __init__(self) -> None:
        self._nodes: dict[K, TreeNode[K]] = {}
        self._roots: set[TreeNode[K]] = set()
        self._ending_in: defaultdict[Any, set[TreeNode[K]]] = defaultdict(set)
        self._links: dict[Any, _Link] = {}
        self.changed: set[TreeNode[K]] = set()  # those that came or got other neighbours since this was emptied

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[TreeNode[K]]:
        return iter(self._nodes.values())

    def __getitem__(self, key: K) -> TreeNode[K]:
        return self._nodes[key]

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def has(self, node: TreeNode[K]) -> bool:
        """Whether this very node is still here."""
        return self._nodes.get(node.key) is node

    def add(self, key: K, n: int, chain: Iterable[tuple[Any, int]], used: float, hits: int = 0) -> TreeNode[K]:
        """Enter a snapshot of ``n`` tokens; ``chain`` yields its segments, the deepest first, as far as is new."""
        deepest = self._link(chain)
        node = TreeNode(key, n, deepest, used, hits)
        node.parent = parent = self._below(node)
        siblings = self._children_of(parent)
        if self._links[deepest].n_on:
            node.children = {other for other in siblings if other.n > n and self._passes(other, deepest, n)}
        for child in node.children:
            child.parent = node
        siblings -= node.children
        siblings.add(node)
        self._nodes[key] = node
        self._ending_in[deepest].add(node)
        self._links[deepest].n_on += 1
        self.changed |= {node, *node.children} if parent is None else {node, parent, *node.children}
        return node

    def touch(self, key: K, used: float) -> None:
        """Note that a snapshot was used."""
        node = self._nodes[key]
        node.used = node.seen = used
        node.reach = node.n
        node.hits += 1

    def remove(self, key: K) -> None:
        """Take a snapshot out; what stems from it stems from its parent now."""
        node = self._nodes.pop(key)
        siblings = self._children_of(node.parent)
        siblings.remove(node)
        siblings |= node.children
        for child in node.children:
            child.parent = node.parent
        if node.parent is not None and node.seen >= node.parent.seen:
            node.parent.seen, node.parent.reach = node.seen, node.reach
        self.changed.discard(node)
        self.changed |= node.children if node.parent is None else {node.parent, *node.children}
        ending = self._ending_in[node.segment]
        ending.remove(node)
        if not ending:
            del self._ending_in[node.segment]
        self._unlink(node.segment)

    def through(self, segment: Any) -> list[TreeNode[K]]:
        """The snapshots that need a segment."""
        found: list[TreeNode[K]] = []
        waiting = [segment] if segment in self._links else []
        while waiting:
            at = waiting.pop()
            found += self._ending_in.get(at, ())
            waiting += self._links[at].children
        return found

    def weights(self) -> dict[Any, float]:
        """For each segment, how likely the snapshots that need it are, all together."""
        sums = dict.fromkeys(self._links, 0.0)
        for segment, nodes in self._ending_in.items():
            sums[segment] = sum(node.likely for node in nodes)
        missing = {segment: len(link.children) for segment, link in self._links.items()}
        ready = [segment for segment, n in missing.items() if n == 0]
        while ready:
            segment = ready.pop()
            parent = self._links[segment].parent
            if parent is not None:
                sums[parent] += sums[segment]
                missing[parent] -= 1
                if missing[parent] == 0:
                    ready.append(parent)
        return sums

    def _link(self, chain: Iterable[tuple[Any, int]]) -> Any:
        """Note what hangs on what; returns the deepest segment."""
        deepest = below = None
        for segment, last in chain:
            link = self._links.get(segment)
            is_known = link is not None
            if link is None:
                link = self._links[segment] = _Link(None, 0)
            if below is None:
                deepest = segment
            else:
                under = self._links[below]
                under.parent, under.last = segment, last
                link.children.add(below)
                link.n_on += 1
            if is_known:
                break
            below = segment
        return deepest

    def _unlink(self, segment: Any) -> None:
        while segment is not None:
            link = self._links[segment]
            link.n_on -= 1
            if link.n_on:
                return
            del self._links[segment]
            if link.parent is not None:
                self._links[link.parent].children.remove(segment)
            segment = link.parent

    def _children_of(self, parent: TreeNode[K] | None) -> set[TreeNode[K]]:
        return parent.children if parent is not None else self._roots

    def _below(self, node: TreeNode[K]) -> TreeNode[K] | None:
        segment, last = node.segment, node.n
        while segment is not None:
            found = [other for other in self._ending_in.get(segment, ()) if other.n <= last and other.n < node.n]
            if found:
                return max(found, key=lambda other: other.n)
            link = self._links[segment]
            segment, last = link.parent, link.last
        return None

    def _passes(self, node: TreeNode[K], segment: Any, n: int) -> bool:
        """Whether ``n`` tokens of ``segment`` are on the chain of a deeper snapshot."""
        at, last = node.segment, node.n
        while at is not None and last >= n:
            if at is segment:
                return True
            link = self._links[at]
            at, last = link.parent, link.last
        return False


SAME_MOMENT_SECONDS = 60.0
"""Added to the age of what is on disk, so that what was used a moment ago is not told apart by it."""


RANKED_AT_ONCE = 128
"""Snapshots for each of which time passes at every unit of the clock; of more it passes in fewer, longer steps."""


@dataclass(frozen=True)
class Likelihoods:
    """Where the next prompt of a conversation resumes, as weights that `bench.policy --weights` bears out.

    Most go on at the ``end``. Of the others, histories that are cut back, a distance from the end is as likely as twice
    that, from ``near`` tokens on; ``head`` begin anew behind the very first snapshot. A place at which more prompts
    parted than the first is likely to be one again: each time counts ``again``. A history that is written anew when
    the user speaks again stays as it is up to the reply to what the user had said before: there ``turn`` resume.
    """

    end: float = 0.65
    head: float = 0.2
    near: int = 64
    again: float = 0.5
    turn: float = 0.5
    most_again: int = 8


class LeastValue(Generic[K]):
    """The policy of all tiers: what is worth least per byte goes first.

    A snapshot is worth the seconds that its prompts would lose without it (the tokens between it and its parent), times
    how likely such a prompt is. That depends on how far it is from the ends of the conversations through it, and on how
    long ago these were used: after ``half`` units of ``clock`` half as likely, after three times that a quarter.
    ``freed`` are the bytes that go with it.
    """

    def __init__(
        self,
        tree: PrefixTree[K],
        freed: Callable[[K], int],
        clock: Callable[[], float] = time.time,
        costs: Costs | None = None,
        *,
        half: float = SAME_MOMENT_SECONDS,
        likelihoods: Likelihoods = Likelihoods(),
    ) -> None:
        self._tree, self._freed, self._clock = tree, freed, clock
        self._costs = costs or Costs()
        self.half, self.likelihoods = half, likelihoods
        self._heap: list[tuple[float, int, TreeNode[K]]] = []
        self._count = itertools.count()
        self._now = -math.inf
        self._per_byte = True

    def victim(self, may_go: Callable[[K], bool], *, per_byte: bool = True) -> K | None:
        """What to lose next, None if nothing may go; without ``per_byte`` all count as equally large."""
        self._rank(per_byte)
        heap, staying = self._heap, []
        found: K | None = None
        while heap and found is None:
            ranked, number, node = heapq.heappop(heap)
            if not self._tree.has(node):
                continue
            value = self._value(node)
            if heap and value > max(ranked, heap[0][0]):  # an entry of before something changed beside it
                heapq.heappush(heap, (value, number, node))
                continue
            staying.append((value, number, node))
            if may_go(node.key):
                found = node.key
        for entry in staying:
            heapq.heappush(heap, entry)
        return found

    def ranked(self) -> list[K]:
        """All, the least worth per byte first."""
        self._rank(True)
        values = {node.key: self._value(node) for node in self._tree}
        return sorted(values, key=values.__getitem__)

    def worth(self, key: K) -> float:
        """The seconds that a snapshot can be expected to save."""
        self._rank(self._per_byte)
        return self._worth(self._tree[key])

    def worth_together(self, keys: Collection[K]) -> float:
        """The seconds that these can be expected to save, if all of them go."""
        self._rank(self._per_byte)
        seconds, resumed = 0.0, dict[K, int]()
        for node in sorted(map(self._tree.__getitem__, keys), key=_depth):
            above = node.parent
            first = 0 if above is None else resumed.get(above.key, above.n)
            resumed[node.key] = first
            seconds += node.likely * self._costs.evaluate(first, node.n)
        return seconds

    def segment_weights(self) -> dict[Any, float]:
        """For each segment of the tree, how many prompts to expect that resume on its rows."""
        self._rank(self._per_byte)
        return self._tree.weights()

    def _likelihood(self, node: TreeNode[K]) -> float:
        odds, total, newest = self.likelihoods, 0.0, -math.inf
        for child in node.children:
            newest = max(newest, child.newest)
            total += self._decay(child.newest) * self._cut_back(child.end, node.n, child.n)
        if node.seen > newest:  # nothing deeper is there of the conversation that was here last
            total += self._decay(node.seen) * (odds.end + self._cut_back(node.reach, node.n, node.reach))
        if node.parent is None:
            total += odds.head * self._decay(node.newest)
        if node.is_turn and not node.has_turn:
            total += odds.turn * self._decay(node.newest)
        again = max(len(node.children), node.hits) - 1
        if again > 0:
            total += odds.again * min(again, odds.most_again) * self._decay(node.used)
        return total

    def _cut_back(self, end: int, first: int, last: int) -> float:
        """How likely a conversation of ``end`` tokens goes on between ``first`` and ``last`` instead."""
        near = self.likelihoods.near
        return (
            (1 - self.likelihoods.end) * math.log((end - first + near) / (end - last + near)) / math.log1p(end / near)
        )

    def _decay(self, used: float) -> float:
        age = self._now - used
        return self.half / (age + self.half) if age > 0 else 1.0

    def _worth(self, node: TreeNode[K]) -> float:
        first = node.parent.n if node.parent is not None else 0
        return node.likely * self._costs.evaluate(first, node.n)

    def _value(self, node: TreeNode[K]) -> float:
        worth = self._worth(node)
        return worth / max(self._freed(node.key), 1) if self._per_byte else worth

    def _rank(self, per_byte: bool) -> None:
        """Have everything in the heap, anew whenever the clock has moved on by a unit."""
        now, changed = self._clock(), self._tree.changed
        if now - self._now >= max(1, len(self._tree) / RANKED_AT_ONCE) or per_byte != self._per_byte:
            self._now, self._per_byte = now, per_byte
            self._look_ahead()
            for node in self._tree:
                node.likely = self._likelihood(node)
            self._heap = [(self._value(node), next(self._count), node) for node in self._tree]
            heapq.heapify(self._heap)
        else:
            for node in changed:
                node.likely = self._likelihood(node)
                heapq.heappush(self._heap, (self._value(node), next(self._count), node))
        changed.clear()

    def _look_ahead(self) -> None:
        """Note of each snapshot when and how deep the newest conversation through it goes on."""
        deepest_first = sorted(self._tree, key=_depth, reverse=True)
        for node in deepest_first:
            node.newest, node.end, node.has_turn = node.seen, node.reach, False
        for node in deepest_first:
            parent = node.parent
            if parent is not None and node.newest >= parent.newest:
                parent.newest, parent.end, parent.has_turn = node.newest, node.end, node.is_turn or node.has_turn


def _depth(node: TreeNode[Any]) -> int:
    return node.n
