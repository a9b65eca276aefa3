"""Waits for reads on other threads: a generator yields while they run, and raises their errors."""

from __future__ import annotations

import pytest

from pyctl.cache.reads import Reading, Reads, finish, finished


class Counted(Reads):
    """Reads that are ready after so many looks, and then have an ``error`` or none."""

    def __init__(self, n_looks: int, error: Exception | None = None) -> None:
        self.n_looks = n_looks
        self.error = error
        self.waits: list[float] = []

    def ready(self) -> bool:
        self.n_looks -= 1
        return self.n_looks < 0

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        raise AssertionError("the wait does not cancel them")


@pytest.mark.parametrize("n_looks", [0, 1, 5])
def test_a_reading_yields_its_reads_until_they_are_ready(n_looks: int) -> None:
    reads = Counted(n_looks)
    assert list(finished(reads)) == [reads] * n_looks
    assert reads.waits == [], "the caller decides how to wait"


def test_the_error_of_a_read_comes_at_the_end() -> None:
    reading = finished(Counted(1, OSError("gone")))
    next(reading)
    with pytest.raises(OSError, match="gone"):
        next(reading)


def test_reads_that_are_ready_may_have_failed() -> None:
    with pytest.raises(TimeoutError):
        next(finished(Counted(0, TimeoutError())))


@pytest.mark.parametrize("n_looks", [0, 3])
def test_finishing_waits_on_this_thread_and_returns_the_result(n_looks: int) -> None:
    reads = Counted(n_looks)

    def reading() -> Reading[int]:
        yield from finished(reads)
        return 7

    assert finish(reading()) == 7
    assert len(reads.waits) == n_looks
    assert all(0 < seconds < 1 for seconds in reads.waits), "others may end what it waits for"


def test_several_reads_are_waited_for_one_after_the_other() -> None:
    first = Counted(2)
    second = Counted(1)

    def reading() -> Reading[str]:
        yield from finished(first)
        yield from finished(second)
        return "both"

    assert finish(reading()) == "both"
    assert [len(first.waits), len(second.waits)] == [2, 1]
