"""The write queue: no caller waits for the disk, rows are kept until written, and a failing disk is a warning."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from pyctl.cache.disk.write_queue import MAX_CALLS, WriteQueue
from pyctl.cache.ports import Reason, RowsOf, Written
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import NOTHING, Block, PromptMatch, Segment, Snapshot, State
from pyctl.prompt import as_tokens


class SlowWriter:
    """Remembers what it wrote; waits for ``gate`` first, raises ``error`` if there is one."""

    def __init__(self) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()
        self.written: list[tuple[int, bytes]] = []
        self.error: Exception | None = None

    def write(self, snapshot: Snapshot, reason: Reason, rows_of: RowsOf | None) -> int:
        self.begun.set()
        assert self.gate.wait(60)
        if self.error is not None:
            raise self.error
        rows = b"".join(segment.rows.tobytes() + segment.draft_rows.tobytes() for segment in reversed(snapshot.chain))
        self.written.append((snapshot.n, rows))
        return len(rows)


@pytest.fixture
def writer() -> SlowWriter:
    return SlowWriter()


@pytest.fixture
def behind(writer: SlowWriter) -> Iterator[WriteQueue]:
    behind = WriteQueue(writer.write, limit=3)
    yield behind
    writer.gate.set()
    behind.close(60)


def snapshot(seed: int, n: int = 50) -> Snapshot:
    tokens = as_tokens(np.random.default_rng(seed).integers(0, 100, n))
    rows = np.full(n, seed, np.uint8)
    return Snapshot(PromptMatch(tokens).prefix(n), Segment(0, tokens, rows, None), State.of(np.zeros(4, np.uint8)))


def test_offering_never_waits_and_a_full_queue_gives_up_its_oldest(writer: SlowWriter, behind: WriteQueue) -> None:
    behind.write(snapshot(0))
    assert writer.begun.wait(60)  # the thread holds it, at the closed gate
    for seed in range(1, 6):
        behind.write(snapshot(seed))
        behind.write(snapshot(seed))
    assert writer.written == [], "nothing waited for the gate"
    assert not behind.flush(0.05)
    writer.gate.set()
    assert behind.flush(60)
    assert [rows[0] for _, rows in writer.written] == [0, 5, 4, 3], "the newest first, each once, two given up"
    assert behind.written.n_bytes == 200


def test_what_ram_still_has_is_put_off_and_queued_again(writer: SlowWriter, behind: WriteQueue) -> None:
    made = [snapshot(seed) for seed in range(7)]
    behind.write(made[0])
    assert writer.begun.wait(60)  # the thread holds it, at the closed gate
    for number, each in enumerate(made[1:]):
        each.used = number
        behind.write(each)
    assert behind.n_waiting == 6
    assert (behind.n_given_up, behind.again()) == (0, None), "there is no room"
    assert [behind.is_put_off(each) for each in made] == [False, *[True] * 3, *[False] * 3]
    assert behind.drop(made[6].prefix.name)
    behind.drop(made[2].prefix.name)
    assert not behind.is_put_off(made[2])
    assert behind.again() is made[3], "the last used"
    behind.write(made[3])
    made[1].segment.drop()
    del made[1:4]
    assert behind.again() is None, "the cache has dropped it"
    writer.gate.set()
    assert behind.flush(60)
    assert [rows[0] for _, rows in writer.written] == [0, 3, 5, 4]
    assert behind.write_piece(lambda segment: None) is None


def test_what_left_ram_while_it_waited_is_lost_and_says_so(
    writer: SlowWriter, behind: WriteQueue, caplog: pytest.LogCaptureFixture
) -> None:
    for seed in range(9):
        made = snapshot(seed)
        behind.write(made)
        assert writer.begun.wait(60)
        made.segment.drop()
    assert behind.n_given_up == 5
    assert behind.n_waiting == 3
    assert [record.message for record in caplog.records if "too slow" in record.message] == [
        "the disk is too slow for what leaves RAM: 1 snapshots not written"
    ], "once a minute"


def test_rows_are_held_although_the_cache_drops_them(writer: SlowWriter, behind: WriteQueue) -> None:
    cache = RamCache(1, None)
    kept = snapshot(7)
    kept.segment.draft_rows = np.full(9, 8, np.uint8)
    assert cache.add(kept)
    behind.write(kept)
    cache.drop(kept)
    assert kept.segment.rows.nbytes == 0
    writer.gate.set()
    assert behind.flush(60)
    assert writer.written == [(50, bytes([7]) * 50 + bytes([8]) * 9)]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), PermissionError("read-only"), ZeroDivisionError()])
def test_a_disk_that_refuses_is_left_alone_for_a_while(
    writer: SlowWriter, behind: WriteQueue, error: Exception
) -> None:
    writer.gate.set()
    writer.error = error
    is_full = isinstance(error, OSError)
    behind.write(snapshot(1))
    assert behind.flush(60) == (not is_full)
    assert behind.n_failed == 1
    writer.error = None
    behind.write(snapshot(2))
    assert behind.flush(60) == (not is_full)
    assert bool(writer.written) == (not is_full)


def test_what_a_full_disk_did_not_take_is_kept_and_written_later(writer: SlowWriter, behind: WriteQueue) -> None:
    writer.gate.set()
    writer.error = OSError(errno.ENOSPC, "full")
    behind.write(snapshot(1))
    assert not behind.flush(60)
    for seed in (2, 3, 4):
        behind.write(snapshot(seed))
    assert behind.n_waiting == 3, "no more than the queue holds"
    behind.retry()
    assert not behind.flush(60)
    writer.error = None
    behind.retry()
    assert behind.flush(60)
    assert sorted(rows[0] for _, rows in writer.written) == [2, 3, 4]
    writer.error = OSError(errno.ENOSPC, "full")
    behind.write(snapshot(5))
    assert not behind.flush(60)
    writer.error = None
    assert behind.close(60), "and tried once more in the end"
    assert writer.written[-1][1][0] == 5


def test_closing_gives_up_what_a_full_disk_does_not_take(
    writer: SlowWriter, behind: WriteQueue, caplog: pytest.LogCaptureFixture
) -> None:
    writer.gate.set()
    writer.error = OSError(errno.ENOSPC, "full")
    for seed in (1, 2, 3):
        behind.write(snapshot(seed))
    behind.close(60)
    assert not behind._thread.is_alive()
    assert behind.n_waiting == 0
    assert behind.n_failed >= 3
    assert len([record for record in caplog.records if "cannot write" in record.message]) == 1, "it is said once"


def test_calls_are_made_by_the_thread_that_writes(writer: SlowWriter, behind: WriteQueue) -> None:
    seen: list[str] = []
    behind.run_soon(lambda: seen.append(threading.current_thread().name))
    behind.run_soon(lambda: [][0])
    behind.run_soon(lambda: seen.append("after a failure"))
    assert behind.flush(60)
    assert seen == ["pyctl-disk", "after a failure"]


def test_closing_gives_up_after_its_time(writer: SlowWriter, behind: WriteQueue) -> None:
    behind.write(snapshot(1))
    assert writer.begun.wait(60)
    behind.write(snapshot(2))
    assert not behind.close(0.2)
    assert writer.written == [], "it did not wait for the gate"
    assert behind.n_waiting == 0
    behind.write(snapshot(3))
    assert behind.n_waiting == 0
    writer.gate.set()


def test_closing_waits_for_what_is_being_written(writer: SlowWriter, behind: WriteQueue) -> None:
    behind.write(snapshot(1))
    assert writer.begun.wait(60)
    threading.Timer(0.3, writer.gate.set).start()
    assert behind.close(60)
    assert [n for n, _ in writer.written] == [50]


def test_errands_of_a_disk_that_hangs_do_not_pile_up(writer: SlowWriter, behind: WriteQueue) -> None:
    behind.write(snapshot(1))
    assert writer.begun.wait(60)
    done: list[int] = []
    for number in range(MAX_CALLS + 100):
        behind.run_soon(partial(done.append, number))
    writer.gate.set()
    assert behind.flush(60)
    assert done == list(range(100, MAX_CALLS + 100)), "the newest are done, in order"


def test_what_waits_for_longest_can_be_given_up(writer: SlowWriter, behind: WriteQueue) -> None:
    behind.write(snapshot(1))
    assert writer.begun.wait(60)
    for seed in (2, 3):
        behind.write(snapshot(seed))
    assert behind.give_up_least()
    writer.gate.set()
    assert behind.flush(60)
    assert [rows[:1] for _, rows in writer.written] == [b"\x01", b"\x03"]
    assert not behind.give_up_least()


def test_what_is_dropped_by_name_is_not_written_from_wherever_it_waits(writer: SlowWriter, behind: WriteQueue) -> None:
    writer.error = OSError(errno.ENOSPC, "full")
    for seed in range(3):
        behind.write(snapshot(seed))
        assert writer.begun.wait(60)  # the first is being written, at the closed gate
    spilled(3, 1.0, behind)
    spilled(4, 1.0, behind)
    behind.settle()
    for seed in (0, 1, 3):
        assert behind.drop(snapshot(seed).prefix.name)
        assert seed == 0 or not behind.drop(snapshot(seed).prefix.name)
    assert not behind.drop(snapshot(9).prefix.name)
    writer.gate.set()
    assert not behind.flush(60), "the disk refuses"
    writer.error = None
    behind.retry()
    assert behind.flush(60)
    assert [rows[0] for _, rows in writer.written] == [2, 4], "nor is what was refused tried again"


def spilled(seed: int, worth: float, behind: WriteQueue, n_bytes: int = 100) -> None:
    behind.write(snapshot(seed), Reason.EVICTED, worth=worth, n_bytes=n_bytes)


def test_what_was_spilled_waits_until_its_bytes_are_there_and_comes_after_what_was_offered(
    writer: SlowWriter, behind: WriteQueue
) -> None:
    behind.write(snapshot(0))
    assert writer.begun.wait(60)  # the thread holds it, at the closed gate
    spilled(1, 1.0, behind)
    spilled(2, 3.0, behind)
    spilled(2, 9.0, behind)
    assert behind.is_unsettled
    behind.settle()
    assert not behind.is_unsettled
    spilled(3, 2.0, behind)
    behind.write(snapshot(4))
    writer.gate.set()
    assert not behind.flush(60), "one is not settled"
    assert [rows[0] for _, rows in writer.written] == [0, 4, 2, 1], "the most worth first"
    behind.settle()
    assert behind.flush(60)
    assert writer.written[-1][1][0] == 3
    assert behind.spilled == Written(3, 150)


def test_what_was_spilled_has_so_many_bytes_at_most_and_the_least_worth_is_given_up(writer: SlowWriter) -> None:
    behind = WriteQueue(writer.write, most_bytes=300)
    try:
        for seed, worth in enumerate((5.0, 1.0, 3.0, 2.0)):
            spilled(seed, worth, behind)
            assert behind.waiting_bytes <= 300
        spilled(4, 0.5, behind)
        spilled(5, 100.0, behind, n_bytes=301)
        assert behind.n_given_up == 3, "the one of 1 s, the one of 0.5 s, and what is too large"
        spilled(6, 8.0, behind, n_bytes=200)
        assert behind.n_waiting == 2
        assert behind.give_up_least()
        behind.settle()
        writer.gate.set()
        assert behind.flush(60)
        assert [rows[0] for _, rows in writer.written] == [0], "8 s for 200 bytes is less than 5 s for 100"
    finally:
        writer.gate.set()
        behind.close(60)


def test_a_disk_that_refuses_gets_what_was_spilled_later(writer: SlowWriter, behind: WriteQueue) -> None:
    writer.gate.set()
    writer.error = OSError(errno.ENOSPC, "full")
    spilled(1, 1.0, behind)
    behind.settle()
    assert not behind.flush(60)
    assert behind.n_waiting == 1
    writer.error = None
    behind.retry()
    assert behind.flush(60)
    assert [rows[0] for _, rows in writer.written] == [1]
    spilled(2, 1.0, behind)
    assert behind.close(60), "spilled snapshots may be lost"


def test_rows_of_the_device_are_asked_for_once_and_those_on_disk_not_at_all(
    writer: SlowWriter, behind: WriteQueue
) -> None:
    asked: list[Segment] = []

    def rows_of(segment: Segment) -> Block:
        asked.append(segment)
        return np.full(segment.tokens.size, 9, np.uint8)

    class Cells:
        n_cells, n_bytes = 50, 50

    written, held = snapshot(1), snapshot(2)
    written.segment.file.is_there = True
    for each in (written, held):
        each.segment.rows, each.segment.held = NOTHING, Cells()
        behind.write(each, Reason.EVICTED, worth=1.0, n_bytes=10, rows_of=rows_of)
    assert asked == [held.segment]
    behind.settle()
    writer.gate.set()
    assert behind.flush(60)
    assert sorted(rows for _, rows in writer.written) == [b"", bytes([9]) * 50]
