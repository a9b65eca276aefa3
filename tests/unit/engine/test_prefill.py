"""Prefill: its batches, what a client learns of them, and what the cancelled one leaves."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pyctl.cache.plan import batch_ends
from pyctl.engine.engine import Engine
from pyctl.engine.handle import RequestHandle
from pyctl.engine.prefill import Prefill
from pyctl.engine.request import Progress
from pyctl.prompt import Prompt, Tokens, as_tokens
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import ask, cold, engine_of, request, run_all
from tests.unit.engine.messages import chat


@pytest.mark.parametrize("step", range(1, 14))
def test_a_cancelled_prefill_is_continued_by_the_retry(step: int) -> None:
    prompt = chat((1, 300), (2, 300))
    other = chat((3, 240))
    for between in (False, True):
        backend = FakeBackend()
        engine = engine_of(backend, exact=True)
        ask(engine, prompt, cancel_after=step)
        if between:
            ask(engine, other)
        before = backend.n_evaluated
        reply = ask(engine, prompt)
        assert reply.tokens == cold(FakeBackend(), prompt).tokens
        # One batch at most is evaluated again: the live sequence was parked where it stood.
        done = min(step, 11) * 64 - 64
        assert backend.n_evaluated - before <= max(len(prompt) - done + 64, 4 + 8 + 64)
        check_invariants(engine.prefix_cache.cache)


def test_progress_counts_what_is_done() -> None:
    engine = engine_of(FakeBackend())
    handle = RequestHandle(request(chat((1, 300)), return_progress=True))
    run_all(engine, handle)
    seen = [event for event in handle.drain() if isinstance(event, Progress)]
    assert [event.n_processed for event in seen] == [0, 64, 128, 192, 256, 300, 304]
    assert {event.n_prompt for event in seen} == {304}


def test_batches_after_a_reply_end_at_every_message() -> None:
    """The prefill of a known conversation ends batches at each new message, so that an edited
    message resumes there. A cold prefill ends them only where replies begin.
    """

    def random(seed: int, n: int) -> list[int]:
        return np.random.default_rng(seed).integers(1, 60, n).tolist()

    def prompt_of(tokens: list[int], *starts: int) -> Prompt:
        return Prompt(as_tokens(tokens), starts, headers=starts[1::2])

    def cached(engine: Engine, prompt: Prompt) -> int:
        reply = ask(engine, prompt, 3)
        said[:] = [*prompt.tokens.tolist(), *reply.tokens]
        return reply.done.stats.n_cached

    said: list[int] = []
    grown, opened = (
        engine_of(FakeBackend("hybrid", n_ubatch=256, batch_cost=200)) for _ in range(2)
    )
    assert cached(grown, prompt_of(random(0, 364), 300, 360)) == 0
    n = len(said)
    starts = 300, 360, n + 40, n + 100
    asked = [*said, *random(1, 104)]
    edited = [*asked[: n + 40], *random(2, 64)]
    assert cached(grown, prompt_of(asked, *starts)) == n - 1
    assert cached(grown, prompt_of(edited, *starts)) == n + 40
    # A cold run stops where replies begin.
    assert cached(opened, prompt_of(asked, *starts)) == 0
    assert cached(opened, prompt_of(edited, *starts)) == 360


def test_the_missing_tokens_are_evaluated_once_up_to_each_batch_end() -> None:
    """The batches of a prefill follow on each other without a gap, cover the prompt, end at each
    planned end, and hold no more tokens than the backend takes.
    """
    backend = FakeBackend()
    engine = engine_of(backend, exact=True)
    prompt = chat((1, 300), (2, 240))
    real = backend.evaluate
    batches: list[tuple[int, int]] = []

    def evaluate(seq: int, tokens: Tokens, start: int, **options: Any) -> None:
        batches.append((start, start + len(tokens)))
        real(seq, tokens, start, **options)

    backend.evaluate = evaluate
    ask(engine, prompt)
    assert batches[0][0] == 0
    assert batches[-1][1] == len(prompt)
    assert all(before[1] == after[0] for before, after in pairwise(batches))
    assert {end for _, end in batches} >= set(batch_ends(prompt, backend.facts.n_ubatch))
    assert all(end - start <= backend.facts.n_ubatch for start, end in batches)


def test_only_the_last_batch_of_a_prompt_has_an_output() -> None:
    backend = FakeBackend()
    engine = engine_of(backend)
    real = backend.evaluate
    outputs: list[bool] = []

    def evaluate(seq: int, tokens: Tokens, start: int, *, output: bool, **options: Any) -> None:
        outputs.append(output)
        real(seq, tokens, start, output=output, **options)

    backend.evaluate = evaluate
    ask(engine, chat((1, 300)))
    assert len(outputs) > 1
    assert outputs == [False] * (len(outputs) - 1) + [True]


def test_free_batch_ends_are_those_of_a_backend_without_overhead() -> None:
    starts = tuple(range(300, 1020, 40))
    prompt = Prompt(chat((1, 1050)).tokens, starts, headers=starts[1::2])
    engine = engine_of(FakeBackend(n_ubatch=256, batch_cost=200))
    prefill = Prefill(
        engine.backend,
        engine.cells,
        engine.prefix_cache,
        engine.counters,
        engine.state_reads,
        engine.clock,
    )
    free = prefill.compute_batch_ends(prompt, free=True)
    assert free == batch_ends(prompt, engine.backend.facts.n_ubatch)
    assert len(prefill.compute_batch_ends(prompt)) < len(free)


def test_an_evaluated_prompt_is_a_measurement_of_its_cost() -> None:
    engine = engine_of(FakeBackend())
    seen: list[tuple[int, int]] = []
    costs = engine.prefix_cache.cache.costs
    costs.record_evaluated = lambda first, last, seconds: seen.append((first, last))
    prompt = chat((1, 300))
    ask(engine, prompt)
    assert seen == [(0, len(prompt))]
