"""The eviction policy of RAM, the device and the disk.

A cache describes its contents as a tree of prefixes, and excludes pinned and locked ones from
eviction. The policy chooses among the others by worth: the seconds that a snapshot is expected to
save.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pyctl.cache.costs import Costs
from pyctl.cache.prefix_tree import PrefixTree, TreeNode

__all__ = ["CostAwareEviction", "Likelihoods"]

K = TypeVar("K", bound=Hashable)

SAME_MOMENT_SECONDS = 60.0
"""Added to the age of snapshots on disk, so that uses within a moment count alike."""

RANKED_AT_ONCE = 128
"""Snapshots for each of which time passes at every unit of the clock; of more it passes in fewer,
longer steps.
"""


@dataclass(frozen=True)
class Likelihoods:
    """Where the next prompt of a conversation resumes, as weights that `bench.policy --weights`
    bears out.

    Most go on at the ``end``. Of the others, histories that are cut back, a distance from the end
    is as likely as twice that, from ``near`` tokens on. As likely as ``head`` a new conversation
    starts as this one did, up to a place in its opening (before the first reply), and near its end
    rather than far from it: the programs' text about the day, the folder or the task comes late.
    Where an opening is not known, that is after the very first snapshot. A place at which more
    prompts parted than the first is likely to be one again: each time counts ``again``. A history
    that is written anew when the user speaks again stays as it is up to the reply to what the user
    had said before: there ``turn`` resume.
    """

    end: float = 0.65
    head: float = 0.2
    near: int = 64
    again: float = 0.5
    turn: float = 0.5
    max_again: int = 8


class CostAwareEviction(Generic[K]):
    """The policy of all tiers: evict the least worth per byte first.

    A snapshot is worth the seconds that its prompts would lose without it (the tokens between it
    and its parent), times how likely such a prompt is. That depends on how far it is from the ends
    of the conversations through it, and on how long ago these were used: after ``half`` units of
    ``clock`` half as likely, after three times that a quarter. ``freed`` are the bytes that go with
    it.
    """

    def __init__(
        self,
        tree: PrefixTree[K],
        freed: Callable[[K], int],
        clock: Callable[[], float] = time.time,
        costs: Costs | None = None,
        *,
        half: float = SAME_MOMENT_SECONDS,
    ) -> None:
        self._tree = tree
        self._freed = freed
        self._clock = clock
        self._costs = costs or Costs()
        self.half = half
        self.likelihoods = Likelihoods()
        self._heap: list[tuple[float, int, TreeNode[K]]] = []
        self._count = itertools.count()
        self._now = -math.inf
        self._per_byte = True

    def victim(self, is_evictable: Callable[[K], bool], *, per_byte: bool = True) -> K | None:
        """The next snapshot to evict, None if all must stay; without ``per_byte`` all count as
        equally large.
        """
        self._rank(per_byte)
        heap = self._heap
        staying = []
        found: K | None = None
        while heap and found is None:
            ranked, number, node = heapq.heappop(heap)
            if not self._tree.has(node):
                continue
            worth = self._worth(node, per_byte=per_byte)
            if heap and worth > max(ranked, heap[0][0]):  # an outdated entry: a neighbour changed
                heapq.heappush(heap, (worth, number, node))
                continue
            staying.append((worth, number, node))
            if is_evictable(node.key):
                found = node.key
        for entry in staying:
            heapq.heappush(heap, entry)
        return found

    def ranked(self) -> list[K]:
        """All, the least worth per byte first."""
        self._rank(True)
        worth = {node.key: self._worth(node, per_byte=True) for node in self._tree}
        return sorted(worth, key=worth.__getitem__)

    def worth(self, key: K, *, per_byte: bool = False) -> float:
        """The seconds that a snapshot can be expected to save, in all or ``per_byte`` that it
        frees.
        """
        self._rank(self._per_byte)
        return self._worth(self._tree[key], per_byte=per_byte)

    def worth_together(self, keys: Collection[K]) -> float:
        """The seconds that these can be expected to save, if all of them go."""
        self._rank(self._per_byte)
        seconds = 0.0
        resumed = dict[K, int]()
        for node in sorted(map(self._tree.__getitem__, keys), key=_depth):
            above = node.parent
            first = 0 if above is None else resumed.get(above.key, above.n)
            resumed[node.key] = first
            seconds += node.likely * self._costs.evaluate(first, node.n)
        return seconds

    def likely_within(self, used: float | None) -> float:
        """Expected prompts that resume in a conversation last used at ``used`` seconds of the
        clock, None for now.
        """
        now = self._clock()
        return (1 + self.likelihoods.head) * self._decay(now if used is None else used, now)

    def likely(self) -> dict[Any, float]:
        """For each segment of the tree, how many prompts to expect that resume on its rows."""
        self._rank(self._per_byte)
        return self._tree.likely()

    def _likelihood(self, node: TreeNode[K]) -> float:
        odds = self.likelihoods
        total = 0.0
        newest = -math.inf
        for child in node.children:
            newest = max(newest, child.newest)
            likely = self._cut_back(child.end, node.n, child.n) + self._anew(
                child.begun, node.n, child.n
            )
            total += self._decay(child.newest) * likely
        if node.seen > newest:  # the last conversation here has no deeper snapshot
            behind = self._cut_back(node.reach, node.n, node.reach) + self._anew(
                node.opening, node.n, node.reach
            )
            total += self._decay(node.seen) * (odds.end + behind)
        if node.parent is None and not node.begun:
            total += odds.head * self._decay(node.newest)
        if node.is_turn and not node.has_turn:
            total += odds.turn * self._decay(node.newest)
        again = max(len(node.children), node.hits) - 1
        if again > 0:
            total += odds.again * min(again, odds.max_again) * self._decay(node.used)
        return total

    def _cut_back(self, end: int, first: int, last: int) -> float:
        """How likely a conversation of ``end`` tokens goes on between ``first`` and ``last``
        instead.
        """
        near = self.likelihoods.near
        return (
            (1 - self.likelihoods.end)
            * math.log((end - first + near) / (end - last + near))
            / math.log1p(end / near)
        )

    def _anew(self, opening: int, first: int, last: int) -> float:
        """How likely another conversation leaves this one's first ``opening`` tokens between
        ``first`` and ``last``.
        """
        last = min(last, opening)
        odds = self.likelihoods
        if first >= last:
            return 0.0
        share = math.log((opening - first + odds.near) / (opening - last + odds.near))
        return odds.head * share / math.log1p(opening / odds.near)

    def _decay(self, used: float, now: float | None = None) -> float:
        age = (self._now if now is None else now) - used
        return self.half / (age + self.half) if age > 0 else 1.0

    def _worth(self, node: TreeNode[K], *, per_byte: bool) -> float:
        first = node.parent.n if node.parent is not None else 0
        seconds = node.likely * self._costs.evaluate(first, node.n)
        return seconds / max(self._freed(node.key), 1) if per_byte else seconds

    def _rank(self, per_byte: bool) -> None:
        """Have everything in the heap, anew whenever the clock has moved on by a unit."""
        now = self._clock()
        changed = self._tree.changed
        if (
            now - self._now >= max(1, len(self._tree) / RANKED_AT_ONCE)
            or per_byte != self._per_byte
        ):
            self._now = now
            self._per_byte = per_byte
            self._look_ahead()
            for node in self._tree:
                node.likely = self._likelihood(node)
            self._heap = [
                (self._worth(node, per_byte=per_byte), next(self._count), node)
                for node in self._tree
            ]
            heapq.heapify(self._heap)
        else:
            for node in changed:
                node.likely = self._likelihood(node)
                heapq.heappush(
                    self._heap, (self._worth(node, per_byte=per_byte), next(self._count), node)
                )
        changed.clear()

    def _look_ahead(self) -> None:
        """Note of each snapshot when and how deep the newest conversation through it goes on."""
        deepest_first = sorted(self._tree, key=_depth, reverse=True)
        for node in deepest_first:
            node.newest = node.seen
            node.end = node.reach
            node.begun = node.opening
            node.has_turn = False
        for node in deepest_first:
            parent = node.parent
            if parent is not None and node.newest >= parent.newest:
                parent.newest = node.newest
                parent.end = node.end
                parent.begun = node.begun
                parent.has_turn = node.is_turn or node.has_turn


def _depth(node: TreeNode[Any]) -> int:
    return node.n
