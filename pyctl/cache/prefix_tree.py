"""A tree of prefixes: which snapshot continues which, by the segments that they share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

__all__ = ["ConversationEnd", "PrefixTree", "TreeNode"]

K = TypeVar("K", bound=Hashable)


@dataclass
class ConversationEnd:
    """A conversation that ends at a snapshot or at a deeper one that was evicted.

    Attributes:
        used: When it was used last, in units of the caller's clock.
        n: Its tokens.
        n_opening: Its tokens before the first reply, 0 if unknown.
        n_system: Its tokens before the first boundary, 0 if unknown.
    """

    used: float
    n: int
    n_opening: int = 0
    n_system: int = 0


@dataclass(eq=False)
class TreeNode(Generic[K]):
    """A snapshot in the tree.

    Attributes:
        key: The snapshot.
        n: Its tokens.
        segment: The segment that holds the last of them.
        used: When the snapshot itself was used last, in units of the caller's clock.
        hits: How many times it was used.
        is_turn: Whether it lies before the user's newest message (`Prompt.turn`).
        announced_until: Until when a client has announced to resume here, in monotonic seconds.
        parent: The deepest shallower snapshot on its chain. Without this node its prompts would
            resume there.
        children: The snapshots whose parent it is.
        own: The newest conversation that ends here, or below in snapshots that were evicted.
        newest: The newest conversation through the node, over all deeper snapshots. The policy sets
            it, and the two below.
        has_turn_below: Whether a deeper snapshot of ``newest`` has ``is_turn``.
        expected_resumes: How many prompts the policy expects to resume here.
    """

    key: K
    n: int
    segment: Any
    used: float
    hits: int = 0
    is_turn: bool = False
    announced_until: float = 0.0
    parent: TreeNode[K] | None = None
    children: set[TreeNode[K]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.own = ConversationEnd(self.used, self.n)
        self.newest = self.own
        self.has_turn_below = False
        self.expected_resumes = 0.0


@dataclass(eq=False)
class _Link:
    """The place of a segment in the tree.

    Attributes:
        parent: The segment that it continues.
        last: How many tokens of the chain up to ``parent`` count.
        children: The segments that continue it.
        n_users: Snapshots that end in it, and segments that continue it.
    """

    parent: Any
    last: int
    children: set[Any] = field(default_factory=set)
    n_users: int = 0


class PrefixTree(Generic[K]):
    """The tree of snapshots by continuation, updated as snapshots come and go.

    A snapshot lies on a chain of segments, each with the position up to which it counts. It stems
    from a shallower one when it shares all of that one's rows. Adding and removing cost as much as
    there are segments to the next snapshot.
    """

    def __init__(self) -> None:
        self._nodes: dict[K, TreeNode[K]] = {}
        self._roots: set[TreeNode[K]] = set()
        self._ending_in: defaultdict[Any, set[TreeNode[K]]] = defaultdict(set)
        self._links: dict[Any, _Link] = {}
        self.changed: set[TreeNode[K]] = set()
        """The nodes that were added or got other neighbours since the policy emptied this."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[TreeNode[K]]:
        return iter(self._nodes.values())

    def __getitem__(self, key: K) -> TreeNode[K]:
        return self._nodes[key]

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def has(self, node: TreeNode[K]) -> bool:
        """Return whether this very node is still here."""
        return self._nodes.get(node.key) is node

    def add(
        self, key: K, n: int, chain: Iterable[tuple[Any, int]], used: float, hits: int = 0
    ) -> TreeNode[K]:
        """Add a snapshot of ``n`` tokens, and return its node.

        ``chain`` yields its segments with the tokens that count of each, the deepest first. It is
        read up to the first segment that is in the tree.
        """
        deepest = self._link(chain)
        node = TreeNode(key, n, deepest, used, hits)
        node.parent = parent = self._below(node)
        siblings = self._children_of(parent)
        if self._links[deepest].n_users:
            node.children = {
                other for other in siblings if other.n > n and self._passes(other, deepest, n)
            }
        for child in node.children:
            child.parent = node
        siblings -= node.children
        siblings.add(node)
        self._nodes[key] = node
        self._ending_in[deepest].add(node)
        self._links[deepest].n_users += 1
        self.changed |= {node, *node.children}
        if parent is not None:
            self.changed.add(parent)
        return node

    def touch(self, key: K, used: float) -> None:
        """Note that a snapshot was used, at ``used`` seconds of the caller's clock."""
        node = self._nodes[key]
        node.used = used
        node.own = replace(node.own, used=used, n=node.n)
        node.hits += 1

    def remove(self, key: K) -> None:
        """Remove a snapshot; its children continue its parent now."""
        node = self._nodes.pop(key)
        siblings = self._children_of(node.parent)
        siblings.remove(node)
        siblings |= node.children
        for child in node.children:
            child.parent = node.parent
        if node.parent is not None and node.own.used >= node.parent.own.used:
            node.parent.own = node.own
        self.changed.discard(node)
        self.changed |= node.children
        if node.parent is not None:
            self.changed.add(node.parent)
        ending = self._ending_in[node.segment]
        ending.remove(node)
        if not ending:
            del self._ending_in[node.segment]
        self._unlink(node.segment)
        # A policy's heap may hold the node for a while, and nothing by it.
        node.key = node.segment = None  # type: ignore[assignment]

    def matching(self, matches: Callable[[K], bool]) -> list[K]:
        """Return the snapshots for which ``matches`` holds.

        ``matches`` holds for no snapshot below one for which it does not.
        """
        keys: list[K] = []
        waiting = list(self._roots)
        while waiting:
            node = waiting.pop()
            if matches(node.key):
                keys.append(node.key)
                waiting += node.children
        return keys

    def through(self, segment: Any) -> list[TreeNode[K]]:
        """Return the snapshots that need a segment."""
        nodes: list[TreeNode[K]] = []
        waiting = [segment] if segment in self._links else []
        while waiting:
            current = waiting.pop()
            nodes += self._ending_in.get(current, ())
            waiting += self._links[current].children
        return nodes

    def expected_resumes(self) -> dict[Any, float]:
        """Return for each segment the prompts expected at all snapshots that need it."""
        sums = dict.fromkeys(self._links, 0.0)
        for segment, nodes in self._ending_in.items():
            sums[segment] = sum(node.expected_resumes for node in nodes)
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
        """Record the parents; returns the deepest segment."""
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
                under.parent = segment
                under.last = last
                link.children.add(below)
                link.n_users += 1
            if is_known:
                break
            below = segment
        return deepest

    def _unlink(self, segment: Any) -> None:
        while segment is not None:
            link = self._links[segment]
            link.n_users -= 1
            if link.n_users:
                return
            del self._links[segment]
            if link.parent is not None:
                self._links[link.parent].children.remove(segment)
            segment = link.parent

    def _children_of(self, parent: TreeNode[K] | None) -> set[TreeNode[K]]:
        return parent.children if parent is not None else self._roots

    def _below(self, node: TreeNode[K]) -> TreeNode[K] | None:
        segment = node.segment
        last = node.n
        while segment is not None:
            children = [
                other
                for other in self._ending_in.get(segment, ())
                if other.n <= last and other.n < node.n
            ]
            if children:
                return max(children, key=lambda other: other.n)
            link = self._links[segment]
            segment = link.parent
            last = link.last
        return None

    def _passes(self, node: TreeNode[K], segment: Any, n: int) -> bool:
        """Return whether ``n`` tokens of ``segment`` are on the chain of a deeper snapshot."""
        at = node.segment
        last = node.n
        while at is not None and last >= n:
            if at == segment:
                return True
            link = self._links[at]
            at = link.parent
            last = link.last
        return False
