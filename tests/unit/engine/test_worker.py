"""The engine's thread: sleeping, waking, and the cache meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.ram import RamCache
from pyctl.engine.admin import EngineAdmin
from pyctl.engine.backend import SequenceTokens
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.handle import RequestHandle
from pyctl.engine.idle import IDLE_SECONDS, PREPARE_SECONDS
from pyctl.engine.request import Done, Failed, Piece, Request
from pyctl.engine.sampling import Sampling
from pyctl.engine.worker import Worker
from pyctl.errors import ModelError, RequestError, UnavailableError
from pyctl.prompt import Prompt, as_tokens
from tests.fake import FakeBackend
from tests.unit.engine.drive import ManualClock, request
from tests.unit.server.fake import INFO
from tests.waiting import until

PROMPT = Prompt.of([1 + i % 60 for i in range(300)], [100, 290])

SLEEP_SECONDS = 60.0

ENDLESS = Sampling(temperature=0.0, ignore_eos=True)


@dataclass
class WorkerReply:
    tokens: list[int]
    stats: RequestStats


class WatchedWorker:
    """A worker on a fake backend, with everything that looks into it."""

    def __init__(
        self,
        sleep_seconds: float = -1,
        n_seqs: int = 1,
        exact: bool = False,
        is_async: bool = False,
    ) -> None:
        self.backend = FakeBackend("hybrid", n_seqs=n_seqs)
        self.backend.facts = replace(self.backend.facts, is_async=is_async)
        self.clock = ManualClock()
        self.engine = Engine(
            self.backend, RamCache(8, None), EngineSettings(exact=exact), clock=self.clock
        )
        self.worker = Worker(self.engine, INFO, sleep_seconds)
        self.admin = EngineAdmin(self.worker, self.engine)

    def ask(self, prompt: Prompt, n: int = 8) -> WorkerReply:
        tokens: list[int] = []
        for event in self.worker.submit(request(prompt, n)):
            if isinstance(event, Piece):
                tokens += event.tokens
            elif isinstance(event, Done):
                return WorkerReply(tokens, event.stats)
            else:
                assert not isinstance(event, Failed), event.error
        raise AssertionError("no end")

    def begin(self, n: int = 3000) -> RequestHandle:
        """Begin a reply of ``n`` tokens, one for each call or cancellation, so that it cannot end
        before a slow test looks at it.
        """
        decode = self.backend.decode
        inbox = self.worker._inbox
        running = self.engine.running
        call = self.worker.call
        looks = threading.Semaphore(0)

        def look(*args: Any, **kwargs: Any) -> Future[Any]:
            future = call(*args, **kwargs)
            looks.release()
            return future

        def when_looked_at(items: Sequence[SequenceTokens]) -> None:
            while not looks.acquire(timeout=0.001) and not any(
                active.handle.cancelled for active in running
            ):
                if not inbox.empty():
                    break
            decode(items)

        self.backend.decode = when_looked_at
        self.worker.call = look
        return self.worker.submit(request(PROMPT, n, sampling=ENDLESS))

    def advance(self, seconds: float) -> None:
        """Let time pass behind all that the worker has done."""
        result(self.worker.call(lambda: self.clock.advance(seconds)))

    def fall_asleep(self) -> None:
        self.advance(SLEEP_SECONDS)
        until(lambda: self.worker.is_sleeping)


@pytest.fixture
def make() -> Any:
    benches: list[WatchedWorker] = []

    def build(*args: Any, **kwargs: Any) -> WatchedWorker:
        benches.append(WatchedWorker(*args, **kwargs))
        return benches[-1]

    yield build
    for bench in benches:
        bench.worker.close()


def result(future: Future[Any]) -> Any:
    return future.result(timeout=60)


def test_an_idle_engine_sleeps_and_resumes_from_the_cache(make: Any) -> None:
    awake = make(exact=True)
    bench = make(SLEEP_SECONDS, exact=True)
    first = bench.ask(PROMPT)
    bench.fall_asleep()
    assert bench.backend.closed
    longer = Prompt.of([*PROMPT.tokens, *first.tokens[:-1], 7, 8, 9], [100, 290, 305])
    closed = []
    decode = bench.backend.decode
    bench.backend.decode = lambda items: (closed.append(bench.backend.closed), decode(items))
    warm = bench.ask(longer)
    assert (warm.stats.source, warm.stats.n_cached) == ("ram", 290)
    assert set(closed) == {False}
    assert awake.ask(PROMPT).tokens == first.tokens
    assert awake.ask(longer).tokens == warm.tokens
    bench.fall_asleep()  # and again


def test_a_running_request_is_stopped_by_its_id(make: Any) -> None:
    bench = make()
    handle = bench.begin()

    def task() -> int:
        (live,) = result(bench.admin.view()).live
        return int(live.task)

    until(lambda: task() >= 0)
    running = task()
    assert not result(bench.admin.stop(running + 1))
    assert result(bench.admin.stop(running))
    last = list(handle)[-1]
    assert isinstance(last, Failed)
    assert "stopped from the cache view" in str(last.error)
    until(lambda: task() == -1)
    assert not result(bench.admin.stop(running))


def test_only_work_wakes_it(make: Any) -> None:
    bench = make(SLEEP_SECONDS)
    bench.fall_asleep()
    result(bench.admin.stats())
    result(bench.admin.sequences())
    result(bench.admin.view())
    assert bench.worker.is_sleeping
    assert result(bench.admin.embed(as_tokens([3, 4]))).tolist() == [[7.0, 2.0]]


def test_looking_does_not_keep_it_awake(make: Any) -> None:
    bench = make(SLEEP_SECONDS)
    for _ in range(3):
        bench.advance(SLEEP_SECONDS / 4)
        result(bench.admin.stats())
        assert not bench.worker.is_sleeping
    bench.advance(SLEEP_SECONDS / 4)
    until(lambda: bench.worker.is_sleeping)


def test_it_sleeps_on_when_it_cannot_be_woken(make: Any) -> None:
    bench = make(SLEEP_SECONDS)
    bench.fall_asleep()
    works = bench.backend.load

    bench.backend.load = Mock(side_effect=ModelError("no memory"))
    (event,) = list(bench.worker.submit(request(PROMPT)))
    assert isinstance(event, Failed)
    assert isinstance(event.error, UnavailableError)
    assert "no memory" in str(event.error)
    with pytest.raises(UnavailableError, match="no memory"):
        result(bench.admin.erase(0))
    assert bench.worker.is_sleeping
    bench.backend.load = works
    assert len(bench.ask(PROMPT).tokens) == 8


def test_a_sleeping_engine_closes(make: Any) -> None:
    bench = make(SLEEP_SECONDS)
    bench.fall_asleep()
    assert bench.worker.close()
    with pytest.raises(UnavailableError):
        bench.worker.submit(request(PROMPT))


def test_slots_show_the_request_that_they_serve(make: Any) -> None:
    bench = make(n_seqs=2)
    assert [view.task for view in result(bench.admin.sequences())] == [-1, -1]
    handle = bench.begin()
    until(lambda: any(view.n_predicted > 5 for view in result(bench.admin.sequences())))
    (view,) = [view for view in result(bench.admin.sequences(with_tokens=True)) if view.busy]
    assert view.prompt == tuple(PROMPT.tokens.tolist())
    assert view.n_evaluated == 300
    assert view.n_tokens == 300 + len(view.reply)
    assert view.n_predicted == len(view.reply) + 1
    stats = result(bench.admin.stats())
    assert (stats.n_processing, stats.n_waiting) == (1, 0)
    handle.cancel()
    until(lambda: not any(view.busy for view in result(bench.admin.sequences())))


def test_the_counters_count_what_was_served(make: Any) -> None:
    bench = make()
    bench.ask(PROMPT, 8)
    total = result(bench.admin.stats()).total
    assert (total.n_evaluated, total.n_cached, total.n_predicted) == (300, 0, 8)
    assert total.n_longest == 307
    assert total.n_calls == total.n_busy > 8
    again = bench.ask(PROMPT, 8).stats
    stats = result(bench.admin.stats())
    assert stats.recent.n_cached == again.n_cached > 0
    assert stats.total.n_evaluated == 300 + again.n_evaluated == 300 + stats.recent.n_evaluated


def test_a_slot_is_saved_erased_and_restored(make: Any, tmp_path: Path) -> None:
    bench = make()
    other = make()
    first = bench.ask(PROMPT)
    path = tmp_path / "a.bin"
    saved = result(bench.admin.save(0, path))
    assert (saved.n_tokens, saved.n_bytes) == (307, path.stat().st_size)
    assert result(bench.admin.erase(5)) == 307  # numbers wrap around
    assert result(bench.admin.erase(0)) == 0
    assert result(other.admin.restore(0, path)).n_tokens == 307
    longer = Prompt.of([*PROMPT.tokens, *first.tokens[:-1], 7, 8, 9])
    reply = other.ask(longer)
    assert (reply.stats.source, reply.stats.n_cached) == ("live", 307)
    bench.ask(PROMPT)
    assert bench.ask(longer).tokens == reply.tokens


def test_a_file_that_is_no_slot(make: Any, tmp_path: Path) -> None:
    bench = make()
    bench.ask(PROMPT)
    (tmp_path / "bad").write_bytes(bytes(64))
    for name in ("bad", "missing"):
        with pytest.raises(RequestError, match="Unable to restore slot"):
            result(bench.admin.restore(0, tmp_path / name))
    warm = bench.ask(PROMPT)
    assert warm.stats.source == "ram", "the conversation that was there went to the cache"


def test_a_busy_slot_is_saved_when_it_is_free(make: Any, tmp_path: Path) -> None:
    bench = make()
    handle = bench.begin()
    until(lambda: result(bench.admin.sequences())[0].n_predicted > 0)
    future = bench.admin.save(0, tmp_path / "a.bin")
    result(bench.worker.call(lambda: None))
    assert not future.done()
    handle.cancel()
    assert result(future).n_tokens >= 300


def test_closing_ends_what_waits_for_a_slot(make: Any, tmp_path: Path) -> None:
    bench = make()
    bench.begin()
    until(lambda: result(bench.admin.sequences())[0].n_predicted > 0)
    future = bench.admin.save(0, tmp_path / "a.bin")
    result(bench.worker.call(lambda: None))
    bench.worker.close()
    with pytest.raises(UnavailableError):
        result(future)


def test_an_empty_prompt_gets_an_empty_reply(make: Any) -> None:
    served = make().ask(Prompt.of([]))
    assert (served.tokens, served.stats.n_prompt) == ([], 0)


def test_an_idle_moment_copies_what_only_the_device_has(make: Any) -> None:
    """An idle moment copies rows as far as there is room, so that giving their cells to others
    costs nothing.
    """
    bench = make()
    cache = bench.engine.prefix_cache.cache

    def rows() -> list[int]:
        return result(
            bench.worker.call(lambda: [segment.rows.nbytes for segment in cache.segments()])
        )

    bench.ask(PROMPT)
    assert not all(rows())
    until(lambda: bench.advance(IDLE_SECONDS) or all(rows()))
    full = result(bench.admin.stats())
    assert full.device.kept > 0
    cache.budget.limit = full.cache.n_bytes  # nothing is free from now on
    bench.ask(Prompt.of([1 + i % 59 for i in range(300)], [100, 290]))
    bench.advance(IDLE_SECONDS)
    after = result(bench.admin.stats())
    assert after.n_cells_held > 0
    assert after.cache.n_bytes <= cache.budget.limit


def test_going_ahead_does_not_keep_rows_from_being_copied(make: Any) -> None:
    """Rows are copied even while prompts are made ready one after the other, without an idle moment
    between them.
    """
    bench = make()
    write_back = bench.engine.prefix_cache.write_back
    write_back.copy_next = copied = Mock(wraps=write_back.copy_next)
    bench.ask(PROMPT)
    n_ready = 0
    while not copied.called:
        tokens = as_tokens([1 + (i + n_ready) % 59 for i in range(100)])
        made = bench.worker.submit(Request(Prompt.of(tokens, [40]), max_tokens=0, background=True))
        n_ready += sum(isinstance(event, Done) for event in made)
        bench.advance(IDLE_SECONDS / 4)
    assert n_ready > 1


# -- preparing
# ----------------------------------------------------------------------------------


def test_an_idle_engine_loads_kernels(make: Any) -> None:
    bench = make(is_async=True)
    assert bench.backend.n_evaluated == 0, "not before it can answer"
    bench.advance(PREPARE_SECONDS)
    until(lambda: not bench.engine.can_prepare)
    assert bench.backend.n_evaluated == bench.backend.facts.n_ubatch
    assert bench.ask(PROMPT).stats.n_evaluated == 300


def test_a_request_that_arrives_at_once_waits_for_no_preparation(make: Any) -> None:
    bench = make(is_async=True)
    bench.ask(PROMPT, 1)
    bench.advance(PREPARE_SECONDS)
    result(bench.worker.call(lambda: None))
    assert bench.backend.n_evaluated == 300, "the prompt has loaded the kernels"
    assert not bench.engine.can_prepare, "a sequence holds the conversation"


def test_a_request_preempts_the_preparation(make: Any) -> None:
    bench = make(is_async=True)
    evaluate = bench.backend.evaluate
    waiting = threading.Event()

    def stand(*given: Any, **named: Any) -> None:
        waiting.set()
        until(lambda: bench.backend.is_preempt_wanted)
        bench.backend.evaluate = evaluate
        evaluate(*given, **named)  # raises PreemptedError

    bench.backend.evaluate = stand
    bench.advance(PREPARE_SECONDS)
    assert waiting.wait(60)
    assert (
        bench.ask(PROMPT, 1).stats.n_evaluated
        == bench.backend.n_evaluated - bench.backend.facts.n_ubatch
        == 300
    )
    assert not bench.backend.is_preemptible
