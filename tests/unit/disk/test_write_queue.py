"""The write queue: no caller waits for the disk, rows are kept until written, and a failing disk is
a warning.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest

from pyctl.cache.ports import Written
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import NOTHING, Block, PromptFacts, PromptMatch, Segment, Snapshot, State
from pyctl.disk.write_job import Writing
from pyctl.disk.write_queue import MAX_CALLS, WriteQueue
from pyctl.errors import StateError
from pyctl.prompt import as_tokens
from tests.unit.cache.fake_rows import FakeHeldRows
from tests.waiting import until

FULL = OSError(errno.ENOSPC, "full")


class SlowWriter:
    """Remembers what it wrote; waits for ``gate`` before each segment, raises ``error`` if there is
    one.
    """

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.gate = threading.Event()
        self.written: list[tuple[int, bytes]] = []
        self.n_ended = 0
        self.error: Exception | None = None

    def write(self, snapshot: Snapshot, spilled: bool) -> Writing:
        rows = b""
        try:
            for segment in reversed(snapshot.chain):
                self.begun.set()
                assert self.gate.wait(60)
                yield segment
                if self.error is not None:
                    raise self.error
                rows += segment.rows.tobytes() + segment.draft_rows.tobytes()
            self.written.append((snapshot.n, rows))
            return len(rows)
        finally:
            self.n_ended += 1

    @property
    def seeds(self) -> list[int]:
        """The seeds of the snapshots that were written."""
        return [rows[0] for _, rows in self.written]


@pytest.fixture
def writer() -> SlowWriter:
    return SlowWriter()


@pytest.fixture
def writes(writer: SlowWriter) -> Iterator[WriteQueue]:
    writes = WriteQueue(writer.write, max_bytes=300)
    writes.start()
    yield writes
    writer.gate.set()
    writes.close(60)


def snapshot(seed: int, n_held: int = 0, n: int = 50) -> Snapshot:
    """Return a snapshot of one segment, or of ``n_held`` segments that the device holds."""
    tokens = as_tokens(np.random.default_rng(seed).integers(0, 100, n * max(n_held, 1)))
    segment: Segment | None = None
    for start in range(0, tokens.size, n):
        segment = Segment(start, tokens[start : start + n], np.full(n, seed, np.uint8), segment)
        if n_held:
            segment.rows = NOTHING
            segment.held = FakeHeldRows(n, n)
    assert segment is not None
    return Snapshot(
        PromptMatch(tokens).prefix(tokens.size), segment, State.from_parts(np.zeros(4, np.uint8))
    )


def rows_of(segments: Sequence[Segment]) -> list[Block]:
    """Return for each segment a block as from the device, whose values are its place in the
    chain.
    """
    return [np.full(50, 100 + each.start // 50, np.uint8) for each in segments]


def no_rows(segments: Sequence[Segment], error: type[Exception] = MemoryError) -> list[Block]:
    raise error("none")


def spill(writes: WriteQueue, seed: int, worth: float = 1.0, n_bytes: int = 100) -> None:
    writes.evict(snapshot(seed), rows_of, worth, n_bytes, spills=True)


def test_writing_never_waits_and_the_newest_comes_first(
    writer: SlowWriter, writes: WriteQueue
) -> None:
    made = [snapshot(seed) for seed in range(12)]
    writes.write(made[0])
    assert writer.begun.wait(60)  # the thread holds it, at the closed gate
    for each in made[1:]:
        writes.write(each)
        writes.write(each)
    assert writer.written == [], "nothing waited for the gate"
    assert not writes.flush(0.05)
    assert writes.n_waiting == 12
    writer.gate.set()
    assert writes.flush(60)
    assert writer.seeds == list(range(11, -1, -1)), "each once"
    assert writes.written == Written(12, 600)


def test_device_only_rows_are_copied_by_segment_without_delays(
    writer: SlowWriter, writes: WriteQueue
) -> None:
    """Rows that only the device holds are requested one segment at a time, and other snapshots are
    written while a segment has no room. The written bytes are complete and no copy stays in RAM.
    """
    asked = threading.Event()
    writer.gate.set()
    large = snapshot(1, 3)
    writes.on_rows_needed = asked.set
    writes.write(large)
    for n_served in range(3):
        assert writes.flush(60)
        assert asked.is_set()
        assert writes.awaits_rows is True
        assert writes.is_draining_device is True
        asked.clear()
        writes.supply_rows(no_rows)
        writes.write(snapshot(10 + n_served))
        assert writes.flush(60)
        assert writer.seeds == list(range(10, 11 + n_served))
        assert asked.is_set(), "what was written may have left room"
        asked.clear()
        writes.supply_rows(rows_of)
    assert writes.flush(60)
    assert writer.written[-1] == (150, bytes([100]) * 50 + bytes([101]) * 50 + bytes([102]) * 50)
    assert writes.awaits_rows is False
    assert writes.is_draining_device is False
    assert writes.n_dropped == 0
    assert all(not segment.rows.size for segment in large.chain)


@pytest.mark.parametrize("why", ["device", "dropped", "unwanted"])
def test_rows_that_never_come_end_it(writer: SlowWriter, writes: WriteQueue, why: str) -> None:
    writer.gate.set()
    large = snapshot(1, 2)
    writes.write(large)
    assert writes.flush(60)
    large.segment.dropped = why == "dropped"
    large.facts = PromptFacts(for_disk=why != "unwanted")
    writes.supply_rows(partial(no_rows, error=StateError) if why == "device" else rows_of)
    assert writes.flush(60)
    assert writes.n_waiting == 0
    assert writes.n_dropped == 1
    assert writer.n_ended == 1
    assert not large.facts.for_disk, "it is not offered again"


@pytest.mark.parametrize("n_served", [0, 2])
@pytest.mark.parametrize("fits", [True, False])
def test_what_is_evicted_meanwhile_has_all_rows_that_are_left_or_is_lost(
    writer: SlowWriter, writes: WriteQueue, n_served: int, fits: bool
) -> None:
    """A snapshot that leaves the device while it is written gets all its remaining rows at once, or
    is dropped as a whole. It is never written in part.
    """
    writer.gate.set()
    large = snapshot(1, 3)
    writes.write(large)
    for _ in range(n_served):
        assert writes.flush(60)
        writes.supply_rows(rows_of)
    assert writes.flush(60)
    asked: list[Segment] = []
    writes.evict(
        large,
        lambda each: asked.extend(each) or (rows_of if fits else no_rows)(each),
        0.0,
        150,
        spills=False,
    )
    assert asked == list(large.chain)[: 3 - n_served]
    large.segment.drop()
    assert writes.flush(60) is not fits, "its bytes are on their way"
    writes.supply_rows(no_rows)
    assert writes.flush(60)
    assert len(writer.written) == fits
    assert writes.n_dropped == (not fits)
    assert writes.spilled.n == 0


def test_what_another_thread_removes_while_its_rows_fail_to_come_is_removed_once(
    writer: SlowWriter, writes: WriteQueue
) -> None:
    evicted = snapshot(1, 1)
    writes.write(evicted)

    def removed_meanwhile(segments: Sequence[Segment]) -> list[Block]:
        assert writes.remove(evicted.prefix.name)
        raise MemoryError

    writes.evict(evicted, removed_meanwhile, 0.0, 50, spills=False)
    assert writes.n_waiting == 0
    assert writes.n_dropped == 0


def test_rows_are_held_although_the_cache_drops_them(
    writer: SlowWriter, writes: WriteQueue
) -> None:
    cache = RamCache(1, None)
    kept = snapshot(7)
    kept.segment.draft_rows = np.full(9, 8, np.uint8)
    assert cache.add(kept)
    writes.write(kept)
    cache.drop(kept)
    assert kept.segment.rows.nbytes == 0
    writer.gate.set()
    assert writes.flush(60)
    assert writer.written == [(50, bytes([7]) * 50 + bytes([8]) * 9)]


@pytest.mark.parametrize("error", [FULL, PermissionError("read-only"), ZeroDivisionError()])
@pytest.mark.parametrize("spills", [False, True])
def test_a_disk_that_refuses_is_left_alone_for_a_while(
    writer: SlowWriter,
    writes: WriteQueue,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    spills: bool,
) -> None:
    """An error of the disk, full or read-only, keeps the writes waiting until `retry` or the end;
    any other error drops only the write that failed. The log has a warning for each pause, not for
    each write.
    """
    writer.gate.set()
    writer.error = error
    is_full = isinstance(error, OSError)
    queue = partial(spill, writes) if spills else lambda seed: writes.write(snapshot(seed))
    queue(1)
    writes.supply_rows(rows_of)
    assert writes.flush(60) == (not is_full)
    writer.error = None
    queue(2)
    writes.supply_rows(rows_of)
    assert writes.flush(60) == (not is_full)
    assert writes.n_failed == 1
    assert writes.n_waiting == (2 if is_full else 0)
    assert writer.seeds == ([] if is_full else [2])
    writes.retry()
    assert writes.flush(60)
    assert sorted(writer.seeds) == ([1, 2] if is_full else [2])
    writer.error = FULL
    queue(3)
    writes.supply_rows(rows_of)
    assert not writes.flush(60)
    writer.error = None
    assert writes.close(60), "and tried once more in the end"
    assert writer.seeds[-1] == 3
    assert (
        len([record for record in caplog.records if "serving from RAM" in record.message])
        == 1 + is_full
    )


def test_what_a_full_disk_refused_without_its_rows_waits_for_the_end(
    writer: SlowWriter, writes: WriteQueue
) -> None:
    """A write that a full disk refused and that has no rows in RAM does not request them again
    until the queue closes. Then it is written.
    """
    writer.gate.set()
    writer.error = FULL
    large = snapshot(1, 2)
    writes.write(large)
    assert writes.flush(60)
    writes.supply_rows(rows_of)
    until(lambda: writes.n_failed)
    writer.error = None
    writes.retry()
    assert writes.flush(60)
    assert writes.n_waiting == 1
    assert writes.awaits_rows is False
    assert writes.is_draining_device is False
    assert writer.written == []
    assert writes.close(60, partial(writes.supply_rows, rows_of))
    assert len(writer.written) == 1


def test_calls_are_run_in_order_and_do_not_pile_up(writer: SlowWriter, writes: WriteQueue) -> None:
    writes.write(snapshot(1))
    assert writer.begun.wait(60)
    done: list[object] = []
    for number in range(MAX_CALLS + 100):
        writes.run_soon(partial(done.append, number))
    writes.run_soon(lambda: [][0])
    writes.run_soon(lambda: done.append(threading.current_thread().name))
    writer.gate.set()
    assert writes.flush(60)
    assert done == [*range(102, MAX_CALLS + 100), "pyctl-disk"], "the newest, also after a failure"


def test_close_times_out_and_running_write_ends_with_its_segment(
    writer: SlowWriter, writes: WriteQueue
) -> None:
    made = snapshot(1)
    first = snapshot(9).segment
    made.segment.start = 50
    made.segment.parent = first
    writes.write(Snapshot(PromptMatch(as_tokens(range(100))).prefix(100), made.segment, made.state))
    assert writer.begun.wait(60)
    writes.write(snapshot(2))
    assert not writes.close(0.2)
    assert writer.written == [], "it did not wait for the gate"
    writes.write(snapshot(3))
    assert writes.n_waiting == 0
    writer.gate.set()
    until(lambda: writer.n_ended)
    assert writer.written == []


def test_what_is_dropped_by_name_is_not_written_from_wherever_it_waits(
    writer: SlowWriter, writes: WriteQueue
) -> None:
    """A removed snapshot is not written, whether it is being written, waits, was spilled, or was
    refused by the disk. A second removal finds nothing.
    """
    writer.error = FULL
    made = [snapshot(seed) for seed in range(3)]
    for each in made:
        writes.write(each)
        assert writer.begun.wait(60)  # the first is being written, at the closed gate
    spill(writes, 3)
    spill(writes, 4)
    writes.supply_rows(rows_of)
    for seed in (0, 1, 3):
        assert writes.remove(snapshot(seed).prefix.name)
        assert not writes.remove(snapshot(seed).prefix.name)
    assert not writes.remove(snapshot(9).prefix.name)
    writer.gate.set()
    assert not writes.flush(60), "the disk refuses"
    writer.error = None
    writes.retry()
    assert writes.flush(60)
    assert writer.seeds == [2, 4], "nor is what was refused tried again"


def test_spilled_snapshots_wait_for_bytes_and_follow_selected(
    writer: SlowWriter, writes: WriteQueue
) -> None:
    """Selected snapshots are written before spilled ones, and spilled ones by falling value as soon
    as their bytes are in RAM.
    """
    writes.write(snapshot(0))
    assert writer.begun.wait(60)  # the thread holds it, at the closed gate
    for seed, worth in ((1, 1.0), (2, 3.0), (2, 9.0)):
        spill(writes, seed, worth)
    assert writes.awaits_rows
    writes.supply_rows(rows_of)
    assert not writes.awaits_rows
    spill(writes, 3, 2.0)
    writes.write(snapshot(4))
    writer.gate.set()
    assert not writes.flush(60), "the bytes of one are on their way"
    assert sorted(writer.seeds[:2]) == [0, 4]
    assert writer.seeds[2:] == [2, 1], "the most worth first"
    writes.supply_rows(rows_of)
    assert writes.flush(60)
    assert writer.seeds[-1] == 3
    assert writes.spilled == Written(3, 150)


def test_interim_snapshots_come_last(writer: SlowWriter, writes: WriteQueue) -> None:
    """After those that a policy chose and those that RAM evicted, and counted apart."""
    writes.write(snapshot(0))
    assert writer.begun.wait(60)
    writes.write(snapshot(1), is_interim=True)
    spill(writes, 2, 1.0)
    writes.supply_rows(rows_of)
    writes.write(snapshot(3))
    writer.gate.set()
    assert writes.flush(60)
    assert writer.seeds[-2:] == [2, 1]
    assert writes.interim == Written(1, 50)
    assert writes.spilled == Written(1, 50)


def test_an_interim_snapshot_that_a_policy_chooses_is_written_as_chosen(
    writer: SlowWriter, writes: WriteQueue
) -> None:
    writes.write(snapshot(0))
    assert writer.begun.wait(60)
    both = snapshot(1)
    writes.write(both, is_interim=True)
    assert writes.is_queued(both.prefix)
    spill(writes, 2, 1.0)
    writes.supply_rows(rows_of)
    writes.write(both)
    writer.gate.set()
    assert writes.flush(60)
    assert writer.seeds[-1] == 2, "it comes before the evicted one"
    assert writes.interim.n == 0
    assert not writes.is_queued(both.prefix)


def test_an_interim_snapshot_that_ram_evicts_has_its_worth(
    writer: SlowWriter, writes: WriteQueue
) -> None:
    writes.write(snapshot(0))
    assert writer.begun.wait(60)
    evicted = snapshot(1)
    writes.write(evicted, is_interim=True)
    spill(writes, 2, 1.0)
    writes.evict(evicted, rows_of, 5.0, 50, spills=False)
    writes.supply_rows(rows_of)
    writer.gate.set()
    assert writes.flush(60)
    assert writer.seeds == [0, 1, 2]


def test_the_least_worth_per_byte_is_lost_where_room_ends(
    writer: SlowWriter, writes: WriteQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """A full queue drops the snapshot of the least value per byte, then selected ones from the
    oldest. One warning a minute reports that the disk is too slow.
    """
    for seed, worth in enumerate((5.0, 1.0, 3.0, 2.0, 0.5)):
        spill(writes, seed, worth)
    spill(writes, 5, 100.0, n_bytes=301)
    assert writes.n_dropped == 3, "the one of 1 s, the one of 0.5 s, and what is too large"
    assert len([record for record in caplog.records if "too slow" in record.message]) == 1, (
        "once a minute"
    )
    spill(writes, 6, 8.0, n_bytes=200)
    writes.write(chosen := snapshot(7))
    assert writes.n_waiting == 3
    assert writes.drop_lowest_value(), "8 s for 200 bytes is less than 5 s for 100"
    writes.supply_rows(rows_of)
    assert writer.begun.wait(60)
    writes.write(snapshot(8))
    assert writes.drop_lowest_value()
    assert writes.drop_lowest_value(), "the oldest of those that a policy chose"
    assert chosen.facts.for_disk
    writer.gate.set()
    assert writes.flush(60)
    assert writer.seeds == [8]
    assert not writes.drop_lowest_value()


def test_rows_that_are_on_disk_are_not_asked_for_and_not_kept(
    writer: SlowWriter, writes: WriteQueue
) -> None:
    writer.gate.set()
    large = snapshot(1, 2)
    asked = list[Segment]()
    list(large.chain)[1].file.is_there = True
    writes.evict(large, lambda each: asked.extend(each) or rows_of(each), 1.0, 10, spills=True)
    writes.supply_rows(rows_of)
    assert writes.flush(60)
    assert asked == [large.segment]
    assert writer.written == [(100, bytes([101]) * 50)]
