"""Rows that are loaded as they arrive from disk, and what becomes of a snapshot that fails."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyctl.cache.arriving import ArrivingCandidate
from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.pending_snapshot import PendingSnapshot
from pyctl.cache.reads import finish
from pyctl.cache.snapshot import Segment, Snapshot
from pyctl.disk.readers import DiskReads, Readers
from pyctl.errors import StateError
from tests.unit.cache.checks import check_invariants
from tests.unit.cache.steps import Steps, prompt_of

LENGTHS = (100, 250, 400)


class Reads:
    """A snapshot of 400 tokens in three segments, as it comes from disk into an empty cache.

    ``started`` are the segments whose reads have begun, by where they start.
    """

    def __init__(self, *, is_large: bool = False, can_hold: bool = True) -> None:
        """Save a chain of three segments, then build the pending snapshot whose rows and state come
        only as the test completes `futures`, which are keyed by the start of a segment, -1 for the
        state.
        """
        made = Steps(can_hold=False)
        tokens = prompt_of(1).tokens
        for n in LENGTHS:
            made.evaluate(tokens[made.seq.n : n])
            made.cache.saver.save(made.seq, made.plan_of(prompt_of(1)), RequestStats(400))
        made.memory.synchronize()
        self.expected = made.digest()
        self.steps = Steps(can_hold=can_hold)
        self.futures: dict[int, Future[None]] = {}
        self.started: list[int] = []
        self.refused: list[Snapshot] = []
        self.hits: list[Snapshot] = []
        self.failures: list[Exception] = []
        self._readers = Readers(1, "test")
        deepest = made.ram.snapshots()[-1]
        parent = None
        for each in reversed(deepest.chain):
            parent = Segment(each.start, each.tokens, each.rows, parent, each.batch_ends)
        assert parent is not None
        self.snapshot = Snapshot(deepest.prefix, parent, deepest.state)
        coming: dict[Segment, DiskReads] = {}
        later: dict[Segment, Callable[[], DiskReads]] = {}
        for segment in reversed(self.snapshot.chain):
            if is_large and segment.start:
                later[segment] = partial(self._start, segment.start)
            else:
                coming[segment] = self._start(segment.start)
        self.arrival = PendingSnapshot(
            self.snapshot,
            coming,
            self._start(-1),
            done=lambda: None,
            failed=self.failures.append,
            deferred_reads=later,
        )
        disk: Any = SimpleNamespace(count_hit=self.hits.append, discard=self.refused.append)
        self.candidate = ArrivingCandidate(
            "disk",
            400,
            0,
            self.snapshot,
            arrival=self.arrival,
            disk=disk,
            cache=self.steps.ram,
            device=self.steps.cache.device,
        )

    def _start(self, start: int) -> DiskReads:
        self.started.append(start)
        self.futures[start] = Future()
        return DiskReads([self.futures[start]], self._readers, 1e18)

    def finish_all(self) -> None:
        for future in self.futures.values():
            if not future.done():
                future.set_result(None)

    def enter(self) -> bool:
        return finish(self.candidate.enter(self.steps.seq))


def test_each_segment_is_loaded_before_the_next_has_come() -> None:
    reads = Reads()
    loading = reads.candidate.load(reads.steps.seq, reads.steps.memory)
    rows = []
    for start in (0, 100, 250, -1):
        assert next(loading) is not None
        rows.append(len(reads.steps.memory.seqs[0].rows))
        reads.futures[start].set_result(None)
    with pytest.raises(StopIteration):
        next(loading)
    assert rows == [0, 100, 250, 400]
    assert reads.steps.digest() == reads.expected
    assert reads.enter()
    assert reads.hits == reads.steps.ram.snapshots() == [reads.snapshot]
    check_invariants(reads.steps.ram)


def test_of_a_large_snapshot_a_segment_is_read_when_the_one_before_is_on_the_device() -> None:
    """The read of a segment starts only when the one before it has been loaded, so that the rows of
    a large snapshot never lie in RAM as a whole. The result is still exact, and enters the cache.
    """
    reads = Reads(is_large=True)
    loading = reads.candidate.load(reads.steps.seq, reads.steps.memory)
    in_ram = []
    for start in (0, 100, 250):
        next(loading)
        in_ram.append([each.start for each in reads.snapshot.chain if each.held is None])
        assert reads.started[-1] == (start or -1)
        reads.futures[start].set_result(None)
    next(loading)
    reads.futures[-1].set_result(None)
    with pytest.raises(StopIteration):
        next(loading)
    assert in_ram == [[250, 100, 0], [250, 100], [250]]
    assert not any(each.rows.size for each in reads.snapshot.chain)
    assert reads.steps.digest() == reads.expected
    assert reads.enter()
    assert reads.steps.ram.snapshots() == [reads.snapshot]


def test_a_read_that_fails_is_no_fault_of_the_snapshot() -> None:
    reads = Reads()
    reads.futures[0].set_exception(OSError("gone"))
    with pytest.raises(StateError, match="gone"):
        finish(reads.candidate.load(reads.steps.seq, reads.steps.memory))
    assert [str(each) for each in reads.failures] == ["gone"]
    reads.candidate.discard(reads.steps.ram)
    assert reads.refused == []


@pytest.mark.parametrize("is_dropped", [False, True])
def test_bytes_that_do_not_fit_are_refused_unless_rows_are_missing(is_dropped: bool) -> None:
    reads = Reads()
    if is_dropped:
        reads.snapshot.segment.drop()
    reads.candidate.discard(reads.steps.ram)
    assert reads.refused == [reads.snapshot] * (not is_dropped)


def test_what_is_not_complete_enters_no_cache() -> None:
    reads = Reads()
    reads.futures[0].set_exception(OSError("gone"))
    assert not reads.enter()
    assert reads.steps.ram.snapshots() == []


def test_rows_without_room_in_ram_stay_on_the_device() -> None:
    reads = Reads()
    reads.finish_all()
    finish(reads.candidate.load(reads.steps.seq, reads.steps.memory))
    n_rows = sum(each.rows.nbytes for each in reads.snapshot.chain)
    assert n_rows > 5000
    reads.steps.ram.budget.limit = reads.steps.ram.budget.shared.n_bytes = 5000
    assert reads.enter()
    assert all(each.held is not None for each in reads.snapshot.chain)
    assert reads.steps.ram.n_bytes <= 5000
    check_invariants(reads.steps.ram)


def test_closing_ends_the_reads_and_releases_the_device() -> None:
    reads = Reads()
    segment = reads.snapshot.segment
    reads.finish_all()
    finish(reads.candidate.load(reads.steps.seq, reads.steps.memory))
    reads.steps.cache.device.hold_rows(reads.snapshot, reads.steps.seq)
    assert segment.held is not None
    reads.candidate.close()
    assert segment.held is None
    assert np.array_equal(reads.steps.seq.tokens, [])
    open_reads = Reads()
    open_reads.candidate.close()
    assert all(future.cancelled() for future in open_reads.futures.values())
