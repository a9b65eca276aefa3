"""An index of n-grams over up to millions of tokens: a ring buffer of tokens with hash chains.

One thread writes and another reads, without locks. Lookups compare the tokens themselves, so a
concurrent write at worst hides a match.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from pyctl.prompt import Tokens, as_tokens, common_prefix
from pyctl.settings.limit import limit

__all__ = ["AHEAD", "CONTEXT", "GAP", "MAX_TOKENS", "UINT64_MASK", "TokenIndex"]

MAX_TOKENS = limit(
    2**21, "tokens that drafts of `cache` are copied from", "the oldest are forgotten", "memory"
)

GAP = -1
"""Separator of texts in the ring, not a valid token id."""

GRAMS = (4, 8, 16, 32)
"""Indexed n-gram lengths, each twice the one before; lookups start with the shortest."""

CONTEXT = 64
"""Longest match measured; longer ones count the same."""

MAX_LOOKS = 8
"""Most places compared per n-gram length, newest first."""

NEAR = 4096
"""Tokens after the place `find` prefers, for equal matches."""

BACK = 32
"""Tokens before its place that `find_near` searches."""

AHEAD = 128
"""Tokens after its place that `find_near` searches."""

NEXT = 2
"""Tokens after its place within which `find_near` accepts a single matching token."""

PAGE = 4096

CHUNK = 4096
"""Tokens added at a time; other threads may run between chunks."""

_FACTOR = 0x9E3779B97F4A7C15
_SPREAD = 0xD1B54A32D192ED03

UINT64_MASK = 2**64 - 1
"""Hashes of n-grams wrap at 64 bits, as numpy's do; Python's integers have to be cut."""


class TokenIndex:
    """The last ``capacity`` tokens added, a power of two. Places are positions in the ring, 0 for
    none.
    """

    def __init__(self, capacity: int = MAX_TOKENS) -> None:
        self.capacity = capacity
        self.n_added = 0
        self.tail = 1  # place 0 stays a gap: in the tables 0 means none
        self._mask = capacity - 1
        self._shift = 64 - self._mask.bit_length()
        self._run = 0  # tokens since the last gap
        # Zero pages take no memory until written.
        self.ring: Tokens = np.zeros(capacity, np.int32)
        self.ring[:2] = GAP
        self._ring_of = memoryview(self.ring)  # type: ignore[arg-type]
        self._make_tables()
        self._powers = [pow(_FACTOR, i, 2**64) for i in range(GRAMS[-1])]

    @property
    def n_bytes(self) -> int:
        """Bytes in use by tokens and tables. Each token may touch a page of each hash table."""
        n = min(self.n_added, self.capacity)
        ring_bytes = 4 * n
        newest_bytes = min(PAGE * n, 4 * self.capacity)
        before_bytes = 4 * n
        return ring_bytes + len(GRAMS) * (newest_bytes + before_bytes)

    def _make_tables(self) -> None:
        self.newest = [np.zeros(self.capacity, np.int32) for _ in GRAMS]
        self.before = [np.zeros(self.capacity, np.int32) for _ in GRAMS]
        self._newest_of = [memoryview(table) for table in self.newest]  # type: ignore[arg-type]
        self._before_of = [memoryview(table) for table in self.before]  # type: ignore[arg-type]

    # -- the writing thread
    # ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a new text."""
        if self._run:
            self.tail = min(self.tail + 1, self.capacity - 1)
            self._run = 0
            self.ring[self.tail] = GAP

    def clear(self) -> None:
        """Remove all tokens."""
        self.ring[:] = GAP
        self._make_tables()
        self.tail = 1
        self._run = 0
        self.n_added = 0

    def add(self, tokens: Tokens) -> None:
        """Append ``tokens``, all >= 0, to the current text."""
        for start in range(0, tokens.size, CHUNK):
            self._add(tokens[start : start + CHUNK])

    def _add(self, tokens: Tokens) -> None:
        """Append tokens, at most CHUNK, and enter the n-grams that end with each."""
        room = self.capacity - 1 - self.tail
        if tokens.size > room:
            if room:
                self._add(tokens[:room])
            # Texts do not wrap around.
            self.ring[self.capacity - 1] = GAP
            self.ring[1] = GAP
            self.tail = 1
            self._run = 0
            return self._add(tokens[room:])
        n = int(tokens.size)
        first = self.tail
        end = first + n
        context = min(self._run, GRAMS[-1] - 1)
        self.ring[end] = GAP
        self.ring[first:end] = tokens
        places = np.arange(first, end, dtype=np.int32)
        # Hashes of the n-gram ending at each token; doubling n combines two adjacent n-grams.
        hashes = self.ring[first - context : end].astype(np.uint64)
        hashes += np.uint64(1)
        length = 1
        for level, gram in enumerate(GRAMS):
            while length < gram:
                power = np.uint64(pow(_FACTOR, length, 2**64))
                hashes[length:] += hashes[:-length] * power
                length *= 2
            # The first n-grams would start before the text.
            skipped = max(gram - 1 - context, 0)
            if skipped < n:
                spread = hashes[context + skipped :] * np.uint64(_SPREAD)
                buckets = spread >> np.uint64(self._shift)
                self._enter(level, buckets.astype(np.int64), places[skipped:])
        self.tail = end
        self._run += n
        self.n_added += n

    def _enter(self, level: int, buckets: NDArray[np.int64], places: NDArray[np.int32]) -> None:
        newest = self.newest[level]
        before = self.before[level]
        order = np.argsort(buckets, kind="stable")
        buckets = buckets[order]
        places = places[order]
        same = buckets[1:] == buckets[:-1]
        previous = newest[buckets]
        previous[1:][same] = places[:-1][same]
        before[places] = previous
        last = np.append(~same, True)
        newest[buckets[last]] = places[last]

    # -- the reading thread
    # ----------------------------------------------------------------------------------

    def find(self, text: list[int], near: int = 0) -> tuple[int, int]:
        """Find the longest match of the end of ``text``: (the place after it, its length); (0, 0)
        for none.

        Compares the last CONTEXT tokens. Of equal matches it prefers one within NEAR after
        ``find_near``, then the newest.
        """
        if len(text) < GRAMS[0]:  # no n-gram is that short
            return 0, 0
        end = text[: -CONTEXT - 1 : -1]
        ring = self._ring_of
        match_end = 0
        longest = GRAMS[0] - 1
        seen: set[int] = set()
        for level, bucket in self._buckets(end):
            position = self._newest_of[level][bucket]
            before = self._before_of[level]
            for _ in range(MAX_LOOKS):
                if not position:
                    break
                if position not in seen and ring[position + 1] != GAP:
                    seen.add(position)
                    length = self._match(position, end)
                    is_better = length > longest
                    if length == longest and near:
                        is_better = 0 <= position - near < NEAR
                    if is_better:
                        match_end = position + 1
                        longest = length
                position = before[position]
            if longest < GRAMS[level]:
                break
        if not match_end:
            return 0, 0
        return match_end, longest

    def find_near(self, place: int, tokens: list[int]) -> tuple[int, int]:
        """Find the last of ``tokens``, 1 to 4, in a window around ``place``, the nearest; returns
        as `find`.
        """
        first = max(place - BACK, 0)
        window = self.ring[first : place + AHEAD].tolist()
        suffix = tokens[:-5:-1]
        if not suffix or suffix[0] not in window:
            return 0, 0
        matches: list[tuple[int, int]] = []
        for i, token in enumerate(window):
            if token != suffix[0]:
                continue
            n_equal = 0
            for one, other in zip(suffix, window[i::-1], strict=False):
                if one != other:
                    break
                n_equal += 1
            matches.append((first + i + 1, n_equal))
        for length in range(len(suffix), 0, -1):
            ends = [end for end, n in matches if n >= length]
            if not ends:
                continue
            earliest = place
            if length == 1:  # a single token counts only after the place
                earliest += 1
            end = next((end for end in ends if end >= earliest), ends[-1])
            if length > 1 or place < end <= place + NEXT:
                return end, length
        return 0, 0

    def follow(self, place: int, tokens: list[int]) -> int:
        """Return how many of ``tokens`` match the ring from ``place`` on."""
        there = self.ring[place : place + len(tokens)]
        return common_prefix(there, as_tokens(tokens))

    def read(self, place: int, n: int) -> list[int]:
        """Return up to ``n`` tokens from ``place`` on, at most to the end of the text."""
        tokens: list[int] = self.ring[place : place + n].tolist()
        if GAP not in tokens:
            return tokens
        end = tokens.index(GAP)
        return tokens[:end]

    def _buckets(self, backwards: list[int]) -> Iterator[tuple[int, int]]:
        """Yield (level, bucket) for each n-gram length, shortest first: most texts occur
        nowhere.
        """
        value = 0
        n = 0
        for level, gram in enumerate(GRAMS):
            tokens = backwards[n:gram]
            powers = self._powers[n:gram]
            for token, power in zip(tokens, powers, strict=False):
                value += (token + 1) * power
            n = gram
            if gram <= len(backwards):
                spread = ((value & UINT64_MASK) * _SPREAD) & UINT64_MASK
                yield level, spread >> self._shift

    def _match(self, place: int, backwards: list[int]) -> int:
        """Return how many tokens from ``place`` back match ``backwards``; a loop, since most differ
        at once.
        """
        ring = self._ring_of
        n = 0
        for token in backwards:
            if ring[place - n] != token:
                break
            n += 1
        return n
