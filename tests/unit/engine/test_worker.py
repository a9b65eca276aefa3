"""The engine's thread: sleeping, waking, and the cache meanwhile."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest

from pyctl.engine.idle import IDLE_SECONDS, PREPARE_SECONDS
from pyctl.engine.request import Done, Failed, Piece, Request
from pyctl.errors import ModelError, UnavailableError
from pyctl.prompt import Prompt, as_tokens
from tests.unit.engine.drive import request
from tests.unit.engine.watched_worker import PROMPT, SLEEP_SECONDS, result
from tests.waiting import until


def test_an_idle_engine_sleeps_and_resumes_from_the_cache(make: Any) -> None:
    awake = make(exact=True)
    bench = make(SLEEP_SECONDS, exact=True)
    first = bench.ask(PROMPT)
    bench.fall_asleep()
    assert bench.backend.closed
    longer = Prompt.from_ids([*PROMPT.tokens, *first.tokens[:-1], 7, 8, 9], [100, 290, 305])
    closed = []
    decode = bench.backend.decode
    bench.backend.decode = lambda items: (closed.append(bench.backend.closed), decode(items))
    warm = bench.ask(longer)
    assert warm.stats.source == "ram"
    assert warm.stats.n_cached == 290
    assert set(closed) == {False}
    assert awake.ask(PROMPT).tokens == first.tokens
    assert awake.ask(longer).tokens == warm.tokens
    bench.fall_asleep()  # and again


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


def test_it_serves_until_the_last_event_of_a_request(make: Any) -> None:
    bench = make()
    assert not bench.worker.is_serving
    is_due = threading.Event()
    decode = bench.backend.decode
    bench.backend.decode = lambda items: (is_due.wait(60), decode(items))
    handle = bench.worker.submit(request(PROMPT))
    assert bench.worker.is_serving
    is_due.set()
    list(handle)
    assert not bench.worker.is_serving


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


def test_an_empty_prompt_gets_an_empty_reply(make: Any) -> None:
    served = make().ask(Prompt.from_ids([]))
    assert served.tokens == []
    assert served.stats.n_prompt == 0


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
    bench.ask(Prompt.from_ids([1 + i % 59 for i in range(300)], [100, 290]))
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
        made = bench.worker.submit(
            Request(Prompt.from_ids(tokens, [40]), max_tokens=0, background=True)
        )
        n_ready += sum(isinstance(event, Done) for event in made)
        bench.advance(IDLE_SECONDS / 4)
    assert n_ready > 1


# -- preparing
# ----------------------------------------------------------------------------------


def test_an_idle_engine_loads_kernels(make: Any) -> None:
    bench = make(is_async=True)
    assert bench.backend.n_evaluated == 0, "not before it can answer"
    bench.advance(PREPARE_SECONDS)
    until(lambda: not bench.engine.needs_warm_up)
    assert bench.backend.n_evaluated == bench.backend.facts.n_ubatch
    assert bench.ask(PROMPT).stats.n_evaluated == 300


def test_a_request_that_arrives_at_once_waits_for_no_preparation(make: Any) -> None:
    bench = make(is_async=True)
    bench.ask(PROMPT, 1)
    bench.advance(PREPARE_SECONDS)
    result(bench.worker.call(lambda: None))
    assert bench.backend.n_evaluated == 300, "the prompt has loaded the kernels"
    assert not bench.engine.needs_warm_up, "a sequence holds the conversation"


def test_a_request_preempts_the_preparation(make: Any) -> None:
    """A request interrupts the evaluation that loads kernels, which is not repeated: one batch of
    the preparation and the prompt are evaluated, nothing else.
    """
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


def test_an_idle_worker_checks_its_cache_by_the_clock(make: Any) -> None:
    bench = make(exact=True)
    bench.ask(PROMPT)
    bench.advance(bench.engine.settings.canary_interval / 2)
    assert not result(bench.admin.canary()).verified, "it is not due"
    bench.advance(bench.engine.settings.canary_interval / 2)
    until(lambda: sum(result(bench.admin.canary()).verified.values()) == 1)
    again = bench.ask(PROMPT)
    assert again.stats.n_evaluated == 0, "the check took nothing"


def test_a_request_goes_before_a_check(make: Any) -> None:
    """A request that arrives while a check evaluates preempts it, and the check counts as
    interrupted.
    """
    bench = make(exact=True)
    first = bench.ask(PROMPT)
    evaluate = bench.backend.evaluate
    is_here = threading.Event()
    may_go_on = threading.Event()

    def wait_in_the_check(*args: Any, **options: Any) -> None:
        if bench.backend.is_preemptible:
            is_here.set()
            assert may_go_on.wait(60)
        evaluate(*args, **options)

    bench.backend.evaluate = wait_in_the_check
    bench.advance(bench.engine.settings.canary_interval)
    assert is_here.wait(60)
    handle = bench.worker.submit(request(PROMPT))
    may_go_on.set()
    assert [token for event in handle if isinstance(event, Piece) for token in event.tokens] == (
        first.tokens
    )
    view = result(bench.admin.canary())
    assert view.interrupted == 1
    assert not view.differing
    assert not view.skipped


def test_a_sleeping_worker_checks_nothing(make: Any) -> None:
    bench = make(SLEEP_SECONDS, exact=True)
    bench.ask(PROMPT)
    bench.fall_asleep()
    bench.advance(2 * bench.engine.settings.canary_interval)
    assert not result(bench.admin.canary()).verified
    assert bench.worker.is_sleeping
