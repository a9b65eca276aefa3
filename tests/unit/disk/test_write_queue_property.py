"""The write queue as a state machine: no order of calls, failures and evictions loses a temp file,
writes bytes that are still being copied, or breaks a bound.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from unittest.mock import patch

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pyctl.cache.snapshot import NOTHING, Block, PromptMatch, Segment, Snapshot, State
from pyctl.disk import write_queue
from pyctl.disk.write_job import JobState, Writing
from pyctl.disk.write_queue import RETRY_SECONDS, WriteQueue
from pyctl.errors import NotWrittenError, StateError
from pyctl.prompt import as_tokens
from tests.effort import examples
from tests.unit.cache.fake_rows import FakeHeldRows
from tests.unit.engine.drive import ManualClock

ROWS = 10
"""Bytes of rows of each segment."""

MAX_BYTES = 50
MAX_JOBS = 4

SEEDS = st.integers(0, 5)

PICKS = st.integers(0, 5)
"""Which of the snapshots in the cache."""


def rows_for(segment: Segment) -> bytes:
    """Return the bytes that its file has to have: its tokens."""
    return segment.tokens.astype(np.uint8).tobytes()


class BrokenPromises(logging.Handler):
    """The failed assertions that the queue logs as failures of a job."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], AssertionError):
            self.found.append(str(record.exc_info[1]))


class FaultyDisk:
    """Checks what it writes, and fails when it is told to; ``n_open`` temp files are there."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.n_open = 0
        self.interruptions: list[Callable[[], object]] = []
        self.written: list[Snapshot] = []

    def write(self, snapshot: Snapshot, spilled: bool) -> Writing:
        """Check the rows of each segment as they arrive, and note the snapshot; raise `error` or
        run an interruption in between.
        """
        self.n_open += 1
        try:
            n_bytes = 0
            for segment in reversed(snapshot.chain):
                yield segment
                if self.interruptions:
                    self.interruptions.pop()()
                if self.error is not None:
                    raise self.error
                assert segment.rows.tobytes() == rows_for(segment), "no copy, or half of one"
                n_bytes += ROWS
            if not snapshot.facts.for_disk:
                raise NotWrittenError("the snapshot is no longer selected")
            self.written.append(snapshot)
            return n_bytes
        finally:
            self.n_open -= 1


class QueueMachine(RuleBasedStateMachine):
    """Runs turns on the thread of the test, which is the engine's as well."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = FaultyDisk()
        self.clock = ManualClock()
        self.bound = patch.object(write_queue, "MAX_SPILLED", MAX_JOBS)
        self.bound.start()
        self.broken = BrokenPromises()
        write_queue.log.addHandler(self.broken)
        self.queue = WriteQueue(self.disk.write, MAX_BYTES, self.clock)
        self.cached: dict[int, Snapshot] = {}
        self.removed: list[Snapshot] = []
        self.copies: list[tuple[Block, bytes]] = []
        self.device_error: Exception | None = None

    # -- the cache
    # ----------------------------------------------------------------------------------

    @rule(seed=SEEDS, n_segments=st.integers(1, 3), is_held=st.booleans())
    def evaluate(self, seed: int, n_segments: int, is_held: bool) -> None:
        """Put a snapshot into the cache, its rows in RAM or on the device alone."""
        if seed in self.cached:
            return
        tokens = as_tokens(np.arange(ROWS * n_segments) + 40 * seed)
        segment: Segment | None = None
        for start in range(0, tokens.size, ROWS):
            part = tokens[start : start + ROWS]
            segment = Segment(start, part, NOTHING, segment)
            if is_held:
                segment.held = FakeHeldRows(ROWS, ROWS)
            else:
                segment.rows = np.frombuffer(rows_for(segment), np.uint8)
        assert segment is not None
        prefix = PromptMatch(tokens).prefix(tokens.size)
        self.cached[seed] = Snapshot(prefix, segment, State.from_parts(np.zeros(1, np.uint8)))

    def pick(self, number: int) -> tuple[int, Snapshot]:
        seeds = sorted(self.cached)
        seed = seeds[number % len(seeds)]
        return seed, self.cached[seed]

    @precondition(lambda self: self.cached)
    @rule(number=PICKS)
    def choose(self, number: int) -> None:
        _, made = self.pick(number)
        if made.facts.for_disk:
            self.queue.write(made)

    @precondition(lambda self: self.cached)
    @rule(number=PICKS, worth=st.floats(0, 10), spills=st.booleans())
    def evict(self, number: int, worth: float, spills: bool) -> None:
        seed, made = self.pick(number)
        del self.cached[seed]
        if not made.facts.for_disk:
            return
        n_bytes = ROWS * len(made.chain)
        self.queue.evict(made, self.start_copies, worth, n_bytes, spills=spills)
        for segment in made.chain:
            segment.drop()
            segment.dropped = True

    def start_copies(self, segments: Sequence[Segment]) -> list[Block]:
        """Blocks whose bytes arrive with the next `synchronize`."""
        if self.device_error is not None:
            raise self.device_error
        blocks = [np.full(ROWS, 255, np.uint8) for _ in segments]
        self.copies += zip(blocks, map(rows_for, segments), strict=True)
        return blocks

    def synchronize(self) -> None:
        for block, rows in self.copies:
            block[:] = np.frombuffer(rows, np.uint8)
        self.copies.clear()

    @rule()
    def flush_copies(self) -> None:
        self.synchronize()
        self.queue.supply_rows(self.complete_copies)

    def complete_copies(self, segments: Sequence[Segment]) -> list[Block]:
        blocks = self.start_copies(segments)
        self.synchronize()
        return blocks

    @rule(error=st.sampled_from([None, StateError("lost"), MemoryError("full")]))
    def set_device(self, error: Exception | None) -> None:
        self.device_error = error

    # -- the disk
    # ----------------------------------------------------------------------------------

    @rule(n=st.integers(1, 4))
    def turns(self, n: int) -> None:
        for _ in range(n):
            self.queue.run_next()

    @rule(error=st.sampled_from([None, OSError(errno.ENOSPC, "full"), ZeroDivisionError()]))
    def set_disk(self, error: Exception | None) -> None:
        self.disk.error = error

    @rule()
    def wait_for_the_retry(self) -> None:
        self.clock.advance(RETRY_SECONDS)

    # -- others
    # ----------------------------------------------------------------------------------

    @precondition(lambda self: self.cached)
    @rule(number=PICKS)
    def remove(self, number: int) -> None:
        name = self.pick(number)[1].prefix.name
        jobs = [job for job in self.queue.jobs if not job.is_cancelled]
        self.removed += [job.snapshot for job in jobs if job.snapshot.prefix.name == name]
        if self.queue.remove(name):
            assert not self.queue.remove(name)

    @rule()
    def drop_lowest_value(self) -> None:
        n_before = self.queue.n_waiting
        if self.queue.drop_lowest_value():
            assert self.queue.n_waiting == n_before - 1

    @rule(what=st.sampled_from(["evict", "remove", "drop"]), number=PICKS)
    def interrupt_a_turn(self, what: str, number: int) -> None:
        """Have another thread's call come while a segment is written."""

        def call() -> None:
            if what == "drop":
                self.queue.drop_lowest_value()
            elif self.cached:
                self.evict(number, 1.0, True) if what == "evict" else self.remove(number)

        self.disk.interruptions.append(call)

    @invariant()
    def nothing_removed_is_published(self) -> None:
        assert not {*map(id, self.removed)} & {*map(id, self.disk.written)}

    @invariant()
    def no_assertion_failed(self) -> None:
        assert self.broken.found == []

    @invariant()
    def bounds_hold(self) -> None:
        jobs = self.queue.jobs
        assert all(job.state is not JobState.ENDED for job in jobs)
        spilled = [job for job in jobs if not job.is_chosen and not job.is_cancelled]
        assert len(spilled) <= MAX_JOBS
        assert sum(job.n_bytes for job in spilled) <= MAX_BYTES
        assert self.disk.n_open == sum(job.writing is not None for job in jobs if job.next_segment)

    def teardown(self) -> None:
        """Check that with a working disk and device every task ends, and each chosen snapshot that
        the cache still has is written.
        """
        self.disk.error = None
        self.device_error = None
        self.disk.interruptions.clear()
        wanted = [made for made in self.cached.values() if made.facts.for_disk]
        for made in wanted:
            self.queue.write(made)
        self.queue.begin_last_try()
        for _ in range(200):
            self.flush_copies()
            while self.queue.run_next():
                continue
        assert not self.queue.jobs
        assert self.disk.n_open == 0
        prefixes = {each.prefix for each in self.disk.written}
        assert prefixes >= {made.prefix for made in wanted if made.facts.for_disk}
        self.bound.stop()
        write_queue.log.removeHandler(self.broken)
        assert self.broken.found == []


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)
