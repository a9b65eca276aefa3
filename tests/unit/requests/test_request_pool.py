"""The threads that read requests: each has a time limit, the pool is bounded, and shutdown does not
wait for them.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
from starlette.requests import ClientDisconnect, Request

from pyctl.errors import BusyError, RequestError, UnavailableError
from pyctl.requests import request_pool
from pyctl.requests.request_pool import Lane, PostReplyQueue, RequestPool
from tests.client import HI
from tests.unit.server.fake import Bench, play
from tests.unit.server.parts import in_loop
from tests.waiting import until


def request(left: asyncio.Event | None = None) -> Request:
    """Return a request whose client leaves with ``left``."""

    async def receive() -> dict[str, str]:
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http"}, receive)  # type: ignore[arg-type]


async def served(pool: Lane) -> str:
    """Return the result of a function that takes no time, as soon as the pool calls it."""
    while True:
        try:
            return await pool.run(request(), lambda: "served")
        except (BusyError, UnavailableError):
            await asyncio.sleep(0.01)


async def held(pool: Lane, end: threading.Event) -> asyncio.Future[bool]:
    """The run of a function that has begun, and lasts until ``end``."""
    begun = threading.Event()
    running = asyncio.ensure_future(pool.run(request(), lambda: begun.set() or end.wait(50)))  # type: ignore[func-returns-value]
    while not begun.is_set():
        await asyncio.sleep(0.01)
    return running


@in_loop
async def test_as_many_run_at_once_as_there_are_threads() -> None:
    """Also where one thread has nothing to do and two come at once: it takes one, and another
    thread the other.
    """
    pool = Lane(RequestPool(), 2)
    together = threading.Barrier(2)
    for _ in range(50):
        await pool.run(request(), lambda: None)
        await asyncio.gather(*(pool.run(request(), together.wait, 50) for _ in range(2)))


@in_loop
async def test_results_and_errors_come_back() -> None:
    pool = Lane(RequestPool())
    assert await pool.run(request(), lambda a, b: a + b, 1, b=2) == 3
    with pytest.raises(RequestError, match="no"):
        await pool.run(request(), fails, RequestError("no"))


def fails(error: Exception) -> None:
    raise error


@in_loop
async def test_work_that_takes_too_long_is_given_up_and_replaced() -> None:
    pool = Lane(RequestPool(), 1, max_seconds=0.2)
    end = threading.Event()
    for _ in range(3):
        with pytest.raises(UnavailableError, match="takes more than"):
            await pool.run(request(), end.wait, 50)
    assert await served(pool) == "served"
    end.set()


@in_loop
async def test_pool_is_clean_if_client_leaves_at_the_end() -> None:
    """The thread stops between telling the loop and what it does next, and the client leaves just
    then.
    """
    pool = Lane(RequestPool(), 16)
    go_on = threading.Event()
    tell = request_pool._Job.resolve

    def slow(job: Any, end: Any) -> None:
        tell(job, end)
        go_on.wait(50)

    with mock.patch.object(request_pool._Job, "resolve", slow):
        for _ in range(10):  # more than may be left behind
            assert await pool.run(request(), lambda: 1) == 1
    go_on.set()


@in_loop
async def test_too_many_that_take_too_long_are_refused_until_some_are_done() -> None:
    pool = Lane(RequestPool(), 2, max_seconds=0.05)
    end = threading.Event()
    errors: list[type[Exception]] = []
    while BusyError not in errors:  # one whose thread has not begun yet leaves nothing behind
        with pytest.raises(UnavailableError) as caught:
            await pool.run(request(), end.wait, 50)
        errors.append(caught.type)
    assert errors.count(UnavailableError) >= 8
    end.set()
    assert await served(pool) == "served"


@in_loop
async def test_no_more_wait_than_may_wait() -> None:
    pool = Lane(RequestPool(), 1, max_waiting=2)
    end = threading.Event()
    running = [await held(pool, end)]
    running += [asyncio.ensure_future(pool.run(request(), end.wait, 50)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(BusyError) as caught:
        await pool.run(request(), lambda: 1)
    assert caught.value.retry_seconds > 0
    end.set()
    assert await asyncio.gather(*running) == [True] * 3


@in_loop
async def test_who_hangs_up_leaves_his_place() -> None:
    pool = Lane(RequestPool(), 1)
    end = threading.Event()
    left = asyncio.Event()
    done: list[int] = []
    first = await held(pool, end)
    waiting = [asyncio.ensure_future(pool.run(request(left), done.append, i)) for i in range(20)]
    last = asyncio.ensure_future(pool.run(request(), lambda: "last"))
    await asyncio.sleep(0)
    left.set()
    for each in waiting:
        with pytest.raises(ClientDisconnect):
            await each
    end.set()
    assert await first is True
    assert await last == "last"
    assert not done


def test_the_process_ends_while_requests_are_read() -> None:
    code = """
import asyncio, threading
from tests.unit.requests.test_request_pool import held
from pyctl.requests.request_pool import Lane, RequestPool
async def main():
    task = await held(Lane(RequestPool()), threading.Event())
    task.cancel()
asyncio.run(main())
print("ended")
"""
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        ).stdout
        == "ended\n"
    )


def test_a_full_pool_is_503_with_a_time_to_try_again() -> None:
    bench = Bench(play("a"))
    bench.service.shared.pool.reading = Lane(RequestPool(), max_waiting=0)
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {"messages": HI},
        "/completion": {"prompt": "a"},
        "/v1/messages": {"messages": HI, "max_tokens": 3},
        "/v1/messages/count_tokens": {"messages": HI},
        "/v1/responses": {"input": "Hi"},
        "/tokenize": {"content": "a"},
        "/detokenize": {"tokens": [97]},
        "/apply-template": {"messages": HI},
    }
    for path, body in bodies.items():
        response = bench.post(path, body)
        assert response.status_code == 503, path
        assert response.headers.get("retry-after") == "5", path


def test_post_reply_queue_runs_in_order_and_ends_first(caplog: pytest.LogCaptureFixture) -> None:
    """Jobs after replies run one by one in order, a failure ends no other job, and the oldest are
    left out if too many wait. Closing waits for the one that runs and starts no other.
    """
    queue = PostReplyQueue(RequestPool(), close_seconds=60.0)
    done = list[int]()
    begun = threading.Event()
    go_on = threading.Event()

    def first() -> None:
        begun.set()
        go_on.wait(60)
        done.append(0)
        raise ValueError("broken")

    queue.add(first)
    assert begun.wait(60)
    for number in range(1, 20):
        queue.add(lambda number=number: done.append(number))  # type: ignore[misc]
    go_on.set()
    until(lambda: len(done) == 17)
    assert done == [0, *range(4, 20)], "the oldest that waited were left out"
    assert "broken" in caplog.text

    go_on.clear()
    begun.clear()
    queue.add(first)
    queue.add(lambda: done.append(99))
    assert begun.wait(60)

    def let_it_go_on() -> None:
        while not queue.is_closed:  # else what waits behind it would still begin
            time.sleep(0.001)
        go_on.set()

    threading.Thread(target=let_it_go_on).start()
    queue.close()
    queue.add(lambda: done.append(99))
    assert done[17:] == [0], "what ran has ended, and nothing else begins"


def test_threads_end_when_there_is_nothing_to_do() -> None:
    rests: list[int] = []
    pool = RequestPool(lambda: rests.append(pool.n_alive), idle_seconds=0.05)
    lane = Lane(pool, 3)

    async def three_at_once() -> None:
        together = threading.Barrier(3)
        await asyncio.gather(*(lane.run(request(), together.wait, 60) for _ in range(3)))

    asyncio.run(three_at_once())
    end = time.monotonic() + 30
    while not rests and time.monotonic() < end:
        time.sleep(0.01)
    assert rests == [0], "the last one says so"


@in_loop
async def test_one_kind_of_work_leaves_the_others_their_threads() -> None:
    threads = RequestPool()
    end = threading.Event()
    full = Lane(threads, 2)
    stuck = [asyncio.ensure_future(full.run(request(), end.wait, 50)) for _ in range(6)]
    while full.n_running < 2:
        await asyncio.sleep(0.01)
    together = threading.Barrier(3)
    await asyncio.gather(*(Lane(threads, 1).run(request(), together.wait, 50) for _ in range(3)))
    done = threading.Event()
    PostReplyQueue(threads).add(done.set)
    assert done.wait(50)
    assert threads.n_alive <= 6
    end.set()
    assert await asyncio.gather(*stuck) == [True] * 6


class Body:
    """Something that can be seen to be gone."""


@in_loop
async def test_nothing_of_a_refused_request_stays() -> None:
    """The body of a refused request is freed at once and not by the cycle collector, because a body
    can have tens of megabytes.
    """
    body = Body()
    pool = Lane(RequestPool(), 1)
    seen = weakref.ref(body)

    def refuse(body: Body) -> None:
        raise RequestError(str(body))

    gc.disable()
    try:
        with pytest.raises(RequestError):
            await pool.run(request(), refuse, body)
        del body
        end = time.monotonic() + 30
        while seen() is not None and time.monotonic() < end:
            await asyncio.sleep(0.01)
        assert seen() is None, "it waits for the collector, tens of megabytes each"
    finally:
        gc.enable()
