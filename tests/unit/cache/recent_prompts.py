"""Recent prompts, and what a new one shares with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from pyctl.cache.recent import RecentMatches, RecentPrompt, RecentPrompts
from pyctl.prompt import Prompt, common_prefix


def prompts(*texts: str) -> list[RecentPrompt]:
    return [RecentPrompt(Prompt.from_ids([int(token) for token in text.split()])) for text in texts]


def matches(prompt: Prompt, recent: Sequence[RecentPrompt] = ()) -> RecentMatches:
    return RecentMatches(
        prompt, recent, [common_prefix(one.prompt.tokens, prompt.tokens) for one in recent]
    )


def of_length(n: int, *boundaries: int) -> Prompt:
    return Prompt.from_ids(np.arange(n), boundaries)


def chat(*lengths: int, seed: str = "", upto: int = 0) -> Prompt:
    """Return messages of these lengths and a generation header of 4 tokens; those after ``upto``
    depend on ``seed``.
    """
    texts = [f"{i}:{length}:{seed if i >= upto else ''}" for i, length in enumerate(lengths)]
    parts = [
        np.random.default_rng(list(text.encode())).integers(10, 9999, length)
        for text, length in zip(texts, lengths, strict=True)
    ]
    return Prompt.from_ids(np.concatenate([*parts, np.array([1, 2, 3, 4])]), np.cumsum(lengths))


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=24)


boundaries = st.sets(st.integers(1, 23), max_size=6)


recents = st.lists(
    st.builds(
        lambda t, b, n: RecentPrompt(Prompt.from_ids(t, b), n),
        tokens,
        boundaries,
        st.integers(0, 7),
    ),
    max_size=6,
)


def contents(log: RecentPrompts) -> list[tuple[list[int], tuple[int, ...], int]]:
    return [
        (one.prompt.tokens.tolist(), one.prompt.boundaries, one.boundaries_remaining)
        for one in log.newest_first()
    ]
