"""Lookups for requests that wait: the tokens that they could resume with, fetched from an object
store meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeAlias

from pyctl.cache.candidates import SAME_SECONDS, ResumeCandidates
from pyctl.cache.lookup import may_use_disk
from pyctl.cache.ports import CacheRequest, SequenceMemory, Store
from pyctl.cache.ram import RamCache
from pyctl.cache.reads import Reads
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import Prefix, PromptMatch
from pyctl.prompt import Prompt

__all__ = ["Prefetch"]

BatchEndsOf: TypeAlias = Callable[[Prompt], Sequence[int]]
"""The batch ends of a prompt."""


class Prefetch:
    """The outlook of requests that wait: how many tokens of their prompts are near, and whether a
    prefix that only an object store has is worth its transfer. Changes nothing in ``cache``.
    """

    def __init__(
        self, memory: SequenceMemory, cache: RamCache, disk: Store | None, *, exact: bool
    ) -> None:
        self._memory = memory
        self._cache = cache
        self._disk = disk
        self._exact = exact

    def n_ready(self, prompt: Prompt, batch_ends: Sequence[int], seq: LiveSequence) -> int:
        """Return how many tokens of ``prompt`` could be restored into ``seq`` without a fetch."""
        match = PromptMatch(prompt.tokens, is_raw=prompt.is_raw)
        return max(self._local(match, batch_ends, [seq]), default=0)

    def start(
        self, request: CacheRequest, batch_ends_of: BatchEndsOf, sequences: Sequence[LiveSequence]
    ) -> Reads | None:
        """Start to fetch the best prefix of the prompt that only an object store has, if the prompt
        is evaluated earlier with it than with anything here; else return None.
        """
        if self._disk is None or request.background or not may_use_disk(request, self._disk):
            return None
        prompt = request.prompt
        match = PromptMatch(prompt.tokens, is_raw=prompt.is_raw)
        remote = self._remote(match)
        if not remote:
            return None
        local = self._local(match, batch_ends_of(prompt), sequences)
        cold = self._cache.costs.evaluate(0, int(match.tokens.size))
        prefix, seconds = min(remote, key=itemgetter(1))
        if seconds + SAME_SECONDS >= min([cold, *local.values()]):
            return None
        return self._disk.fetch(prefix)

    def _local(
        self, match: PromptMatch, batch_ends: Sequence[int], sequences: Sequence[LiveSequence]
    ) -> dict[int, float]:
        """Return the positions at which the prompt could resume without a fetch, and the seconds
        until it would be evaluated from there.
        """
        n_prompt = int(match.tokens.size)
        costs = self._cache.costs
        seconds: dict[int, float] = {}
        for prefix in self._disk.find(match, n_prompt - 1) if self._disk is not None else ():
            seconds[prefix.n] = self._read(prefix) + costs.evaluate(prefix.n, n_prompt)
        for seq in sequences:
            candidates = ResumeCandidates(
                match, batch_ends, seq, self._memory.shape, exact=self._exact
            ).find(self._cache)
            for candidate in candidates:
                seconds[candidate.n] = costs.evaluate(candidate.n, n_prompt)
        return seconds

    def _remote(self, match: PromptMatch) -> list[tuple[Prefix, float]]:
        """Return the prefixes that only an object store has, each with the same seconds."""
        if self._disk is None:
            return []
        n_prompt = int(match.tokens.size)
        costs = self._cache.costs
        return [
            (prefix, fetch + self._read(prefix) + costs.evaluate(prefix.n, n_prompt))
            for prefix, fetch in self._disk.find_remote(match, n_prompt - 1)
        ]

    def _read(self, prefix: Prefix) -> float:
        """Return the seconds of a read of ``prefix`` from the directory."""
        return self._cache.costs.read(self._memory.shape.sizes.n_bytes(prefix.n, 0))
