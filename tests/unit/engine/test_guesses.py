"""A client that must not read the texts of others cannot guess them token by token from its own
replies.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest

from pyctl.cache.plan import MIN_BATCH
from pyctl.engine.request import Done
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.drive import ask, engine_of

N_PROMPT = 200
N_REPLY = 90
PROMPT = np.random.default_rng(1).integers(1, 60, N_PROMPT)
WRONG = 61
"""A token that no text of others has."""


@dataclass(frozen=True)
class Told:
    """All that a reply tells about the place where its prompt was resumed."""

    n_cached: int
    source: str
    seq: int
    n_saved: int
    again: int
    """Cached tokens of the same prompt with another end, sent next."""


def told(
    kind: Literal["attention", "hybrid"], n_right: int, *, clear_idle: bool, may_read_prompts: bool
) -> Told:
    """Return the figures that a client gets whose prompt has the first ``n_right`` tokens of
    another client's conversation.
    """
    backend = FakeBackend(kind, n_seqs=2)
    engine = engine_of(backend, clear_idle=clear_idle)
    theirs = ask(engine, Prompt.from_ids(PROMPT), N_REPLY)
    conversation = [*PROMPT, *theirs.tokens]
    dones: list[Done] = []
    for end in (WRONG, WRONG + 1):
        guess = Prompt.from_ids([*conversation[:n_right], *[end] * 70])
        done = ask(engine, guess, 1, may_read_prompts=may_read_prompts).done
        assert done is not None
        dones.append(done)
    first, second = dones
    stats = first.stats
    return Told(stats.n_cached, stats.source, first.seq, len(stats.saved), second.stats.n_cached)


@pytest.mark.parametrize("clear_idle", [True, False])
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("first", [N_PROMPT - 80, N_PROMPT + 20])
def test_no_count_steps_by_single_tokens(
    kind: Literal["attention", "hybrid"], first: int, clear_idle: bool
) -> None:
    """Neither within a prompt of another client nor within a reply to it."""
    guesses = range(first, first + MIN_BATCH + 2)
    found = [told(kind, n, clear_idle=clear_idle, may_read_prompts=False) for n in guesses]
    assert sum(a != b for a, b in pairwise(found)) <= 2, found


def test_a_client_that_sees_texts_resumes_at_any_token() -> None:
    """The others pay for privacy with up to a block of tokens that they evaluate again."""
    found = [
        told("attention", n, clear_idle=True, may_read_prompts=True).n_cached
        for n in (150, 151, 152)
    ]
    assert found == [150, 151, 152]


def test_a_planted_text_is_not_drafted_from() -> None:
    """The pace of replies to others would show whether it holds a piece of theirs."""
    engine = engine_of(FakeBackend())
    heard = list[int]()
    engine.prefix_cache.recent.listener = lambda tokens: heard.append(int(tokens.size))
    for n, may_read_prompts in ((40, False), (50, True)):
        ask(engine, Prompt.from_ids([n] * n), 1, may_read_prompts=may_read_prompts)
    assert heard == [50]
