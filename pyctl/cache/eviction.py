"""What a full cache loses first: the one place that knows, asked by the cache in RAM and by the one on disk.

Both describe what they hold as a tree of prefixes, and say which of them may go at all (not what is pinned, reserved or
about to be used); a policy chooses among those.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["EvictionPolicy", "LeastCost", "PrefixTree", "SecondChance", "TreeNode"]

K = TypeVar("K", bound=Hashable)


@dataclass(eq=False)
class TreeNode(Generic[K]):
    """The snapshot called ``key``: ``n`` tokens on ``chain``, last used at ``used`` (seconds of any one clock).

    ``parent`` is the deepest shallower snapshot on its chain, where its prompts would resume without it.
    """

    key: K
    n: int
    chain: Mapping[Any, int]
    used: float
    parent: TreeNode[K] | None = None
    children: set[TreeNode[K]] = field(default_factory=set)

    @property
    def n_lost(self) -> int:
        """Tokens to evaluate again when it is gone."""
        return self.n - (self.parent.n if self.parent is not None else 0)

    @property
    def is_interior(self) -> bool:
        """Whether it has shallower and deeper snapshots: neither the head nor the end of a conversation."""
        return self.parent is not None and bool(self.children)


class PrefixTree(Generic[K]):
    """Which snapshot continues which, kept up to date as they come and go.

    A snapshot lies on a chain of segments, each with the position up to which it counts. It stems from a shallower one
    when it shares all of that one's rows.
    """

    def __init__(self) -> None:
        self._nodes: dict[K, TreeNode[K]] = {}
        self._roots: set[TreeNode[K]] = set()
        self._ending_in: defaultdict[Any, set[TreeNode[K]]] = defaultdict(set)
        self._n_through: Counter[Any] = Counter()  # snapshots on whose chains a segment is

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[TreeNode[K]]:
        return iter(self._nodes.values())

    def __getitem__(self, key: K) -> TreeNode[K]:
        return self._nodes[key]

    def add(self, key: K, n: int, chain: Mapping[Any, int], used: float) -> None:
        """Enter a snapshot of ``n`` tokens; ``chain`` names its segments, the deepest first."""
        node = TreeNode(key, n, chain, used)
        node.parent = parent = self._below(node)
        deepest = next(iter(chain))
        siblings = self._children_of(parent)
        if self._n_through[deepest]:
            node.children = {other for other in siblings if other.n > n and other.chain.get(deepest, 0) >= n}
        self._n_through.update(chain.keys())
        for child in node.children:
            child.parent = node
        siblings -= node.children
        siblings.add(node)
        self._nodes[key] = node
        self._ending_in[deepest].add(node)

    def touch(self, key: K, used: float) -> None:
        """Note that a snapshot was used."""
        self._nodes[key].used = used

    def remove(self, key: K) -> None:
        """Take a snapshot out; what stems from it stems from its parent now."""
        node = self._nodes.pop(key)
        siblings = self._children_of(node.parent)
        siblings.remove(node)
        siblings |= node.children
        for child in node.children:
            child.parent = node.parent
        self._n_through.subtract(node.chain.keys())
        for segment in node.chain:
            if not self._n_through[segment]:
                del self._n_through[segment]
        deepest = next(iter(node.chain))
        self._ending_in[deepest].remove(node)
        if not self._ending_in[deepest]:
            del self._ending_in[deepest]

    def _children_of(self, parent: TreeNode[K] | None) -> set[TreeNode[K]]:
        return parent.children if parent is not None else self._roots

    def _below(self, node: TreeNode[K]) -> TreeNode[K] | None:
        for segment, last in node.chain.items():
            found = [other for other in self._ending_in.get(segment, ()) if other.n <= last and other.n < node.n]
            if found:
                return max(found, key=attrgetter("n"))
        return None


class EvictionPolicy(Protocol[K]):
    """Chooses what leaves a `PrefixTree`; it is told what comes and what is used, and never removes anything itself."""

    def added(self, key: K) -> None:
        """``key`` is in the tree now."""

    def touched(self, key: K) -> None:
        """``key`` was hit."""

    def victim(self, may_go: Callable[[K], bool]) -> K | None:
        """What to lose next, None if nothing may go."""


class SecondChance:
    """The policy of the cache in RAM, whose snapshots are numbered by their slots, 0 .. ``n_slots`` - 1.

    First goes what is superseded: of the half that was not used for longest, the interior snapshot with the fewest
    tokens between itself and the next shallower one. Heads and ends of conversations are never meant, and what is
    fresh stays: the branch points of the conversation that goes on are worth more than the ends of those that do not.
    Then a hand goes round the slots: what was hit since it last passed is passed over once.
    """

    def __init__(self, tree: PrefixTree[int], n_slots: int) -> None:
        self._tree = tree
        self._n_slots = n_slots
        self._hand = 0
        self._hit: set[int] = set()

    def added(self, key: int) -> None:
        self._hit.discard(key)
        self._hand = (key + 1) % self._n_slots

    def touched(self, key: int) -> None:
        self._hit.add(key)

    def victim(self, may_go: Callable[[int], bool]) -> int | None:
        superseded = self._superseded(may_go)
        return superseded if superseded is not None else self._sweep(may_go)

    def _superseded(self, may_go: Callable[[int], bool]) -> int | None:
        by_use = sorted(self._tree, key=attrgetter("used"))
        old = by_use[: (len(by_use) + 1) // 2]
        interior = [node for node in old if node.is_interior and may_go(node.key)]
        return min(interior, key=attrgetter("n_lost")).key if interior else None

    def _sweep(self, may_go: Callable[[int], bool]) -> int | None:
        occupied = {node.key for node in self._tree}
        for _ in range(2 * self._n_slots):
            at = self._hand
            self._hand = (at + 1) % self._n_slots
            if at not in occupied or not may_go(at):
                continue
            if at not in self._hit:
                return at
            self._hit.remove(at)
        return None


SAME_MOMENT_SECONDS = 60.0
"""Added to the age of a snapshot, so that those used a moment ago are not told apart by it."""


class LeastCost(Generic[K]):
    """The policy of the cache on disk: what costs least goes first.

    The cost is tokens to evaluate again, per byte that ``freed`` says would become free, per second since the last use.
    """

    def __init__(self, tree: PrefixTree[K], freed: Callable[[K], int], clock: Callable[[], float] = time.time) -> None:
        self._tree, self._freed, self._clock = tree, freed, clock

    def added(self, key: K) -> None:
        pass

    def touched(self, key: K) -> None:
        pass

    def victim(self, may_go: Callable[[K], bool]) -> K | None:
        now = self._clock()
        nodes = [node for node in self._tree if may_go(node.key)]
        return min(nodes, key=lambda node: self._cost(node, now)).key if nodes else None

    def _cost(self, node: TreeNode[K], now: float) -> float:
        idle = max(now - node.used, 0.0) + SAME_MOMENT_SECONDS
        return node.n_lost / max(self._freed(node.key), 1) / idle
