"""One prompt against everything stored: each token is hashed once and each stored segment compared once."""

from __future__ import annotations

import hashlib

from pyctl.cache.prefix import DIGEST_BYTES, Prefix
from pyctl.cache.segment import Segment, Snapshot
from pyctl.prompt import Tokens, common_prefix

__all__ = ["Comparison"]


class Comparison:
    """What the cache needs to know of ``tokens``, remembered for as long as a request asks."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._data = memoryview(tokens.astype("<i4", copy=False).tobytes())
        self._hashed: list[tuple[int, hashlib.blake2b]] = [(0, hashlib.blake2b(digest_size=DIGEST_BYTES))]
        self._agreed: dict[Segment, int] = {}

    def prefix(self, n: int) -> Prefix:
        """The prefix of ``n`` tokens; ascending lengths cost one pass in all. ValueError outside (0, len]."""
        if not 0 < n <= self.tokens.size:
            raise ValueError(f"{n} is not a length within {self.tokens.size} tokens")
        at = next(i for i in reversed(range(len(self._hashed))) if self._hashed[i][0] <= n)
        start, running = self._hashed[at]
        if start < n:
            running = running.copy()
            running.update(self._data[4 * start : 4 * n])
            self._hashed.insert(at + 1, (n, running))
        return Prefix(running.digest(), n)

    def shared(self, snapshot: Snapshot) -> int:
        """How many leading tokens ``snapshot`` shares with the prompt, at most its n."""
        return min(self._agree(snapshot.segment), snapshot.n)

    def _agree(self, segment: Segment) -> int:
        """Up to which position the prompt agrees with ``segment`` and its parents."""
        chain: list[Segment] = []
        at: Segment | None = segment
        while at is not None and at not in self._agreed:
            chain.append(at)
            at = at.parent
        for link in reversed(chain):
            before = self._agreed[link.parent] if link.parent is not None else 0
            if before >= link.start:
                before = link.start + common_prefix(link.tokens, self.tokens[link.start :])
            self._agreed[link] = before
        return self._agreed[segment]
