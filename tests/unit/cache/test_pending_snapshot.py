"""A snapshot that is being read: the order of its reads, its one end, and its failures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pyctl.cache.pending_snapshot import PendingSnapshot
from pyctl.cache.reads import Reads, finish
from pyctl.cache.snapshot import PromptMatch, Segment, Snapshot, State
from pyctl.errors import StateError
from pyctl.prompt import as_tokens


class Read(Reads):
    """A read that is over at once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.is_cancelled = False

    def ready(self) -> bool:
        return True

    def wait(self, seconds: float) -> None:
        raise AssertionError("it is ready")

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        self.is_cancelled = True


class Case:
    """A snapshot of three segments, the reads of which are noted as they start."""

    def __init__(
        self, *, n_deferred: int = 0, failing: int = -1, state: Read | None = None
    ) -> None:
        """Build the snapshot. The last ``n_deferred`` reads start on request, and the read number
        ``failing`` raises an OSError.
        """
        tokens = as_tokens(range(30))
        self.segments: list[Segment] = []
        for start in (0, 10, 20):
            parent = self.segments[-1] if self.segments else None
            part = as_tokens(tokens[start : start + 10])
            self.segments.append(Segment(start, part, np.zeros(40, np.uint8), parent))
        self.snapshot = Snapshot(PromptMatch(tokens).prefix(30), self.segments[-1], State())
        self.reads = [Read(OSError("bad sector") if n == failing else None) for n in range(3)]
        self.state = state or Read()
        self.started: list[int] = []
        self.n_done = 0
        self.failures: list[Exception] = []
        first_deferred = 3 - n_deferred
        self.pending = PendingSnapshot(
            self.snapshot,
            dict(zip(self.segments[:first_deferred], self.reads, strict=False)),
            self.state,
            done=self._count_done,
            failed=self.failures.append,
            deferred_reads={self.segments[n]: self._starter(n) for n in range(first_deferred, 3)},
        )

    def _count_done(self) -> None:
        self.n_done += 1

    def _starter(self, n: int) -> Callable[[], Reads]:
        def start() -> Reads:
            self.started.append(n)
            return self.reads[n]

        return start


@pytest.mark.parametrize("n_deferred", [0, 1, 2])
def test_it_is_whole_once_all_reads_have_ended(n_deferred: int) -> None:
    case = Case(n_deferred=n_deferred)
    assert case.pending.is_large == bool(n_deferred)
    assert finish(case.pending.complete()) is case.snapshot
    assert case.started == list(range(3 - n_deferred, 3))
    assert case.n_done == 1
    assert not case.pending.is_lost


def test_rows_start_the_deferred_reads_before_them() -> None:
    case = Case(n_deferred=2)
    finish(case.pending.rows(case.segments[0]))
    assert case.started == []
    finish(case.pending.rows(case.segments[2]))
    assert case.started == [1, 2]


def test_freed_rows_make_room_for_the_next_deferred_read() -> None:
    case = Case(n_deferred=2)
    assert not case.pending.has_begun(case.segments[1])
    case.pending.free_rows(case.segments[0])
    assert case.segments[0].rows.size == 0
    assert case.started == [1]
    assert case.pending.has_begun(case.segments[1])
    assert not case.pending.has_begun(case.segments[2])


def test_the_rows_of_a_segment_that_was_not_read_start_no_other() -> None:
    case = Case(n_deferred=2)
    case.pending.free_rows(case.segments[1])
    assert case.started == []
    assert case.pending.has_begun(case.segments[1]), "its read is never needed"


@pytest.mark.parametrize("n_deferred", [0, 2])
def test_a_failed_read_ends_the_others_and_is_reported_once(n_deferred: int) -> None:
    case = Case(n_deferred=n_deferred, failing=0)
    with pytest.raises(StateError, match="disk cache: bad sector"):
        finish(case.pending.complete())
    assert case.pending.is_lost
    assert [str(error) for error in case.failures] == ["bad sector"]
    assert case.state.is_cancelled
    assert case.n_done == 0


def test_a_deferred_read_that_cannot_start_is_a_failure() -> None:
    case = Case(n_deferred=1)

    def refuse(n: int) -> Reads:
        raise MemoryError

    case.pending = PendingSnapshot(
        case.snapshot,
        {},
        case.state,
        done=lambda: None,
        failed=case.failures.append,
        deferred_reads={case.segments[0]: lambda: refuse(0)},
    )
    with pytest.raises(StateError, match="MemoryError"):
        finish(case.pending.rows(case.segments[0]))
    assert case.pending.is_lost


def test_a_failed_state_loses_the_snapshot() -> None:
    case = Case(state=Read(TimeoutError("stalled")))
    with pytest.raises(StateError, match="stalled"):
        finish(case.pending.state())
    assert case.pending.is_lost
    assert all(read.is_cancelled for read in case.reads)


def test_cancelling_ends_reads_that_have_not_started() -> None:
    case = Case()
    case.pending.cancel()
    assert all(read.is_cancelled for read in [*case.reads, case.state])
    assert case.failures == []
