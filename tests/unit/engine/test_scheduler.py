"""Several sequences in one pool of cells: which request waits, and which is suspended. That no
reply changes, whatever prompts, cancels and sequences there are, is a property in
draft/test_drafted_replies.py.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from pyctl.cache.costs import Costs
from pyctl.cache.lookup import CacheLookup
from pyctl.cache.ram import RamCache
from pyctl.cache.reads import Reading, finished
from pyctl.cache.sequence import LiveSequence
from pyctl.disk.readers import DiskReads, Readers
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.request import Failed
from pyctl.engine.worker import Worker, WorkerTimes
from pyctl.errors import OutOfCellsError, RequestError, StateError
from tests.fake import FakeBackend
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.drive import (
    ManualClock,
    ask,
    collect,
    engine_of,
    request,
    run_all,
)
from tests.unit.engine.scheduling import (
    ENDLESS,
    KINDS,
    alone,
    check_at_rest,
    prompt_of,
    submit,
)
from tests.unit.server.fake import INFO


def test_the_least_recently_used_leaves_first_and_no_more_than_needed() -> None:
    backend = FakeBackend(n_ctx=1024, n_seqs=4)
    engine = engine_of(backend, clear_idle=False)
    for seed in (1, 2, 3):
        ask(engine, prompt_of(seed, 300))
    ask(engine, prompt_of(4, 400))
    held = {seq.n >= 300 for seq in engine.sequences}
    assert held == {True, False}
    assert ask(engine, prompt_of(3, 300)).done.stats.source == "live"
    assert ask(engine, prompt_of(1, 300)).done.stats.source == "ram"


@pytest.mark.parametrize("kind", KINDS)
def test_two_that_do_not_fit_side_by_side_come_one_after_the_other(kind: str) -> None:
    backend = FakeBackend(kind, n_ctx=1024, n_seqs=2)
    engine = engine_of(backend)
    prompts = [prompt_of(seed, 600) for seed in (1, 2)]
    handles = [submit(engine, prompt, 40) for prompt in prompts]
    run_all(engine)
    for prompt, handle in zip(prompts, handles, strict=True):
        assert collect(handle).tokens == alone(prompt, 40, kind).tokens
    check_at_rest(engine, backend)
    assert engine.counters.n_suspended == 0, "it was known before"


def test_the_oldest_reply_never_waits() -> None:
    backend = FakeBackend(n_ctx=1024, n_seqs=3)
    engine = engine_of(backend)
    first = submit(engine, prompt_of(1, 100), -1, sampling=ENDLESS)
    engine.step()
    for seed in (2, 3):
        submit(engine, prompt_of(seed, 100), -1, sampling=ENDLESS)
    while engine.step():
        assert first.is_over or first in [active.handle for active in engine.running]
    assert engine.counters.n_suspended > 0


def test_a_prefill_that_gives_way_is_continued_where_it_was() -> None:
    """A suspended prefill goes on where it stopped: no batch is evaluated twice, and both replies
    are those of a request alone.
    """
    backend = FakeBackend(n_ctx=1024, n_seqs=2)
    engine = engine_of(backend)
    old = submit(engine, prompt_of(1, 300), 400, sampling=ENDLESS)
    while not engine.counters.n_calls > 10:
        engine.step()
    # It fits beside the first and its reserve, but not beside all that the first will say while it
    # is being read.
    young_prompt = prompt_of(2, 64 * 6)
    young = submit(engine, young_prompt, 8)
    engine.step()
    (active,) = (active for active in engine.running if active.handle is young)
    assert active.stats is not None
    engine.scheduler.suspend(active)
    assert engine.waiting.suspended == [active]
    before = backend.n_evaluated
    run_all(engine)
    assert collect(young).tokens == alone(young_prompt, 8).tokens
    assert collect(old).tokens == alone(prompt_of(1, 300), 400, sampling=ENDLESS).tokens
    assert backend.n_evaluated - before < 400 + 384 + 8, "no batch was evaluated twice"
    check_at_rest(engine, backend)


def test_a_prompt_keeps_its_cells_between_its_batches() -> None:
    engine = engine_of(FakeBackend(n_ctx=1024, n_seqs=2))
    handle = submit(engine, prompt_of(1, 300))
    engine.step()
    (seq,) = (seq for seq in engine.sequences if seq.n)
    n = seq.n
    assert n < 300
    assert not engine.cells.make_room(engine.cells.n_cells)
    assert seq.n == n
    run_all(engine)
    assert collect(handle).tokens == alone(prompt_of(1, 300), 8).tokens


def test_no_room_is_no_bad_snapshot() -> None:
    """Even when the count of cells and the context disagree, nothing is dropped and nothing
    fails.
    """
    backend = FakeBackend(n_ctx=1024, n_seqs=2)
    engine = engine_of(backend)
    first = prompt_of(1, 500)
    second = prompt_of(2, 500)
    ask(engine, first)
    ask(engine, second)
    kept = engine.prefix_cache.cache.snapshots()
    restore = backend.restore
    backend.restore = Mock(side_effect=OutOfCellsError)
    reply = ask(engine, first)
    assert backend.restore.called
    assert reply.tokens == alone(first, 8).tokens
    assert set(kept) <= set(engine.prefix_cache.cache.snapshots())
    assert engine.prefix_cache.totals.failed_restores == 0
    backend.restore = restore
    check_at_rest(engine, backend)


def test_a_suspended_reply_that_is_cancelled_frees_everything() -> None:
    """A client that leaves while its reply is suspended gives back the sampler and the retained
    snapshot at once, not when cells become free.
    """
    backend = FakeBackend(n_ctx=1024, n_seqs=2)
    engine = Engine(
        backend, RamCache(32, None), EngineSettings(), clock=ManualClock()
    )  # it ends without a wait
    closed = list[object]()
    make = backend.sampler

    def sampler(*args: Any) -> Any:
        made = make(*args)
        made.close = lambda: closed.append(made)
        return made

    backend.sampler = sampler
    handles = [submit(engine, prompt_of(seed, 100), -1, sampling=ENDLESS) for seed in (1, 2)]
    while not engine.waiting.suspended:
        assert engine.step()
    cache = engine.prefix_cache.cache
    check_invariants(cache)
    assert cache.index.retained
    handles[1].cancel()
    engine.step()
    assert cache.index.retained == []
    assert engine.waiting.suspended == []
    assert len(closed) == 1
    handles[0].cancel()
    run_all(engine)
    check_at_rest(engine, backend)


def test_closing_ends_every_request() -> None:
    """Closing ends requests that run, that wait, and that are suspended."""
    engine = engine_of(FakeBackend(n_ctx=1024, n_seqs=2))
    handles = [submit(engine, prompt_of(seed, 100), -1, sampling=ENDLESS) for seed in (1, 2, 3)]
    while not engine.waiting.suspended:
        engine.step()
    engine.close(RequestError("bye"))
    assert [str(collect(handle).error) for handle in handles] == ["bye"] * 3
    assert engine.prefix_cache.cache.index.retained == []
    assert not engine.step()


def test_a_suspended_reply_keeps_its_rows_whatever_the_cache_evicts() -> None:
    backend = FakeBackend(n_ctx=1024, n_seqs=2)
    engine = engine_of(backend, n_slots=2, budget=30_000)
    handles = [submit(engine, prompt_of(seed, 120), -1, sampling=ENDLESS) for seed in (1, 2)]
    while not engine.waiting.suspended:
        engine.step()
    engine.prefix_cache.cache.clear()
    check_invariants(engine.prefix_cache.cache)
    run_all(engine)
    for seed, handle in enumerate(handles, 1):
        assert collect(handle).tokens == alone(prompt_of(seed, 120), -1, sampling=ENDLESS).tokens
    check_at_rest(engine, backend)


def test_a_state_that_cannot_be_given_back_fails_its_reply_only() -> None:
    backend = FakeBackend(n_ctx=1024, n_seqs=2)
    engine = engine_of(backend)
    handles = [submit(engine, prompt_of(seed, 100), -1, sampling=ENDLESS) for seed in (1, 2)]
    while not engine.waiting.suspended:
        engine.step()
    backend.fail_loads = 1
    run_all(engine)
    assert collect(handles[0]).tokens == alone(prompt_of(1, 100), -1, sampling=ENDLESS).tokens
    assert isinstance(collect(handles[1]).error, StateError)
    check_at_rest(engine, backend)


def test_who_is_served_alone_has_the_context_to_itself() -> None:
    """A request served alone has the context to itself: a model's results depend on the places of
    its rows in the context, and on the rows beside them.
    """
    backend = FakeBackend(n_ctx=1024, n_seqs=4)
    engine = engine_of(backend, exact=True)
    seen: list[int] = []
    evaluate = backend.evaluate

    def spied(seq: int, *args: object, **kwargs: object) -> None:
        seen.append(
            sum(len(held.rows) for number, held in enumerate(backend.seqs) if number != seq)
        )
        evaluate(seq, *args, **kwargs)

    backend.evaluate = spied
    for seed in (1, 2, 3, 1, 2, 3):
        ask(engine, prompt_of(seed, 200))
    assert set(seen) == {0}


def test_a_share_for_each_lets_all_run_side_by_side() -> None:
    backend = FakeBackend(n_ctx=256, n_cells=1024, n_seqs=4)
    engine = engine_of(backend)
    handles = [submit(engine, prompt_of(seed, 200), -1, sampling=ENDLESS) for seed in range(4)]
    engine.step()
    assert len(engine.running) == 4
    run_all(engine)
    assert engine.counters.n_suspended == 0
    for seed, handle in enumerate(handles):
        assert (
            collect(handle).tokens
            == alone(prompt_of(seed, 200), -1, n_ctx=256, sampling=ENDLESS).tokens
        )


def test_saving_a_sequence_after_its_request_was_moved() -> None:
    """The number counts when it is done, not the object that had the number when it was asked."""
    backend = FakeBackend(n_ctx=1024, n_seqs=2)
    engine = engine_of(backend)
    # Nothing changes behind the last step.
    worker = Worker(engine, INFO, times=WorkerTimes(copy=3600.0))
    try:
        admin = EngineAdmin(worker, engine)
        asked = threading.Event()
        worker.call(lambda: asked.wait(60))
        handles = [
            worker.submit(request(prompt_of(seed, 100), -1, sampling=ENDLESS)) for seed in (1, 2)
        ]
        begun = worker.call(lambda: (engine.step(), len(engine.running))[1])
        erased = [admin.erase(seq) for seq in (0, 1)]
        asked.set()
        assert begun.result(60) == 2
        for handle in handles:
            assert not any(isinstance(event, Failed) for event in handle)
        assert all(future.result(60) >= 0 for future in erased)
        stats = admin.stats().result(60)
        assert stats.total.n_suspended > 0
        assert stats.n_suspended == 0
        assert stats.suspended_bytes == 0
        assert stats.n_cells == 1024
        assert stats.n_cells_used == sum(seq.n for seq in engine.sequences)
        assert stats.n_cells_held == backend.n_held_cells
        assert stats.device == engine.prefix_cache.device.counts
        assert stats.device.kept > 0
    finally:
        worker.close()


@pytest.mark.parametrize("begun", [False, True])
def test_a_restore_that_waits_for_the_disk_gives_way_and_begins_again(begun: bool) -> None:
    """Half of its rows may be there already: nothing of that may be taken for the whole."""
    backend = FakeBackend(n_ctx=1024, n_seqs=2)
    engine = engine_of(backend)
    old = submit(engine, prompt_of(1, 300), 500, sampling=ENDLESS)
    engine.step()
    restore = engine.prefix_cache.restore
    readers = Readers(1, "test")
    disk: Future[None] = Future()

    def slow(lookup: CacheLookup, seq: LiveSequence, *args: Any) -> Reading[Any]:
        if not disk.done():
            try:
                if begun:
                    engine.prefix_cache.forget(seq)
                    backend.evaluate(seq.id, lookup.match.tokens[:60], 0)
                    seq.n_expected = 400
                yield from finished(DiskReads([disk], readers, float("inf")))
            except GeneratorExit:
                seq.n_expected = 0
                engine.prefix_cache.forget(seq)
                raise
        return (yield from restore(lookup, seq, *args))

    engine.prefix_cache.restore = slow  # type: ignore[assignment]
    young = submit(engine, prompt_of(2, 400), 30)
    while not engine.waiting.queue or len(engine.running) == 2:
        assert engine.step()
    assert [active.handle for active in engine.running] == [old], (
        "it gave its cells to the older one"
    )
    assert [len(held.rows) for held in backend.seqs] == [seq.n for seq in engine.sequences]
    disk.set_result(None)
    run_all(engine)
    assert collect(old).tokens == alone(prompt_of(1, 300), 500, sampling=ENDLESS).tokens
    assert collect(young).tokens == alone(prompt_of(2, 400), 30).tokens
    check_at_rest(engine, backend)


class NotedCosts(Costs):
    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[int, int]] = []

    def record_evaluated(self, first: int, last: int, seconds: float) -> None:
        super().record_evaluated(first, last, seconds)
        self.noted.append((first, last))


@pytest.mark.parametrize("is_async", [False, True])
def test_only_prompts_that_are_evaluated_alone_say_what_tokens_cost(is_async: bool) -> None:
    backend = FakeBackend(n_ctx=4096, n_seqs=2, n_ubatch=64)
    backend.facts = replace(backend.facts, is_async=is_async)
    engine = engine_of(backend)
    costs = engine.prefix_cache.cache.costs = NotedCosts()
    first, *others = (prompt_of(seed, 300) for seed in (1, 2, 3))
    ask(engine, first)
    assert [0 < last <= 300 for _, last in costs.noted] == [True]
    assert costs.noted[0][0] == 0
    assert (costs.noted[0][1] == 300) == (not is_async), (
        "a device is still at work on the last batch"
    )
    for prompt in others:
        submit(engine, prompt)
    run_all(engine)
    assert len(costs.noted) == 1
