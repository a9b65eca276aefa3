"""Drafts from the request's own tokens: the continuation of an earlier occurrence of its last n
tokens.

The lookup repeats for each drafted token, as in llama-server's ngram-mod; the other names differ in
the numbers of tokens matched and drafted. Each request has its own table. llama-server's single
table for all slots would draft one client's text for another, which the timings reveal. A hash
collision costs only a wrong draft.

Hashes are polynomial prefix hashes, so that the hash of any n-gram is one subtraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pyctl.engine.draft.ngram_settings import NgramSettings
from pyctl.engine.draft.source import NO_MATCH, DraftJob, Match
from pyctl.engine.draft.token_index import UINT64_MASK
from pyctl.prompt import Tokens

__all__ = ["NgramSource", "ngram_sources"]


def ngram_sources(types: Sequence[str], settings: NgramSettings) -> list[NgramSource]:
    """Return the n-gram sources in ``types``, always in llama-server's order."""
    known = [
        NgramSource("ngram-simple", settings.simple_size_n, settings.simple_size_m),
        NgramSource("ngram-map-k", settings.map_k_size_n, settings.map_k_size_m),
        NgramSource("ngram-map-k4v", settings.map_k4v_size_n, settings.map_k4v_size_m),
        NgramSource("ngram-mod", settings.mod_match, settings.mod_max),
    ]
    return [source for source in known if source.name in types]


class NgramSource:
    """The `DraftSource` ``name``: looks up the last ``n_match`` tokens and drafts up to ``maximum``
    that followed.

    A draft may extend past the end of the text, since lookups include drafted tokens: repetitions
    continue. Memory: up to 32 bytes per token and a few MiB per decoding request.
    """

    def __init__(self, name: str, n_match: int, maximum: int) -> None:
        self.name = name
        self.maximum = maximum
        self._n_match = n_match
        self._drop = pow(_FACTOR, n_match - 1, 2**64)
        self.running: dict[int, tuple[Text, HashedPositions]] = {}

    def begin(self, key: int, prompt: Tokens) -> None:
        text = Text(prompt)
        places = HashedPositions(self._n_match)
        self.running[key] = text, places

    def match(self, job: DraftJob, draft: tuple[int, ...] = ()) -> Match:
        if draft:  # of another source, which this one does not continue
            return NO_MATCH
        return Match(self._n_match, partial(self._draft, job))

    def end(self, key: int) -> None:
        self.running.pop(key, None)

    def _draft(self, job: DraftJob, maximum: int) -> tuple[int, ...]:
        """Return up to ``maximum`` tokens: each followed the n-gram before it, drafts included, at
        an earlier place.
        """
        text, places = self.running[job.key]
        _append_new(text, job)
        n = self._n_match
        if text.n <= n:  # too short for an earlier n-gram
            return ()
        first = text.n - n
        places.put(text, first)
        tokens = list(text.part(first, n))
        value = text.hash(first, n, places.top)
        n_tokens = n + min(self.maximum, maximum)
        while len(tokens) < n_tokens:
            previous = places.find(value)
            if previous < 0:
                break
            oldest = tokens[-n]
            token = text[previous + n]
            tokens.append(token)
            # The hash of the next n-gram: without the first token of this one, with the new one.
            without_oldest = value - oldest * self._drop
            value = (without_oldest * _FACTOR + token) & UINT64_MASK
        return tuple(tokens[n:])


_FACTOR = 6364136223846793005
_STEP = 4096
_PLACE = 2**24 - 1
_MIX = 0x9E3779B97F4A7C15

_FEW = 8
"""Tokens up to which a loop is faster than array operations."""


def _powers(factor: int) -> NDArray[np.uint64]:
    """Return ``factor`` ** i modulo 2**64 for i = 0 .. _STEP, shape (_STEP + 1,)."""
    powers = np.full(_STEP + 1, factor, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


_POWERS = _powers(_FACTOR)
_INVERSES = _powers(pow(_FACTOR, -1, 2**64))


class Text:
    """The tokens of a request, append-only, with hashes of all their n-grams modulo 2**64.

    The hash of t[0] .. t[n-1] is t[0] F^(n-1) + .. + t[n-1]; the hashes of all prefixes are stored.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.n = 0
        capacity = tokens.size + 1024
        self._tokens = np.empty(capacity, np.int32)
        self._hashes = np.zeros(capacity + 1, np.uint64)
        self.append(tokens)

    def append(self, tokens: Tokens | tuple[int, ...]) -> None:
        """Append tokens, and the hashes of all tokens up to each of them."""
        n = self.n + len(tokens)
        if n > self._tokens.size:
            self._grow(n)
        if len(tokens) <= _FEW:
            value = int(self._hashes[self.n])
            for i, token in enumerate(tokens, self.n):
                value = (value * _FACTOR + int(token)) & UINT64_MASK
                self._tokens[i] = token
                self._hashes[i + 1] = value
        else:
            self._tokens[self.n : n] = tokens
            self._hash_up_to(n)
        self.n = n

    def _grow(self, n_more: int) -> None:
        """Make room for ``n_more`` tokens after those that are here."""
        tokens = self._tokens[: self.n]
        hashes = self._hashes[: self.n + 1]
        more_tokens = np.empty(n_more, np.int32)
        more_hashes = np.empty(n_more, np.uint64)
        self._tokens = np.concatenate([tokens, more_tokens])
        self._hashes = np.concatenate([hashes, more_hashes])

    def _hash_up_to(self, n: int) -> None:
        """Compute the hashes of all prefixes up to ``n`` tokens that are not computed yet."""
        for start in range(self.n, n, _STEP):
            end = min(start + _STEP, n)
            part = self._tokens[start:end].astype(np.uint64)
            inverses = _INVERSES[1 : part.size + 1]
            powers = _POWERS[1 : part.size + 1]
            # hash(prefix i) / F^i is a running sum.
            sums = np.add.accumulate(part * inverses)
            sums += self._hashes[start]
            self._hashes[start + 1 : end + 1] = sums * powers

    def __getitem__(self, i: int) -> int:
        return int(self._tokens[i])

    def part(self, first: int, n: int) -> tuple[int, ...]:
        """Return ``n`` tokens from ``first`` on."""
        part = self._tokens[first : first + n]
        return tuple(part.tolist())

    def hash(self, first: int, n: int, top: int) -> int:
        """Return the hash of ``n`` tokens from ``first`` on; ``top`` is F^n."""
        before = int(self._hashes[first])
        after = int(self._hashes[first + n])
        return (after - before * top) & UINT64_MASK

    def hashes(self, first: int, last: int, n: int, top: int) -> NDArray[np.uint64]:
        """Return the hashes of the n-grams that start in [first, last), shape (last - first,)."""
        before = self._hashes[first:last]
        after = self._hashes[first + n : last + n]
        hashes: NDArray[np.uint64] = after - before * np.uint64(top)
        return hashes


def _append_new(text: Text, job: DraftJob) -> None:
    """Append the tokens of ``job`` that ``text`` lacks, the sure ones included."""
    n_held = job.seq.n
    if text.n < n_held:
        evaluated = job.seq.tokens[text.n :]
        text.append(evaluated)
    if text.n < n_held + len(job.sure):
        sure = job.sure[text.n - n_held :]
        text.append(sure)


class HashedPositions:
    """Start positions of n-grams by hash: a sorted array, and a dict for the latest. Equal hashes:
    the last position.

    Array items pack 40 bits of the hash and 24 of the position: sorting integers takes a quarter of
    the time of pairs.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.top = pow(_FACTOR, n, 2**64)
        self._n_put = 0
        self._sorted = np.empty(0, np.uint64)
        self._latest: dict[int, int] = {}

    def put(self, text: Text, last: int) -> None:
        """Add the n-grams that start before ``last`` and are not added yet."""
        first = self._n_put
        self._n_put = last
        n_new = last - first
        if n_new > _STEP // 16:
            self._merge_latest()
            hashes = text.hashes(first, last, self.n, self.top)
            places = np.arange(first, last, dtype=np.uint64)
            self._merge(hashes, places)
            return
        for i in range(first, last):
            self._latest[text.hash(i, self.n, self.top)] = i
        if len(self._latest) > _STEP:
            self._merge_latest()

    def _merge_latest(self) -> None:
        n = len(self._latest)
        if n == 0:
            return
        hashes = np.fromiter(self._latest, np.uint64, n)
        places = np.fromiter(self._latest.values(), np.uint64, n)
        self._merge(hashes, places)
        self._latest.clear()

    def _merge(self, hashes: NDArray[np.uint64], places: NDArray[np.uint64]) -> None:
        mixed = hashes * np.uint64(_MIX)
        without_place = mixed & ~np.uint64(_PLACE)
        items = without_place | places
        self._sorted = np.concatenate([self._sorted, items])
        self._sorted.sort()

    def find(self, value: int) -> int:
        """Return the start of an n-gram with hash ``value``, or -1."""
        place = self._latest.get(value)
        if place is not None:
            return place
        mixed = value * _MIX & UINT64_MASK
        last = mixed | _PLACE  # the last item that the hash may have
        # A Python int would become a float.
        key = np.uint64(last)
        n_items = int(np.searchsorted(self._sorted, key, side="right"))
        if n_items == 0:
            return -1
        item = int(self._sorted[n_items - 1])
        if item | _PLACE != last:  # of another hash
            return -1
        return item & _PLACE
