"""Admission: order, passing, the bound of the queue, the next batch, and refusals at the head of
the queue.
"""

from __future__ import annotations

import threading
from unittest.mock import Mock

import numpy as np
import pytest

from pyctl.cache.plan import batch_ends
from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.request import Failed, Piece, Progress
from pyctl.engine.worker import Worker
from pyctl.errors import BusyError, RequestError
from pyctl.prompt import Prompt
from tests.fake import FakeBackend
from tests.unit.engine.drive import ask, collect, engine_of, request, run_all
from tests.unit.engine.scheduling import ENDLESS, KINDS, prompt_of, submit
from tests.unit.server.fake import INFO


def steps_until_said(engine: Engine, handle: RequestHandle) -> int:
    """Return the steps until a request has its first text."""
    steps = 0
    while not any(isinstance(event, Piece) for event in handle.drain()):
        engine.step()
        steps += 1
    return steps


def test_a_big_request_is_passed_by_some_small_ones_but_not_for_ever() -> None:
    backend = FakeBackend(n_ctx=1024, n_seqs=4)
    engine = engine_of(backend)
    small = [submit(engine, prompt_of(1, 200), 20, sampling=ENDLESS)]
    engine.step()
    big = submit(engine, prompt_of(2, 900), 4)
    passed = 0
    for seed in range(3, 60):
        small.append(submit(engine, prompt_of(seed, 200), 20, sampling=ENDLESS))
        for _ in range(8):
            engine.step()
        if collect(big).done is not None:
            break
        passed += 1
    assert 1 <= passed < 40
    run_all(engine)
    assert all(collect(handle).error is None for handle in small)


def test_requests_begin_in_the_order_in_which_they_came() -> None:
    backend = FakeBackend(n_ctx=1024, n_seqs=2)
    engine = engine_of(backend)
    handles = [submit(engine, prompt_of(seed, 500), 4) for seed in range(6)]
    order: list[int] = []
    while engine.step():
        order += [
            number
            for number, handle in enumerate(handles)
            if any(handle.drain()) and number not in order
        ]
    assert order == sorted(order)


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one() -> None:
    engine = engine_of(FakeBackend(n_ctx=8192, n_seqs=4))
    long = submit(engine, prompt_of(1, 64 * 50), 4)
    engine.step()
    short = submit(engine, prompt_of(2, 40), 4, sampling=ENDLESS)
    assert steps_until_said(engine, short) <= 3
    assert not any(isinstance(event, Piece) for event in long.drain())


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_next_turn_does_not_wait_for_all_of_a_long_prompt(kind: str, leaves: bool) -> None:
    """A turn that resumes from the cache gets its first token within three steps beside a prefill
    of 50 batches, and each waiting prompt is looked up once.
    """
    engine = engine_of(FakeBackend(kind, n_ctx=8192, n_seqs=3))
    conversation = prompt_of(1, 64 * 20)
    ask(engine, conversation)
    if leaves:
        for seed in range(3):
            ask(engine, prompt_of(10 + seed, 300))
    prefetch = engine.prefix_cache.prefetch
    prefetch.n_ready = looks = Mock(wraps=prefetch.n_ready)
    long = submit(engine, prompt_of(2, 64 * 50), 4)
    engine.step()
    longer = Prompt.from_ids(
        np.concatenate((conversation.tokens, prompt_of(3, 40).tokens)), conversation.boundaries
    )
    turn = submit(engine, longer, 4, sampling=ENDLESS)
    cold = submit(engine, prompt_of(4, 64 * 20), 4)
    assert steps_until_said(engine, turn) <= 3
    assert not any(isinstance(event, Piece) for event in long.drain())
    run_all(engine)
    assert collect(cold).error is None
    looked_at = [call.args[0] for call in looks.call_args_list]
    assert looked_at == [longer, cold.request.prompt]  # once each


def test_a_prompt_that_may_not_use_the_cache_counts_as_new() -> None:
    engine = engine_of(FakeBackend(n_ctx=8192, n_seqs=3))
    conversation = prompt_of(1, 64 * 20)
    ask(engine, conversation)
    long = submit(engine, prompt_of(2, 64 * 50), 1)
    engine.step()
    again = submit(engine, conversation, 1, cache_prompt=False)
    steps_until_said(engine, long)
    assert not any(isinstance(event, Piece) for event in again.drain())


def test_a_long_prompt_gets_every_second_batch_whatever_comes_beside_it() -> None:
    engine = engine_of(FakeBackend(n_ctx=8192, n_seqs=4))
    prompt = prompt_of(1, 64 * 20)
    long = submit(engine, prompt, 1)
    steps = 0
    seed = 2
    while not any(isinstance(event, Piece) for event in long.drain()):
        submit(engine, prompt_of(seed, 40), 1)
        engine.step()
        steps = steps + 1
        seed = seed + 1
    assert steps <= 2 * (len(batch_ends(prompt, 64)) + 2)


@pytest.mark.parametrize("n_steps", [0, 1, 3])
def test_of_equal_prompts_side_by_side_none_is_overtaken(n_steps: int) -> None:
    """Prompts of equal length start to reply in the order in which they came, at whatever distance
    they came.
    """
    engine = engine_of(FakeBackend(n_ctx=8192, n_seqs=8))
    order: list[int] = []

    def step() -> bool:
        is_busy = engine.step()
        said = [
            n
            for n, each in enumerate(handles)
            if any(isinstance(event, Piece) for event in each.drain())
        ]
        order.extend(n for n in said if n not in order)
        return is_busy

    handles = []
    for seed in range(8):
        handles.append(
            submit(engine, prompt_of(seed, 150), 60, sampling=ENDLESS)
        )  # the last batch is a short one
        for _ in range(n_steps):
            step()
    while step():
        pass
    assert order == list(range(8))


def test_a_long_queue_is_not_walked_for_each_token() -> None:
    engine = engine_of(FakeBackend(n_ctx=1024))
    for seed in range(50):
        submit(engine, prompt_of(seed, 30), 30, sampling=ENDLESS)
    looks: list[int] = []
    take_next = engine.waiting.take_next
    engine.waiting.take_next = lambda *args: (looks.append(1), take_next(*args))[1]
    n_steps = run_all(engine)
    assert n_steps > 50 * 28
    assert len(looks) <= 50 * 4


def test_the_queue_is_bounded() -> None:
    """A request above the bound fails at once and changes nothing for those that wait: they are
    served, and later ones again.
    """
    backend = FakeBackend(n_ctx=1024)
    engine = Engine(backend, RamCache(4, None), EngineSettings(n_queue=2))
    worker = Worker(engine, INFO)
    try:
        gate = threading.Event()
        begun = threading.Event()
        blocked = worker.call(lambda: (begun.set(), gate.wait(60)))
        assert begun.wait(60)
        handles = [worker.submit(request(prompt_of(seed, 30), 4)) for seed in range(3)]
        with pytest.raises(BusyError, match="3 requests are waiting"):
            worker.submit(request(prompt_of(9, 30)))
        gate.set()
        blocked.result(60)
        for handle in handles:
            assert not any(isinstance(event, Failed) for event in handle)
        assert [
            event
            for event in worker.submit(request(prompt_of(9, 30), 4))
            if isinstance(event, Failed)
        ] == []
    finally:
        worker.close()


def test_a_bad_grammar_is_refused_before_anything_is_evaluated_or_lost() -> None:
    backend = FakeBackend(n_ctx=1024)
    engine = engine_of(backend)
    conversation = prompt_of(1, 300)
    ask(engine, conversation)
    sampler = backend.sampler
    before = backend.n_evaluated

    backend.sampler = Mock(side_effect=RequestError("failed to parse grammar"))
    handle = submit(engine, prompt_of(2, 300), return_progress=True)
    run_all(engine)
    (event,) = handle.drain()
    assert isinstance(event, Failed), "nothing before it, so that a stream has not begun"
    assert not isinstance(event, Progress)
    assert backend.n_evaluated == before
    backend.sampler = sampler
    assert ask(engine, conversation).done.stats.source == "live"
