"""Reads by other threads: at once while the engine's thread waits, never while it is at work."""

from __future__ import annotations

import threading
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
    reads, begun, go_on, order = StateReads(), threading.Event(), threading.Event(), []

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


def test_no_read_is_left_behind() -> None:
    reads, n_readers, n_reads = StateReads(), 4, 300
    found: list[Future[Any]] = []

    def read() -> None:
        for _ in range(n_reads):
            found.append(queued(reads))

    threads = [threading.Thread(target=read) for _ in range(n_readers)]
    for thread in threads:
        thread.start()
    while len(found) < n_readers * n_reads // 2:
        with reads.allowed():
            pass
    with reads.allowed():
        for thread in threads:
            thread.join(60)
        assert len(found) == n_readers * n_reads
        assert all(future.done() for future in found), "with nothing but the looks of the other threads"


def test_a_read_that_fails_ends_neither_the_owner_nor_the_next_one() -> None:
    reads = StateReads()
    failing, after = queued(reads, lambda: 1 // 0), queued(reads)
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
