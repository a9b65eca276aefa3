"""Takes prompts through the steps of a prefix cache, on a memory without a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.device_limits import DeviceLimits
from pyctl.cache.lookup import CacheLookup, CachePlan
from pyctl.cache.plan import batch_ends
from pyctl.cache.ports import CacheRequest
from pyctl.cache.prefix_cache import PrefixCache
from pyctl.cache.ram import RamCache
from pyctl.cache.reads import finish
from pyctl.cache.sequence import LiveSequence
from pyctl.cache.snapshot import PromptMatch
from pyctl.engine.engine_settings import EngineSettings
from pyctl.prompt import Prompt, Tokens
from tests.fake import FakeBackend

N_UBATCH = 64
CAPACITY = 4096


Asked = CacheRequest


def prompt_of(seed: int, n: int = 400, boundaries: Iterable[int] = (100, 250)) -> Prompt:
    return Prompt.from_ids(np.random.default_rng(seed).integers(1, 60, n), boundaries)


def longer(prompt: Prompt, seed: int, n: int = 200) -> Prompt:
    """Return ``prompt`` with ``n`` tokens more."""
    more = np.random.default_rng(seed).integers(1, 60, n)
    return Prompt.from_ids(np.concatenate((prompt.tokens, more)), (*prompt.boundaries, len(prompt)))


def ends_of(prompt: Prompt) -> list[int]:
    return batch_ends(prompt, N_UBATCH)


class TickingStats(RequestStats):
    """Statistics whose clock is a second later each time that it is read."""

    seconds = 0

    def now(self) -> float:
        self.seconds += 1
        return self.seconds


class Steps:
    """A prefix cache, its memory, and a live sequence."""

    def __init__(
        self,
        kind: Any = "hybrid",
        *,
        disk: Any = None,
        budget: int | None = None,
        exact: bool = False,
        can_hold: bool = False,
        n_cells: int = 0,
        limits: DeviceLimits = DeviceLimits(),
    ) -> None:
        self.memory = FakeBackend(kind, n_seqs=2, can_hold=can_hold, n_cells=n_cells)
        self.ram = RamCache(0, budget)
        settings = EngineSettings(exact=exact, device=limits)
        self.cache = PrefixCache(self.memory, self.ram, settings, disk)
        self.seq = LiveSequence(0, CAPACITY)

    def lookup(
        self, prompt: Prompt, stats: RequestStats | None = None, **fields: Any
    ) -> CacheLookup:
        stats = stats or RequestStats(len(prompt))
        return self.cache.lookup(Asked(prompt, **fields), ends_of(prompt), self.seq, stats)

    def restore(self, lookup: CacheLookup, stats: RequestStats | None = None) -> Any:
        stats = stats or RequestStats(len(lookup.match.tokens))
        return finish(self.cache.restore(lookup, self.seq, stats))

    def evaluate(self, tokens: Tokens) -> None:
        """Evaluate ``tokens`` in full batches of a cold run, and the rest in one."""
        for start in range(0, len(tokens), N_UBATCH):
            batch = tokens[start : start + N_UBATCH]
            self.memory.evaluate(self.seq.id, batch, self.seq.n)
            self.seq.append(batch, exact=True)

    def generate(self, tokens: Tokens) -> None:
        """Evaluate ``tokens`` one by one, as a reply."""
        for token in tokens:
            self.memory.evaluate(self.seq.id, np.array([token], np.int32), self.seq.n)
            self.seq.append_one(int(token))

    def serve(self, prompt: Prompt, **fields: Any) -> RequestStats:
        """Take ``prompt`` through all steps, up to its end."""
        stats = RequestStats(len(prompt))
        lookup = self.lookup(prompt, stats, **fields)
        self.cache.park_previous(self.seq, lookup, stats)
        restored = self.restore(lookup, stats)
        plan = self.cache.plan(lookup, restored, self.seq, stats)
        for end in lookup.batch_ends:
            if end > self.seq.n:
                self.evaluate(prompt.tokens[self.seq.n : end])
                if end in plan.cuts:
                    self.cache.saver.save(self.seq, plan, stats)
        stats.n_evaluated = len(prompt) - stats.n_cached
        self.cache.persist(plan)
        self.cache.announce(lookup)
        return stats

    def digest(self) -> bytes:
        """Return a digest of everything that the next output depends on."""
        return self.memory.digest(self.seq.id)

    def plan_of(self, prompt: Prompt) -> CachePlan:
        """Return a plan to save anywhere in ``prompt``."""
        return CachePlan(PromptMatch(prompt.tokens))


def cold_digest(kind: Any, prompt: Prompt, n: int) -> bytes:
    """Return the digest after ``n`` tokens of ``prompt`` in the batches of a cold run."""
    steps = Steps(kind)
    for end in ends_of(prompt):
        if end <= n:
            steps.evaluate(prompt.tokens[steps.seq.n : end])
    if steps.seq.n < n:
        steps.evaluate(prompt.tokens[steps.seq.n : n])
    return steps.digest()
