"""Evicted prefixes: the tokens that prompts wanted again."""

from __future__ import annotations

import numpy as np

from pyctl.cache.evicted import EvictedPrefixes, WantedTokens
from pyctl.cache.snapshot import PromptMatch
from pyctl.prompt import Tokens
from tests.unit.cache.steps import Steps, prompt_of

TOKENS: Tokens = np.arange(1000, dtype=np.int32)


def test_tokens_of_an_evicted_prefix_count_when_they_are_evaluated_again() -> None:
    """Tokens count from the restored ones up to the deepest evicted prefix."""
    evicted = EvictedPrefixes()
    for n in (100, 300):
        evicted.add(PromptMatch(TOKENS[:400]).prefix(n))
    evicted.count_wanted(PromptMatch(TOKENS[:500]), 120, "ram")
    assert evicted.wanted == WantedTokens(n_evaluated=180)


def test_tokens_that_come_from_disk_count_as_read() -> None:
    evicted = EvictedPrefixes()
    evicted.add(PromptMatch(TOKENS).prefix(300))
    evicted.count_wanted(PromptMatch(TOKENS), 200, "disk")
    assert evicted.wanted == WantedTokens(n_evaluated=100, n_read=200)


def test_an_eviction_counts_once() -> None:
    evicted = EvictedPrefixes()
    evicted.add(PromptMatch(TOKENS).prefix(300))
    for _ in range(2):
        evicted.count_wanted(PromptMatch(TOKENS), 0, "none")
    assert evicted.wanted == WantedTokens(n_evaluated=300)
    assert len(evicted) == 0


def test_other_prompts_and_shorter_ones_want_nothing() -> None:
    evicted = EvictedPrefixes()
    evicted.add(PromptMatch(TOKENS).prefix(300))
    evicted.count_wanted(PromptMatch(TOKENS[:299]), 0, "none")
    evicted.count_wanted(PromptMatch(TOKENS[::-1].copy()), 0, "none")
    assert evicted.wanted == WantedTokens()


def test_the_oldest_is_forgotten() -> None:
    evicted = EvictedPrefixes(maximum=2)
    match = PromptMatch(TOKENS)
    for n in (100, 200, 200, 300):
        evicted.add(match.prefix(n))
    assert len(evicted) == 2
    evicted.count_wanted(PromptMatch(TOKENS[:150]), 0, "none")
    assert evicted.wanted.n_evaluated == 0, "100 is forgotten"
    evicted.count_wanted(PromptMatch(TOKENS[:250]), 0, "none")
    assert evicted.wanted.n_evaluated == 200


def test_a_cache_that_is_too_small_counts_what_it_lacks() -> None:
    """A prompt whose snapshots were evicted for another's."""
    prompts = [prompt_of(seed, 600) for seed in (1, 2)]
    requests = (*prompts, *prompts)
    large = Steps()
    for prompt in requests:
        large.serve(prompt)
    small = Steps(budget=large.ram.n_bytes * 2 // 3)
    for prompt in requests:
        small.serve(prompt)
    assert small.ram.evictor.n_evicted > 0
    assert small.ram.evictor.evicted.wanted.n_evaluated > 0
    assert large.ram.evictor.evicted.wanted == WantedTokens()
