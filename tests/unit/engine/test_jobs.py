"""Jobs of other threads: their results, and reads while the engine's thread waits, never while it
is at work.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

import pytest

from pyctl.engine.jobs import Job, StateReads


def queued(reads: StateReads, function: Any = lambda: 1) -> Future[Any]:
    job = Job(function)
    reads.add(job)
    reads.run()
    return job.future


def test_a_read_waits_until_the_owner_waits() -> None:
    reads = StateReads()
    first = queued(reads)
    assert not first.done()
    with reads.allowed():
        assert first.result(0) == 1
        assert queued(reads).result(0) == 1
        assert queued(reads, lambda: reads.is_evaluating).result(0)
    assert not queued(reads).done()
    with reads.allowed(evaluating=False):
        assert not queued(reads, lambda: reads.is_evaluating).result(0)


def test_the_owner_goes_on_after_a_read_that_has_begun() -> None:
    """The block ends as soon as the read that has begun is over, so that the engine never changes
    memory beside a read. A read that is queued meanwhile runs in the next block at the latest.
    """
    reads = StateReads()
    begun = threading.Event()
    go_on = threading.Event()
    order = []

    def slow() -> None:
        begun.set()
        assert go_on.wait(60)
        order.append("read")

    with reads.allowed():
        reader = threading.Thread(target=queued, args=(reads, slow))
        reader.start()
        assert begun.wait(60)
        late = queued(reads, lambda: order.append("late"))
        assert not late.done(), "one read at a time"
        threading.Timer(0.01, go_on.set).start()
    order.append("owner")
    reader.join(60)
    with reads.allowed():
        assert late.done()
    assert order[0] == "read"
    assert sorted(order) == ["late", "owner", "read"]


class Late(deque[Job[Any]]):
    """Another thread queues ``late`` when the queue has just been found empty, and the lock is not
    released yet.
    """

    late: Job[Any] | None = Job(lambda: 1)

    def popleft(self) -> Job[Any]:
        if not self and self.late is not None:
            self.append(self.late)
            self.late = None
            raise IndexError
        return super().popleft()


def test_no_read_is_left_behind() -> None:
    reads = StateReads()
    reads._jobs = Late()
    late = Late.late
    with reads.allowed():
        assert queued(reads).result(0) == 1
        assert late.future.result(0) == 1


def test_a_read_that_fails_ends_neither_the_owner_nor_the_next_one() -> None:
    reads = StateReads()
    failing = queued(reads, lambda: 1 // 0)
    after = queued(reads)
    with reads.allowed():
        with pytest.raises(ZeroDivisionError):
            failing.result(0)
        assert after.result(0) == 1


def test_the_end_fails_what_waits() -> None:
    reads = StateReads()
    one = queued(reads)
    reads.fail(ValueError("gone"))
    with pytest.raises(ValueError, match="gone"):
        one.result(0)
    other = queued(reads)
    reads.fail(None)
    assert other.cancelled()


def test_a_job_holds_the_result_or_the_error_of_its_function() -> None:
    job = Job(lambda: 7)
    job.run()
    assert job.future.result(0) == 7
    failing: Job[float] = Job(lambda: 1 / 0)
    failing.run()
    with pytest.raises(ZeroDivisionError):
        failing.future.result(0)


def test_a_cancelled_job_does_not_run() -> None:
    calls: list[int] = []
    job = Job(lambda: calls.append(1))
    assert job.future.cancel()
    job.run()
    assert calls == []


@pytest.mark.parametrize("is_running", [False, True])
def test_a_job_that_fails_from_outside_keeps_that_error(is_running: bool) -> None:
    """Its thread may never return, or set a result that no caller waits for."""
    job = Job(lambda: 7)
    if is_running:
        job.future.set_running_or_notify_cancel()
    job.fail(ValueError("the thread ended"))
    with pytest.raises(ValueError, match="the thread ended"):
        job.future.result(0)


def test_a_function_that_returns_after_its_job_failed_changes_nothing() -> None:
    job: Job[int]

    def late() -> int:
        job.fail(ValueError("hangs"))
        return 7

    job = Job(late)
    job.run()
    with pytest.raises(ValueError, match="hangs"):
        job.future.result(0)


def test_a_job_without_an_error_is_cancelled() -> None:
    job = Job(lambda: 7)
    job.fail(None)
    assert job.future.cancelled()


def test_no_sequence_and_no_model_are_needed_unless_a_job_names_them() -> None:
    job = Job(lambda: 7)
    assert job.seq == -1
    assert not job.needs_model
    assert Job(lambda: 7, needs_model=True, seq=3).seq == 3
