"""Chooses among the candidates of a lookup, on disk and in memory, the one to try next."""

from __future__ import annotations

from types import TracebackType

from pyctl.cache.arriving import ArrivingCandidate
from pyctl.cache.candidates import Candidate
from pyctl.cache.device_tier import DeviceTier
from pyctl.cache.disk.file_format import BlockSizes
from pyctl.cache.disk.readers import Reading
from pyctl.cache.lookup import CacheLookup
from pyctl.cache.ports import Store
from pyctl.cache.ram import RamCache
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import Prefix, Snapshot

__all__ = ["SAME_SECONDS", "Chooser"]

SAME_SECONDS = 0.05
"""Of ways to resume whose times differ by less, the one that leaves fewer tokens to evaluate is
taken.
"""


class Chooser:
    """Chooses what to restore for ``lookup``: the quickest snapshot on ``disk``, as long as nothing
    in memory has the prompt evaluated earlier, then the candidates in memory in their order.

    A context. Rows of the prompt that RAM has are not read from disk; they stay in RAM until it is
    the turn of memory. Each candidate is closed when the next is asked for, and on exit.
    """

    def __init__(
        self,
        lookup: CacheLookup,
        sizes: BlockSizes,
        cache: RamCache,
        device: DeviceTier,
        disk: Store | None,
    ) -> None:
        self._lookup = lookup
        self._sizes = sizes
        self._cache = cache
        self._device = device
        self._disk = disk if lookup.facts.for_disk else None
        self._in_memory = iter(lookup.candidates)
        self._stored: list[Prefix] = []
        self._base: Snapshot | None = None
        self._current: Candidate | None = None

    def __enter__(self) -> Chooser:
        if self._disk is not None:
            match = self._lookup.match
            self._stored = self._disk.find(match, int(match.tokens.size) - 1)
            if self._stored:
                self._base = self._cache.retain_rows(match, self._lookup.ends)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close_current()
        self._release_base()

    def next_candidate(self, seq: LiveSequence) -> Reading[Candidate | None]:
        """Return the candidate to load into ``seq`` next; None if there is none left."""
        self._close_current()
        while (prefix := self._quickest()) is not None:
            self._stored.remove(prefix)
            self._current = yield from self._open(prefix, seq)
            if self._current is not None:
                return self._current
        self._stored.clear()
        self._release_base()
        for candidate in self._in_memory:
            self._current = candidate.now(seq)
            if self._current is not None:
                return self._current
        return None

    def _quickest(self) -> Prefix | None:
        """Return which of the stored prefixes to read; None if memory is as quick.

        Of those that are about as quick as the quickest it is the deepest, but none that memory has
        as quickly.
        """
        if self._disk is None or not self._stored:
            return None
        costs = self._disk.costs
        sizes = self._sizes
        n_prompt = int(self._lookup.match.tokens.size)
        n_base = self._base.n if self._base is not None else 0

        def from_ram(n: int, keep: int) -> float:
            return costs.load(sizes.n_bytes(n, keep)) + costs.evaluate(n, n_prompt)

        def from_disk(n: int) -> float:
            return costs.read(sizes.n_bytes(n, n_base)) + from_ram(n, 0)

        in_memory = {each.n: from_ram(each.n, each.keep) for each in self._lookup.candidates}
        on_disk = {prefix: from_disk(prefix.n) for prefix in self._stored}
        cold = costs.evaluate(0, n_prompt)
        limit = min([*in_memory.values(), *on_disk.values(), cold]) + SAME_SECONDS
        n_in_memory = max((n for n, seconds in in_memory.items() if seconds <= limit), default=0)
        for prefix in self._stored:
            if prefix.n > n_in_memory and on_disk[prefix] <= limit:
                return prefix
        return None

    def _open(self, prefix: Prefix, seq: LiveSequence) -> Reading[Candidate | None]:
        """Start to read ``prefix``; None if it is gone or of no use to this prompt."""
        assert self._disk is not None
        assert self._lookup.finder is not None
        arrival = yield from self._disk.open(
            prefix, self._lookup.match, self._base, self._device.max_read
        )
        if arrival is None:
            return None
        found = self._lookup.finder.from_snapshot("disk", arrival.snapshot)
        usable = found.now(seq) if found is not None else None
        if usable is None:
            arrival.cancel()
            self._device.give_back(arrival.snapshot)
            return None
        return ArrivingCandidate(
            usable.origin,
            usable.n,
            usable.keep,
            usable.snapshot,
            arrival=arrival,
            disk=self._disk,
        )

    def _close_current(self) -> None:
        if self._current is not None:
            self._current.close(self._device)
            self._current = None

    def _release_base(self) -> None:
        if self._base is not None:
            self._cache.release(self._base)
            self._base = None
