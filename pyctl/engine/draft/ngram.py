"""Drafts from the request's own tokens: what followed when its last few tokens stood there before.

The four kinds are llama-server's, and propose what it proposes for a request in a fresh slot. Two things differ. What a
request has seen is its own: llama-server's ngram-mod has one table for all slots, so that one client's text becomes
another's draft, and whether a draft is accepted shows in the timings. And tokens are compared by 40 bits of hash where
ngram-mod has 22, so that long texts do not overwrite each other's entries. A collision costs a wrong draft, no more.

Each token costs a few numbers: a hash of any stretch of the text is the difference of two sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pyctl.engine.draft.draft_settings import NgramSettings
from pyctl.engine.draft.source import DraftJob
from pyctl.limit import limit
from pyctl.prompt import Tokens

__all__ = ["NgramSource", "ngram_sources"]

MAX_KEYS = limit(16384, "look-ups that ngram-map-k and -k4v remember of a request", "forgotten", "request")

_MOST_COUNTED = 16380


def ngram_sources(types: Sequence[str], settings: NgramSettings) -> list[NgramSource]:
    """The sources among ``types``, in llama-server's order, which ``types`` does not change."""
    s = settings
    hits = s.map_k4v_min_hits
    known = [
        NgramSource("ngram-simple", s.simple_size_m, lambda: _Simple(s.simple_size_n, s.simple_size_m)),
        NgramSource("ngram-map-k", s.map_k_size_m, lambda: _Map(s.map_k_size_n, s.map_k_size_m)),
        NgramSource("ngram-map-k4v", s.map_k4v_size_m, lambda: _Map(s.map_k4v_size_n, s.map_k4v_size_m, hits, 4)),
        NgramSource("ngram-mod", s.mod_max, lambda: _Mod(s.mod_match, s.mod_max, s.mod_min)),
    ]
    return [source for source in known if source.name in types]


class _Drafting(Protocol):
    """One kind of drafting for one request; `text` is the prompt, and later all tokens, the sampled one last."""

    def begin(self, text: _Text) -> None: ...

    def draft(self, text: _Text) -> tuple[int, ...]: ...

    def learn(self, n_drafted: int, n_accepted: int) -> None: ...


class NgramSource:
    """The `DraftSource` ``name``, whose drafts have ``most`` tokens; ``make`` makes what drafts for one request.

    It holds up to 32 bytes for each token of the requests that decode, and a few MiB for each of these.
    """

    def __init__(self, name: str, most: int, make: Callable[[], _Drafting]) -> None:
        self.name, self.most = name, most
        self._make = make
        self._running: dict[int, tuple[_Text, _Drafting]] = {}

    def begin(self, key: int, prompt: Tokens) -> None:
        text, drafting = _Text(prompt), self._make()
        drafting.begin(text)
        self._running[key] = text, drafting

    def propose(self, jobs: Sequence[DraftJob]) -> list[tuple[int, ...]]:
        return [self._draft(job)[: job.most] for job in jobs]

    def _draft(self, job: DraftJob) -> tuple[int, ...]:
        text, drafting = self._running[job.key]
        n_held, n = job.seq.n, job.seq.n + len(job.sure)
        if text.n < n_held:
            text.append(job.seq.tokens[text.n :])
        if text.n < n:
            text.append(job.sure[text.n - n_held :])
        return drafting.draft(text)

    def learn(self, key: int, n_drafted: int, n_accepted: int) -> None:
        self._running[key][1].learn(n_drafted, n_accepted)

    def end(self, key: int) -> None:
        self._running.pop(key, None)


_FACTOR = 6364136223846793005
_MASK = 2**64 - 1
_STEP = 4096
_PLACE = 2**24 - 1
_MIX = 0x9E3779B97F4A7C15


def _powers(factor: int) -> NDArray[np.uint64]:
    """The powers 0 to _STEP of ``factor``, modulo 2**64."""
    powers = np.full(_STEP + 1, factor, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


_POWERS, _INVERSES = _powers(_FACTOR), _powers(pow(_FACTOR, -1, 2**64))


class _Text:
    """The tokens of a request, which only become more, and hashes of every stretch of them, modulo 2**64.

    A stretch t[0] .. t[n-1] has the hash t[0] F^(n-1) + .. + t[n-1]; what is kept are those of all beginnings.
    """

    def __init__(self, tokens: Tokens) -> None:
        self.n = 0
        self._tokens = np.empty(tokens.size + 1024, np.int32)
        self._hashes = np.zeros(tokens.size + 1025, np.uint64)
        self.append(tokens)

    def append(self, tokens: Tokens | tuple[int, ...]) -> None:
        n = self.n + len(tokens)
        if n > self._tokens.size:
            self._tokens = np.concatenate([self._tokens[: self.n], np.empty(n, np.int32)])
            self._hashes = np.concatenate([self._hashes[: self.n + 1], np.empty(n, np.uint64)])
        if len(tokens) <= 8:
            value = int(self._hashes[self.n])
            for i, token in enumerate(tokens, self.n):
                value = (value * _FACTOR + int(token)) & _MASK
                self._tokens[i], self._hashes[i + 1] = token, value
        else:
            self._tokens[self.n : n] = tokens
            for start in range(self.n, n, _STEP):  # beginning(i) / F^i is a running sum
                part = self._tokens[start : min(start + _STEP, n)].astype(np.uint64)
                m = part.size
                sums = np.add.accumulate(part * _INVERSES[1 : m + 1]) + self._hashes[start]
                self._hashes[start + 1 : start + 1 + m] = sums * _POWERS[1 : m + 1]
        self.n = n

    def __getitem__(self, i: int) -> int:
        return int(self._tokens[i])

    def part(self, first: int, n: int) -> tuple[int, ...]:
        """``n`` tokens from ``first`` on."""
        return tuple(self._tokens[first : first + n].tolist())

    def hash(self, first: int, n: int, top: int) -> int:
        """Of ``n`` tokens from ``first`` on; ``top`` is F^n."""
        return (int(self._hashes[first + n]) - int(self._hashes[first]) * top) & _MASK

    def hashes(self, first: int, last: int, n: int, top: int) -> NDArray[np.uint64]:
        """Of the ``n`` tokens from each of [first, last) on, shape (last - first,)."""
        hashes: NDArray[np.uint64] = self._hashes[first + n : last + n] - self._hashes[first:last] * np.uint64(top)
        return hashes

    def each_hash(self, places: NDArray[np.intp], n: int, top: int) -> NDArray[np.uint64]:
        """Of the ``n`` tokens from each of ``places`` on, shape (len(places),)."""
        hashes: NDArray[np.uint64] = self._hashes[places + n] - self._hashes[places] * np.uint64(top)
        return hashes


class _Places:
    """Where stretches of ``n`` tokens begin, by their hashes: sorted in an array, and the latest ones in a dict.

    Of equal ones the last, or with ``keeps`` the first that was put, and of those put at once the last. A number in the
    array is 40 bits of the hash and 24 of the place, for sorting numbers takes a quarter of the time of sorting pairs.
    """

    def __init__(self, n: int, *, keeps: bool = False) -> None:
        self.n, self.top = n, pow(_FACTOR, n, 2**64)
        self._keeps = keeps
        self._sorted = np.empty(0, np.uint64)
        self._latest: dict[int, int] = {}

    def put(self, text: _Text, first: int, last: int) -> None:
        """The stretches that begin in [first, last), which comes after all that were put."""
        if last - first > 256:
            self._merge_latest()
            self._merge(text.hashes(first, last, self.n, self.top), np.arange(first, last, dtype=np.uint64))
            return
        for i in range(last - 1, first - 1, -1) if self._keeps else range(first, last):
            value = text.hash(i, self.n, self.top)
            if not self._keeps or self.find(value) < 0:
                self._latest[value] = i
        if len(self._latest) > _STEP:
            self._merge_latest()

    def _merge_latest(self) -> None:
        n = len(self._latest)
        if n:
            self._merge(np.fromiter(self._latest, np.uint64, n), np.fromiter(self._latest.values(), np.uint64, n))
            self._latest.clear()

    def _merge(self, hashes: NDArray[np.uint64], places: NDArray[np.uint64]) -> None:
        merged = np.concatenate([self._sorted, (hashes * np.uint64(_MIX) & ~np.uint64(_PLACE)) | places])
        merged.sort()
        if self._keeps:
            values = merged >> np.uint64(24)
            changes = values[1:] != values[:-1]
            firsts, lasts = merged[np.append(True, changes)], merged[np.append(changes, True)]
            merged = np.where(firsts & np.uint64(_PLACE) < places.min(), firsts, lasts)
        self._sorted = merged

    def find(self, value: int) -> int:
        """Where a stretch with this hash begins, or -1."""
        if (place := self._latest.get(value)) is not None:
            return place
        last = (value * _MIX & _MASK) | _PLACE
        i = int(np.searchsorted(self._sorted, np.uint64(last), side="right")) - 1  # an int would become a float
        found = int(self._sorted[i]) if i >= 0 else -1
        return found & _PLACE if found >= 0 and found | _PLACE == last else -1


class _Simple:
    """ngram-simple: what followed the last time, if that is long enough ago; nothing from the very beginning."""

    def __init__(self, n: int, m: int) -> None:
        self._m = m
        self._places = _Places(n)
        self._n_put = 0

    def begin(self, text: _Text) -> None:
        pass

    def draft(self, text: _Text) -> tuple[int, ...]:
        places, n, n_before = self._places, self._places.n, text.n - 1
        if n_before <= n + self._m + 1:
            return ()
        places.put(text, self._n_put, n_before - n)
        self._n_put = n_before - n
        place = places.find(text.hash(text.n - n, n, places.top))
        length = min(self._m, n_before - place - n)
        return text.part(place + n, length) if place > 0 and length >= n else ()

    def learn(self, n_drafted: int, n_accepted: int) -> None:
        pass


class _Mod:
    """ngram-mod: token by token what followed the last time, of drafted tokens, too.

    The latest tokens of the text count only from time to time, and at once after five bad drafts.
    """

    def __init__(self, n: int, most: int, least: int) -> None:
        self._places = _Places(n)
        self._drop = pow(_FACTOR, n - 1, 2**64)
        self._most, self._least = most, least
        self._n_put = self._n_known = self._n_bad = 0

    def begin(self, text: _Text) -> None:
        self._n_known = max(text.n - self._places.n, 0)

    def draft(self, text: _Text) -> tuple[int, ...]:
        places, n, n_before = self._places, self._places.n, text.n - 1
        if n_before < n:
            return ()
        if self._n_known + 32 < n_before:
            self._n_known = n_before - n
        if self._n_known > self._n_put:
            places.put(text, self._n_put, self._n_known)
            self._n_put = self._n_known
        tokens = list(text.part(text.n - n, n))
        value = text.hash(text.n - n, n, places.top)
        for i in range(self._most):
            place = places.find(value)
            if place < 0:
                if i < self._least:
                    return ()
                break
            tokens.append(text[place + n])
            value = ((value - tokens[i] * self._drop) * _FACTOR + tokens[-1]) & _MASK
        return tuple(tokens[n:])

    def learn(self, n_drafted: int, n_accepted: int) -> None:
        self._n_bad = self._n_bad + 1 if n_accepted < n_drafted / 4 else 0
        if self._n_bad == 5:  # llama-server empties its table here, and fills it from the text before the next draft
            self._n_bad = self._n_known = 0


@dataclass
class _Value:
    """What followed a key: from ``place`` on, ``count`` times; ``length`` tokens of it are worth drafting."""

    place: int
    length: int
    count: int = 0


@dataclass
class _Key:
    """Tokens that were looked up and found: how often, and up to where the ``values`` are counted."""

    n_hits: int = 0
    upto: int = 0
    values: list[_Value] = field(default_factory=list)


class _Map:
    """ngram-map-k, and with ``n_values`` ngram-map-k4v: what followed the last tokens where they stood first.

    A draft is as long as the last one of the same kind was right. With values it is the one that followed most often,
    if that is twice as often as all others together.
    """

    def __init__(self, n: int, m: int, min_hits: int = 1, n_values: int = 0) -> None:
        self._m, self._min_hits, self._n_values = m, min_hits, n_values
        self._top_m = pow(_FACTOR, m, 2**64)
        self._places = _Places(n, keeps=True)
        self._keys: dict[int, _Key] = {}
        self._n_prompt = 0
        self._n_put = 1  # nothing is found at the very beginning
        self._drafted: _Value | None = None

    def begin(self, text: _Text) -> None:
        self._n_prompt = text.n

    def draft(self, text: _Text) -> tuple[int, ...]:
        places, n, m, n_before = self._places, self._places.n, self._m, text.n - 1
        self._drafted = None
        if n_before < 2 * n + m:
            return ()
        end = n_before - n - m
        places.put(text, self._n_put, self._n_prompt - n - m)
        places.put(text, max(self._n_put, self._n_prompt + 1), end)
        self._n_put = max(self._n_put, end)
        value = text.hash(text.n - n, n, places.top)
        place = places.find(value)
        if place < 0:
            return ()
        key = self._key(value)
        key.n_hits += 1
        if self._n_values == 0:
            if not key.values:
                key.values.append(_Value(place + n, m))
            best = key.values[0]
        else:
            if key.n_hits < self._min_hits:
                return ()
            self._count(text, key, value, place)
            best = max(key.values, key=lambda each: each.count)
            others = sum(each.count for each in key.values) - best.count
            if others > 0 and best.count < 2 * others:
                return ()
        self._drafted = best
        return text.part(place + n, min(m, best.length))

    def _key(self, value: int) -> _Key:
        key = self._keys.get(value)
        if key is None:
            if len(self._keys) == MAX_KEYS:
                self._keys.clear()
            key = self._keys[value] = _Key()
        return key

    def _count(self, text: _Text, key: _Key, value: int, place: int) -> None:
        """Count what followed ``key`` up to ``place``, the last time once more."""
        n, m = self._places.n, self._m
        found = np.flatnonzero(text.hashes(key.upto, place + 1, n, self._places.top) == value) + (key.upto + n)
        key.upto = place
        followed = text.each_hash(found, m, self._top_m)
        for i in range(self._n_values):
            if not found.size:
                return
            if i == len(key.values):
                key.values.append(_Value(int(found[0]), m))
            each = key.values[i]
            is_it = followed == text.hash(each.place, m, self._top_m)
            each.count = min(each.count + int(np.count_nonzero(is_it)), _MOST_COUNTED)
            found, followed = found[~is_it], followed[~is_it]

    def learn(self, n_drafted: int, n_accepted: int) -> None:
        if self._drafted is not None and n_accepted < n_drafted:  # else it may have been cut
            self._drafted.length = n_accepted
