"""Prefixes that RAM evicted: whether later prompts would have resumed there."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from pyctl.cache.snapshot import Prefix, PromptMatch, Source
from pyctl.settings.limit import limit

__all__ = ["EvictedPrefixes", "WantedTokens"]

MAX_EVICTED = limit(
    4096,
    "evicted prefixes that are remembered for the metrics",
    "the oldest are forgotten",
    "memory",
)


@dataclass
class WantedTokens:
    """Tokens of prompts that RAM had evicted before: a larger --cache-ram would have had them.

    Attributes:
        n_evaluated: Those that were evaluated again.
        n_read: Those that were read from disk.
    """

    n_evaluated: int = 0
    n_read: int = 0


class EvictedPrefixes:
    """The newest evicted prefixes, without their bytes, and the tokens of them that prompts wanted
    again.

    A prefix counts once for each eviction. The thread that owns the cache calls everything.
    """

    def __init__(self, maximum: int = MAX_EVICTED) -> None:
        self.wanted = WantedTokens()
        self._maximum = maximum
        # As (n, digest), which `PromptMatch.find_prefixes` looks for.
        self._prefixes: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, prefix: Prefix) -> None:
        """Remember that ``prefix`` was evicted, in place of the oldest if there are too many."""
        self._forget(prefix)
        self._prefixes[prefix.n, prefix.digest] = None
        self._lengths[prefix.n] += 1
        if len(self._prefixes) > self._maximum:
            n, digest = next(iter(self._prefixes))
            self._forget(Prefix(digest, n))

    def count_wanted(self, prompt: PromptMatch, n_cached: int, source: Source) -> None:
        """Count the tokens of ``prompt`` that RAM had evicted: those after the ``n_cached``, which
        are evaluated, and the others if they came from disk.
        """
        maximum = int(prompt.tokens.size)
        lengths = sorted(n for n in self._lengths if n <= maximum)
        if not lengths:
            return
        evicted = prompt.find_prefixes(self._prefixes, lengths)
        if not evicted:
            return
        deepest = evicted[-1].n
        self.wanted.n_evaluated += max(deepest - n_cached, 0)
        if source == "disk":
            self.wanted.n_read += min(deepest, n_cached)
        for prefix in evicted:
            self._forget(prefix)

    def _forget(self, prefix: Prefix) -> None:
        key = (prefix.n, prefix.digest)
        if key not in self._prefixes:
            return
        del self._prefixes[key]
        self._lengths[prefix.n] -= 1
        if not self._lengths[prefix.n]:
            del self._lengths[prefix.n]
