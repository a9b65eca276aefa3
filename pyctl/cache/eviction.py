"""The eviction policy of RAM, the device and the disk.

A snapshot is worth the seconds that it is expected to save:

    value = expected_resumes * evaluate_seconds(tokens between the parent snapshot and this one)

`_expected_resumes` estimates how many prompts resume there; it is the place for a new rule of
reuse, and its weights are `Likelihoods`. Whether a snapshot may be evicted at all is the question
of the cache that owns it: it passes ``is_evictable``, which excludes pinned and locked ones.

A conversation is a chain of snapshots. One that is used again resumes

- at its end: the weight ``end``;
- somewhere before its end, after an edit. With x the distance from the end, the density falls as
  1 / (x + near), so each doubling of the distance beyond ``near`` is equally likely:
  P(between a and b) = (1 - end) * ln((x_a + near) / (x_b + near)) / ln(1 + length / near);
- within its opening, the text before the first reply, when another conversation starts alike. The
  density is the same one, measured from the end of the opening, with the weight ``head``: text
  about the day, the folder or the task stands late in an opening;
- after its first boundary, when a client clears or summarises it: the system message and the tools
  stay, with the weight ``system``. 98 of 104 rewrites in these sessions leave within the opening;
- where its client announced to resume (`Retention`), with the weight ``announced``.

``end`` is the share of prompts that go on at the end of a conversation. It starts at 0.65, and
follows what the clients do (`Continuations`): states of places before the end take half of the RAM
of a machine with 32 GB, and agents that only append never come back to them.

All but the last decays with the square of the time since the last use, to 1/2 after ``half_life``:
bytes are held for a time, so a snapshot counts by the rate at which it is used, not by whether it
ever will be. Of the conversations in 30 recorded sessions, three at once (`bench.traces`), 77 % go
on with the next request, 9 % with the fourth if not before, 0.9 % with the 16th, 0.08 % with the
64th. `bench.policy --weights` shows the gain of each weight.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pyctl.cache.continuations import Continuations
from pyctl.cache.costs import Costs
from pyctl.cache.prefix_tree import PrefixTree, TreeNode

__all__ = ["CostAwareEviction", "Likelihoods"]

K = TypeVar("K", bound=Hashable)

SAME_MOMENT_SECONDS = 60.0
"""Half-life on disk: snapshots used within one moment count alike."""

HALVING = math.sqrt(2) - 1
"""1 / (1 + HALVING) squared is 1/2."""

RANKED_AT_ONCE = 128
"""Snapshots that are all ranked again at each unit of the clock. More are ranked again less often,
so that the time spent on ranking per unit is bounded.
"""


@dataclass(frozen=True)
class Likelihoods:
    """Weights of the places where the next prompt of a conversation resumes.

    Attributes:
        end: The conversation goes on at its end; the share at the start, see `Continuations`.
        head: A new conversation starts as this one did. Where the opening is not known, the weight
            goes to the first snapshot.
        system: The conversation is cleared or summarised, and continues after its first boundary.
        near_end: Tokens from the end within which all distances are equally likely.
        again: Each further time that prompts parted at a snapshot makes one more likely.
        turn: The snapshot before the user's newest message. Clients that rewrite a history when the
            user speaks again keep it up to there.
        max_again: The maximum number of times that ``again`` counts.
        announced: A client announced to resume here. It counts in full until then.
    """

    end: float = 0.65
    head: float = 0.2
    system: float = 0.3
    near_end: int = 64
    again: float = 0.5
    turn: float = 0.5
    max_again: int = 8
    announced: float = 1.0


class CostAwareEviction(Generic[K]):
    """The policy of all tiers: evict the lowest value per freed byte first.

    ``freed`` returns the bytes that evicting a snapshot frees. ``clock`` and ``half_life`` have one
    unit, any.

    Values change with time and with the tree. `_rank` computes all of them when the clock has moved
    on, and the values of `PrefixTree.changed` at each call. A rule that depends on anything else
    has to enter the node into ``changed``, or its rank is old until the clock moves.
    """

    def __init__(
        self,
        tree: PrefixTree[K],
        freed: Callable[[K], int],
        clock: Callable[[], float] = time.time,
        costs: Costs | None = None,
        *,
        half_life: float = SAME_MOMENT_SECONDS,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        """Rank the snapshots of ``tree``. ``clock`` and ``half_life`` have one unit, seconds by
        default; ``seconds`` is the clock of announcements.
        """
        self._tree = tree
        self._freed = freed
        self._clock = clock
        self._costs = costs or Costs()
        self.half_life = half_life
        self._seconds = seconds
        self.likelihoods = Likelihoods()
        self.continuations = Continuations()
        self._end = self.likelihoods.end
        self._heap: list[tuple[float, int, TreeNode[K]]] = []
        self._count = itertools.count()
        self._now = -math.inf
        self._per_byte = True

    def choose_victim(
        self, is_evictable: Callable[[K], bool], *, per_byte: bool = True
    ) -> K | None:
        """Return the next snapshot to evict, None if all must stay.

        Without ``per_byte`` all snapshots count as equally large.
        """
        self._rank(per_byte)
        heap = self._heap
        passed = []
        victim: K | None = None
        while heap and victim is None:
            ranked_value, number, node = heapq.heappop(heap)
            if not self._tree.has(node):
                continue
            value = self._value(node, per_byte=per_byte)
            is_outdated = heap and value > max(ranked_value, heap[0][0])
            if is_outdated:  # a neighbour was evicted since, so it saves more now
                heapq.heappush(heap, (value, number, node))
                continue
            passed.append((value, number, node))
            if is_evictable(node.key):
                victim = node.key
        for entry in passed:  # the caller evicts the victim from the tree, or keeps it
            heapq.heappush(heap, entry)
        return victim

    def rank(self) -> list[K]:
        """Return all snapshots, the lowest value per freed byte first."""
        self._rank(True)
        values = {node.key: self._value(node, per_byte=True) for node in self._tree}
        return sorted(values, key=values.__getitem__)

    def value(self, key: K, *, per_byte: bool = False) -> float:
        """Return the seconds that a snapshot is expected to save, in all or per freed byte."""
        self._rank(self._per_byte)
        return self._value(self._tree[key], per_byte=per_byte)

    def announce(self, key: K, seconds: float) -> None:
        """Expect another resume at ``key`` within ``seconds``; the later of two announcements
        counts.
        """
        node = self._tree[key]
        node.announced_until = max(node.announced_until, self._seconds() + seconds)
        self._tree.changed.add(node)

    def withdraw(self, key: K) -> None:
        """Forget the announcements of ``key``."""
        node = self._tree[key]
        node.announced_until = 0.0
        self._tree.changed.add(node)

    def is_announced(self, key: K) -> bool:
        """Return whether a client's announcement to resume at ``key`` still counts."""
        return self._is_announced(self._tree[key])

    def combined_value(self, keys: Collection[K]) -> float:
        """Return the seconds that would be lost if all given snapshots were evicted."""
        self._rank(self._per_byte)
        seconds = 0.0
        resume_at = dict[K, int]()
        for node in sorted(map(self._tree.__getitem__, keys), key=_depth):
            parent = node.parent
            start = 0 if parent is None else resume_at.get(parent.key, parent.n)
            resume_at[node.key] = start
            seconds += self._seconds_saved(node, start)
        return seconds

    def expected_resumes_at_end(self, used: float | None) -> float:
        """Return the prompts expected in a conversation that was last used at ``used``.

        ``used`` is in units of the clock, None for now.
        """
        now = self._clock()
        return (1 + self.likelihoods.head) * self._decay(now if used is None else used, now)

    def expected_resumes(self) -> dict[Any, float]:
        """Return for each segment of the tree the prompts expected to resume on its rows."""
        self._rank(self._per_byte)
        return self._tree.expected_resumes()

    def _value(self, node: TreeNode[K], *, per_byte: bool) -> float:
        start = node.parent.n if node.parent is not None else 0
        seconds = self._seconds_saved(node, start)
        if not per_byte:
            return seconds
        return seconds / max(self._freed(node.key), 1)

    def _seconds_saved(self, node: TreeNode[K], start: int) -> float:
        """Return the expected seconds to evaluate the tokens from ``start`` to ``node``."""
        return node.expected_resumes * self._costs.evaluate(start, node.n)

    def _expected_resumes(self, node: TreeNode[K]) -> float:
        """Return the prompts expected to resume at ``node``: the sum of the rules above."""
        weights = self.likelihoods
        total = 0.0
        last_below = -math.inf
        for child in node.children:
            conversation = child.newest
            last_below = max(last_below, conversation.used)
            p_resume = self._p_rewind(conversation.n, node.n, child.n)
            p_resume += self._p_new_conversation(conversation.n_opening, node.n, child.n)
            p_resume += self._p_cleared(conversation.n_system, node.n, child.n)
            total += self._decay(conversation.used) * p_resume
        own = node.own
        if own.used > last_below:  # the newest conversation has no deeper snapshot than this one
            p_resume = self._p_rewind(own.n, node.n, own.n)
            p_resume += self._p_new_conversation(own.n_opening, node.n, own.n)
            p_resume += self._p_cleared(own.n_system, node.n, own.n)
            total += self._decay(own.used) * (self._end + p_resume)
        if node.parent is None and not node.newest.n_opening:
            total += weights.head * self._decay(node.newest.used)
        if node.is_turn and not node.has_turn_below:
            total += weights.turn * self._decay(node.newest.used)
        n_partings = max(len(node.children), node.hits) - 1
        if n_partings > 0:
            n_counted = min(n_partings, weights.max_again)
            total += weights.again * n_counted * self._decay(node.used)
        if self._is_announced(node):
            total += weights.announced
        return total

    def _is_announced(self, node: TreeNode[K]) -> bool:
        return node.announced_until > 0 and node.announced_until > self._seconds()

    def _p_rewind(self, length: int, start: int, stop: int) -> float:
        """Return the probability that a conversation of ``length`` tokens resumes before its end,
        between ``start`` and ``stop``.
        """
        near = self.likelihoods.near_end
        share = math.log((length - start + near) / (length - stop + near))
        return (1 - self._end) * share / math.log1p(length / near)

    def _p_new_conversation(self, n_opening: int, start: int, stop: int) -> float:
        """Return the probability that another conversation shares this one's opening up to a place
        between ``start`` and ``stop``.
        """
        stop = min(stop, n_opening)
        if start >= stop:
            return 0.0
        near = self.likelihoods.near_end
        share = math.log((n_opening - start + near) / (n_opening - stop + near))
        return self.likelihoods.head * share / math.log1p(n_opening / near)

    def _p_cleared(self, n_system: int, start: int, stop: int) -> float:
        """Return the probability that the conversation is cleared after ``n_system`` tokens, if
        that place is between ``start`` and ``stop``.
        """
        is_between = n_system > 0 and start <= n_system < stop
        return self.likelihoods.system if is_between else 0.0

    def _decay(self, used: float, now: float | None = None) -> float:
        """Return the factor for the time since ``used``: 1/2 after a half-life, 1/4 after 2.4."""
        age = (self._now if now is None else now) - used
        if age <= 0:
            return 1.0
        return 1 / (1 + HALVING * age / self.half_life) ** 2

    def _rank(self, per_byte: bool) -> None:
        """Bring values and heap up to date."""
        now = self._clock()
        changed = self._tree.changed
        ranking_interval = max(1, len(self._tree) / RANKED_AT_ONCE)
        if now - self._now >= ranking_interval or per_byte != self._per_byte:
            self._now = now
            self._end = self.continuations.share(self.likelihoods.end)
            self._per_byte = per_byte
            self._find_newest_conversations()
            for node in self._tree:
                node.expected_resumes = self._expected_resumes(node)
            self._heap = [self._entry(node) for node in self._tree]
            heapq.heapify(self._heap)
        else:
            for node in changed:
                node.expected_resumes = self._expected_resumes(node)
                heapq.heappush(self._heap, self._entry(node))
        changed.clear()

    def _entry(self, node: TreeNode[K]) -> tuple[float, int, TreeNode[K]]:
        """Return an entry of the heap; the number keeps nodes of one value from being compared."""
        return self._value(node, per_byte=self._per_byte), next(self._count), node

    def _find_newest_conversations(self) -> None:
        """Set for each node the newest conversation through it, and whether it has a turn below."""
        deepest_first = sorted(self._tree, key=_depth, reverse=True)
        for node in deepest_first:
            node.newest = node.own
            node.has_turn_below = False
        for node in deepest_first:
            parent = node.parent
            if parent is not None and node.newest.used >= parent.newest.used:
                parent.newest = node.newest
                parent.has_turn_below = node.is_turn or node.has_turn_below


def _depth(node: TreeNode[Any]) -> int:
    return node.n
