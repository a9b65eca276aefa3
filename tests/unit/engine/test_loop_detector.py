"""Loops of replies: detection, what is none, and the end of a reply by --loop-guard."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.ram import RamCache
from pyctl.engine.backend import Sampler
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.loop_detector import (
    MAX_PERIOD,
    MIN_REPEATS,
    MIN_TOKENS,
    LoopDetector,
    ReplyLoop,
)
from pyctl.engine.sampling import Sampling
from pyctl.prompt import Prompt, Tokens, as_tokens
from tests.fake import FakeBackend
from tests.unit.engine.drive import ask

NO_PROMPT = as_tokens([])
TEXT = np.random.default_rng(3).integers(0, 50_000, 2000).tolist()


def detect(reply: Iterable[int], prompt: Tokens = NO_PROMPT) -> tuple[int, ReplyLoop] | None:
    """Return the number of tokens at which the first loop is detected, and the loop."""
    detector = LoopDetector(prompt)
    for n, token in enumerate(reply, 1):
        loop = detector.observe(token)
        if loop is not None:
            return n, loop
    return None


@given(period=st.integers(1, MAX_PERIOD), n_before=st.integers(0, 700))
def test_a_loop_is_detected_at_its_threshold(period: int, n_before: int) -> None:
    """Detected are the period of the block, and as many tokens as the rule requires."""
    block = list(range(100_000, 100_000 + period))
    threshold = max(MIN_REPEATS * period, MIN_TOKENS)
    n_blocks = threshold // period + 2
    found = detect([*TEXT[:n_before], *block * n_blocks])
    assert found == (n_before + period + threshold, ReplyLoop(period, threshold))


def test_text_without_a_period_is_no_loop() -> None:
    assert detect(TEXT) is None


def test_a_block_that_changes_is_no_loop() -> None:
    """A list whose lines have numbers repeats all but those."""
    lines = [token for number in range(200) for token in (*range(30), 1000 + number)]
    assert detect(lines) is None


def test_a_block_longer_than_the_maximum_is_no_loop() -> None:
    assert detect([*range(MAX_PERIOD + 1)] * 8) is None


def test_a_block_that_the_prompt_repeats_may_be_repeated() -> None:
    block = [5, 6, 7, 8]
    quoting = as_tokens([1, *block * 3, 2])
    assert detect(block * 200, quoting) is None
    mentioning = as_tokens([1, *block, 2])
    assert detect(block * 200, mentioning) is not None


def test_another_loop_is_detected_after_a_block_of_the_prompt() -> None:
    quoting = as_tokens([5, 6] * 4)
    found = detect([*[5, 6] * 250, *[9, 8, 7] * 500], quoting)
    assert found is not None
    assert found[1].period == 3


class Looping:
    """A sampler that always returns token 5."""

    seed = 0

    def __init__(self, *, is_constrained: bool) -> None:
        self.is_constrained = is_constrained

    def sample(self, index: int) -> int:
        return 5

    def force(self, index: int, token: int) -> None:
        raise AssertionError("nothing is forced")

    def top_tokens(self, token: int, n: int) -> tuple[tuple[int, float], ...]:
        return ((token, 1.0),)

    def close(self) -> None:
        """Free nothing."""


class LoopingBackend(FakeBackend):
    """A backend whose model repeats one token."""

    is_constrained = False

    def sampler(self, sampling: Sampling, prompt: Tokens) -> Sampler:
        return Looping(is_constrained=self.is_constrained)


def looping(*, guard: bool, is_constrained: bool = False) -> Engine:
    backend = LoopingBackend(n_ctx=2000)
    backend.is_constrained = is_constrained
    return Engine(backend, RamCache(4, None), EngineSettings(loop_guard=guard))


OTHER = Prompt.from_ids(range(10, 50))


def test_without_the_guard_a_loop_is_counted_and_goes_on() -> None:
    engine = looping(guard=False)
    done = ask(engine, OTHER, 900).done
    assert done.timings.n_predicted == 900
    assert done.timings.loop == ReplyLoop(1, MIN_TOKENS)
    assert engine.counters.n_loops == 1
    assert engine.counters.n_loops_ended == 0


def test_the_guard_ends_the_reply_as_its_token_limit_would() -> None:
    engine = looping(guard=True)
    done = ask(engine, OTHER, 900).done
    assert done.timings.n_predicted == MIN_TOKENS + 1
    assert done.stop_type == "limit"
    assert done.timings.loop == ReplyLoop(1, MIN_TOKENS, is_ended=True)
    assert engine.counters.n_loops_ended == 1


@pytest.mark.parametrize("sampling", [Sampling(ignore_eos=True), Sampling(grammar='root ::= "a"+')])
def test_a_reply_that_must_go_on_has_no_loop(sampling: Sampling) -> None:
    """A grammar may require the repetition, and a client may ask for all tokens."""
    done = ask(looping(guard=True), OTHER, 600, sampling=sampling).done
    assert done.timings.n_predicted == 600
    assert done.timings.loop is None


def test_a_lazy_grammar_that_has_taken_effect_allows_repetitions() -> None:
    lazy = Sampling(grammar='root ::= "a"+', grammar_lazy=True, grammar_triggers=("a",))
    bound = ask(looping(guard=True, is_constrained=True), OTHER, 600, sampling=lazy).done
    assert bound.timings.loop is None
    free = ask(looping(guard=True), OTHER, 600, sampling=lazy).done
    assert free.timings.loop is not None


def test_the_guard_lets_a_reply_repeat_its_prompt() -> None:
    engine = looping(guard=True)
    done = ask(engine, Prompt.from_ids([5] * 40), 900).done
    assert done.timings.n_predicted == 900
    assert done.timings.loop is None
