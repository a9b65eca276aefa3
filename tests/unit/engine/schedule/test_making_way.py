"""Replies that give way to a prompt without room: which ones, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.engine.engine import Engine
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Piece
from pyctl.engine.schedule import admission
from pyctl.engine.schedule.admission import MAX_PASSED, TURN_TOKENS
from pyctl.errors import StateError
from tests.fake import FakeBackend
from tests.unit.engine.drive import collect, engine_of, run_all
from tests.unit.engine.scheduling import ENDLESS, KINDS, alone, check_at_rest, prompt_of, submit

LONG_REPLY = 400
"""Tokens of a reply that no prompt should wait for."""


def has_said(handle: RequestHandle) -> bool:
    return any(isinstance(event, Piece) for event in handle.drain())


def steps_until_said(engine: Engine, handle: RequestHandle) -> int:
    """Return the steps until a request has its first text."""
    for n_steps in range(5000):
        if has_said(handle):
            return n_steps
        engine.step()
    raise AssertionError("it never has a first token")


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_without_room_waits_for_a_turn_and_not_for_a_reply(kind: str) -> None:
    backend = FakeBackend(kind, n_ctx=1024, n_seqs=3)
    engine = engine_of(backend)
    prompts = [prompt_of(seed, 280) for seed in (1, 2, 3)]
    first, second = (submit(engine, prompt, LONG_REPLY, sampling=ENDLESS) for prompt in prompts[:2])
    engine.step()
    third = submit(engine, prompts[2], 8)
    n_batches = sum(len(prompt) // 64 + 1 for prompt in prompts)
    assert steps_until_said(engine, third) <= TURN_TOKENS + 2 * n_batches
    assert not first.is_over
    assert not second.is_over
    assert engine.counters.n_suspended == 1
    run_all(engine)
    replies = [collect(handle).tokens for handle in (first, second)]
    expected = [alone(each, LONG_REPLY, kind, sampling=ENDLESS).tokens for each in prompts[:2]]
    assert replies == expected
    check_at_rest(engine, backend)


def test_a_prompt_without_a_sequence_gets_that_of_the_youngest_reply() -> None:
    engine = engine_of(FakeBackend(n_ctx=4096, n_seqs=2))
    old = submit(engine, prompt_of(1, 100), LONG_REPLY, sampling=ENDLESS)
    young = submit(engine, prompt_of(2, 100), LONG_REPLY, sampling=ENDLESS)
    engine.step()
    third = submit(engine, prompt_of(3, 100), LONG_REPLY, sampling=ENDLESS)
    steps_until_said(engine, third)
    assert [active.handle for active in engine.running] == [old, third]
    assert [active.handle for active in engine.waiting.suspended] == [young]


def test_a_reply_alone_never_gives_way() -> None:
    engine = engine_of(FakeBackend(n_ctx=1024, n_seqs=1))
    first = submit(engine, prompt_of(1, 100), LONG_REPLY, sampling=ENDLESS)
    second = submit(engine, prompt_of(2, 100), 8)
    steps_until_said(engine, second)
    assert first.is_over
    assert engine.counters.n_suspended == 0


def test_replies_stay_where_none_of_them_makes_enough_room() -> None:
    engine = engine_of(FakeBackend(n_ctx=1024, n_seqs=3))
    for seed in (1, 2):
        submit(engine, prompt_of(seed, 200), LONG_REPLY, sampling=ENDLESS)
    engine.step()
    big = submit(engine, prompt_of(3, 950), 4)
    for _ in range(2 * TURN_TOKENS):
        engine.step()
    assert engine.counters.n_suspended == 0
    assert not has_said(big)


def test_a_reply_on_the_sequence_of_its_clients_choice_stays() -> None:
    engine = engine_of(FakeBackend(n_ctx=4096, n_seqs=2))
    submit(engine, prompt_of(1, 100), LONG_REPLY, sampling=ENDLESS)
    named = submit(engine, prompt_of(2, 100), LONG_REPLY, sampling=ENDLESS, seq=1)
    engine.step()
    third = submit(engine, prompt_of(3, 100), 4)
    for _ in range(2 * TURN_TOKENS):
        engine.step()
    assert named in [active.handle for active in engine.running]
    assert not has_said(third)


def test_a_prompt_for_a_taken_sequence_suspends_nobody() -> None:
    engine = engine_of(FakeBackend(n_ctx=4096, n_seqs=2))
    for seq in (0, 1):
        submit(engine, prompt_of(seq, 100), LONG_REPLY, sampling=ENDLESS)
    engine.step()
    submit(engine, prompt_of(3, 100), 4, seq=1)
    for _ in range(2 * TURN_TOKENS):
        engine.step()
    assert engine.counters.n_suspended == 0


def test_a_reply_that_cannot_be_saved_goes_on_and_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(FakeBackend(n_ctx=4096, n_seqs=2))
    tries = []

    def refuse(*args: object, **fields: object) -> None:
        tries.append(args)
        raise StateError("made to fail")

    monkeypatch.setattr(engine.prefix_cache.saver, "suspend", refuse)
    prompts = [prompt_of(seed, 100) for seed in (1, 2, 3)]
    handles = [submit(engine, prompt, LONG_REPLY, sampling=ENDLESS) for prompt in prompts]
    run_all(engine)
    replies = [collect(handle).tokens for handle in handles]
    assert replies == [alone(each, LONG_REPLY, sampling=ENDLESS).tokens for each in prompts]
    assert len(tries) == 1


def test_with_exact_no_reply_gives_way_within_its_turn() -> None:
    engine = engine_of(FakeBackend(n_ctx=4096, n_seqs=2), exact=True)
    first = submit(engine, prompt_of(1, 100), LONG_REPLY, sampling=ENDLESS)
    engine.step()
    submit(engine, prompt_of(2, 100), 8)
    for _ in range(TURN_TOKENS + 10):
        engine.step()
    assert engine.counters.n_suspended == 0
    assert [active.handle for active in engine.running] == [first]


def test_prompts_pass_a_suspended_reply_only_so_often() -> None:
    engine = engine_of(FakeBackend(n_ctx=4096, n_seqs=2))
    submit(engine, prompt_of(1, 50), 3000, sampling=ENDLESS)
    passed = submit(engine, prompt_of(2, 50), LONG_REPLY, sampling=ENDLESS)
    engine.step()
    prompts = [submit(engine, prompt_of(seed, 50), 90) for seed in range(3, 3 + 3 * MAX_PASSED)]
    while not passed.is_over:
        engine.step()
    n_begun = sum(has_said(each) for each in prompts)
    assert n_begun <= 2 * MAX_PASSED


WORKLOADS = st.lists(
    st.tuples(
        st.integers(20, 500),  # tokens of the prompt
        st.integers(1, 150),  # tokens of the reply
        st.integers(0, 40),  # steps until the next request
    ),
    min_size=2,
    max_size=10,
)


@settings(max_examples=15, deadline=None)
@given(WORKLOADS, st.integers(1, 4), st.sampled_from([8, 24]))
def test_nobody_starves(
    workload: list[tuple[int, int, int]], n_seqs: int, turn_tokens: int
) -> None:
    """Every request ends with the tokens of one that is alone, the oldest one is never suspended,
    and the suspended ones are bounded, in number and in tokens.
    """
    backend = FakeBackend(n_ctx=1024, n_seqs=n_seqs)
    engine = engine_of(backend)
    handles: list[RequestHandle] = []

    def step() -> bool:
        before = [active.handle for active in engine.waiting.suspended]
        oldest = next((handle for handle in handles if not handle.is_over), None)
        is_busy = engine.step()
        suspended = engine.waiting.suspended
        assert len(suspended) <= n_seqs
        assert sum(active.n_needed for active in suspended) <= 1024
        assert oldest in before or oldest not in [active.handle for active in suspended]
        return is_busy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "TURN_TOKENS", turn_tokens)
        for seed, (n_prompt, n_reply, n_steps) in enumerate(workload):
            prompt = prompt_of(seed, n_prompt)
            handles.append(submit(engine, prompt, n_reply, sampling=ENDLESS))
            for _ in range(n_steps):
                step()
        while step():
            pass
    for seed, (handle, (n_prompt, n_reply, _)) in enumerate(zip(handles, workload, strict=True)):
        expected = alone(prompt_of(seed, n_prompt), n_reply, sampling=ENDLESS)
        assert collect(handle).tokens == expected.tokens
    check_at_rest(engine, backend)
