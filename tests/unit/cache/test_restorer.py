"""A restore brings a sequence to what a cold run would hold, whatever it comes from and fails."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pyctl.cache.cache_stats import RequestStats
from pyctl.cache.reads import finish, finished
from pyctl.disk.readers import DiskReads, Readers
from pyctl.errors import OutOfCellsError, StateError
from pyctl.prompt import Prompt
from tests.unit.cache.checks import check_invariants
from tests.unit.cache.steps import Steps, TickingStats, cold_digest, longer, prompt_of
from tests.unit.engine.drive import tier_on

KINDS = ("attention", "hybrid", "opaque")


def at_rest(steps: Steps) -> None:
    """Check that nothing of a restore stays but the sequence, which the memory holds."""
    check_invariants(steps.ram)
    assert not steps.ram.index.retained
    assert not +steps.ram.index.locks
    assert steps.seq.n_expected == 0
    assert len(steps.memory.seqs[steps.seq.id].rows) == steps.seq.n


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["live", "ram", "held", "disk"])
def test_every_source_gives_what_a_cold_run_has(kind: str, source: str, tmp_path: Path) -> None:
    """Held rows are rows of a snapshot in RAM that lie on the device."""
    disk = tier_on(tmp_path) if source == "disk" else None
    steps = Steps(kind, disk=disk, can_hold=source == "held")
    prompt = prompt_of(1)
    steps.serve(prompt)
    if source != "live":
        steps.serve(prompt_of(2))
    if disk is not None:
        assert disk.flush(60)
        steps.ram.clear()
    again = longer(prompt, 3)
    lookup = steps.lookup(again)
    stats = RequestStats(len(again))
    restored = steps.restore(lookup, stats)
    assert stats.source == ("ram" if source == "held" else source)
    assert stats.n_cached == steps.seq.n > 0
    assert steps.digest() == cold_digest(kind, again, steps.seq.n)
    assert bool(restored) == (source != "live")
    assert all(each.hits for each in restored)
    n_returned = steps.cache.device.counts.returned
    assert bool(n_returned) == (source == "held" and kind != "opaque")
    if disk is not None:
        assert disk.n_hits == 1
        assert steps.ram.get(restored[0].prefix) is restored[0], "what was read is in RAM now"
        assert steps.cache.close()
    at_rest(steps)


def test_bytes_that_do_not_fit_are_dropped_and_the_next_candidate_is_tried() -> None:
    """A snapshot whose bytes the backend rejects leaves the cache, since it would fail each time.
    The request resumes from the next shorter one and the result is still exact.
    """
    steps = Steps()
    steps.serve(prompt_of(1))
    again = longer(prompt_of(1), 3)
    steps.serve(again)
    steps.serve(prompt_of(2))
    lookup = steps.lookup(again)
    first, second, *_ = lookup.candidates
    assert first.n > second.n
    steps.memory.fail_loads = 1
    stats = RequestStats(len(again))
    (restored,) = steps.restore(lookup, stats)
    assert restored is second.snapshot
    assert stats.source == "ram"
    assert stats.n_cached == second.n
    assert steps.cache.totals.failed_restores == 1
    assert first.snapshot not in steps.ram.snapshots()
    assert steps.digest() == cold_digest("hybrid", again, second.n)
    at_rest(steps)


@pytest.mark.parametrize("error", [OutOfCellsError(), StateError("no room")])
def test_a_snapshot_that_finds_no_room_stays(error: Exception) -> None:
    """``make_room`` fails, before anything was loaded."""
    steps = Steps(can_hold=True)
    steps.serve(prompt_of(1))
    steps.serve(prompt_of(2))
    lookup = steps.lookup(longer(prompt_of(1), 3))
    kept = steps.ram.snapshots()
    stats = RequestStats(600)
    reading = steps.cache.restore(lookup, steps.seq, stats, Mock(side_effect=error))
    with pytest.raises(StopIteration) as end:
        next(reading)
    assert end.value.value == ()
    assert steps.seq.n == stats.n_cached == 0
    assert steps.cache.totals.failed_restores == 0
    assert steps.ram.snapshots() == kept
    at_rest(steps)


def test_cells_that_are_missing_in_the_end_leave_the_snapshot() -> None:
    steps = Steps()
    steps.serve(prompt_of(1))
    steps.serve(prompt_of(2))
    lookup = steps.lookup(longer(prompt_of(1), 3))
    kept = steps.ram.snapshots()
    steps.memory.restore = Mock(side_effect=OutOfCellsError)  # type: ignore[method-assign]
    assert steps.restore(lookup) == ()
    assert steps.cache.totals.failed_restores == 0
    assert steps.ram.snapshots() == kept
    at_rest(steps)


def test_a_restore_that_is_closed_while_it_waits_leaves_nothing(tmp_path: Path) -> None:
    """A client may leave while a restore waits for the disk: the sequence is empty again, nothing
    stays locked, and the time until then is counted.
    """
    disk = tier_on(tmp_path)
    steps = Steps(disk=disk)
    prompt = prompt_of(1)
    steps.serve(prompt)
    steps.serve(prompt_of(2))
    assert disk.flush(60)
    steps.ram.clear()
    readers = Readers(1, "test")
    real = disk.open

    def slow(*args: Any) -> Any:
        arrival = yield from real(*args)
        never = DiskReads([Mock(done=lambda: False, cancelled=lambda: False)], readers, 1e18)
        arrival.rows = lambda segment: finished(never)
        return arrival

    disk.open = slow  # type: ignore[method-assign]
    stats = TickingStats(0)
    restoring = steps.cache.restore(steps.lookup(longer(prompt, 3)), steps.seq, stats)
    while steps.seq.n_expected == 0:
        next(restoring)
    restoring.close()
    assert steps.seq.n == 0
    assert stats.restore_ms > 0, "the time until then counts"
    at_rest(steps)
    assert steps.cache.close()


def test_rows_in_ram_that_an_arriving_snapshot_shares_stay_while_it_waits(tmp_path: Path) -> None:
    """A snapshot on disk continues a reply whose rows RAM has, in batches that no cold run has.

    While its own rows are read, another request has the snapshot in RAM dropped. The rows that both
    share are not read again, so they have to stay.
    """
    disk = tier_on(tmp_path)
    steps = Steps(disk=disk)
    prompt = prompt_of(1)
    plan = steps.plan_of(longer(prompt, 3))
    tokens = longer(prompt, 3).tokens
    steps.evaluate(prompt.tokens)
    for n in (400, 450, 500):
        steps.generate(tokens[steps.seq.n : n])
        steps.cache.saver.save(steps.seq, plan, RequestStats(n))
    deepest = steps.digest()
    steps.memory.synchronize()
    for snapshot in steps.ram.snapshots():
        disk.write(snapshot)
    assert disk.flush(60)
    steps.ram.clear()
    steps.restore(steps.lookup(Prompt.from_ids(tokens[:451])))
    (shallow,) = steps.ram.snapshots()
    steps.serve(prompt_of(2))
    assert shallow.n == 450

    other_request: Future[None] = Future()
    real = disk.open

    def slow(*args: Any) -> Any:
        arrival = yield from real(*args)
        real_rows = arrival.rows

        def rows(segment: Any) -> Any:
            yield from finished(DiskReads([other_request], Readers(1, "test"), 1e18))
            yield from real_rows(segment)

        arrival.rows = rows
        return arrival

    disk.open = slow  # type: ignore[method-assign]
    stats = RequestStats(501)
    restoring = steps.cache.restore(steps.lookup(Prompt.from_ids(tokens[:501])), steps.seq, stats)
    while steps.seq.n_expected == 0:
        next(restoring)
    steps.ram.drop(shallow)
    other_request.set_result(None)
    finish(restoring)
    assert stats.source == "disk"
    assert stats.n_cached == 500
    assert steps.cache.totals.failed_restores == 0
    assert steps.digest() == deepest
    assert steps.cache.close()
    at_rest(steps)


def test_without_candidates_the_sequence_is_empty() -> None:
    steps = Steps()
    steps.serve(prompt_of(1))
    lookup = steps.lookup(prompt_of(2), cache_prompt=False)
    assert lookup.candidates == ()
    assert steps.restore(lookup) == ()
    assert steps.seq.n == 0
    at_rest(steps)


def test_held_rows_that_return_count_even_if_their_snapshot_finds_no_room(tmp_path: Path) -> None:
    """Rows come from the device, the state from disk: there is no room in RAM for that one."""
    disk = tier_on(tmp_path)
    steps = Steps(disk=disk, can_hold=True)
    prompt = prompt_of(1)
    steps.serve(prompt)
    steps.serve(prompt_of(2))
    while disk.awaits_rows or not disk.flush(0.1):
        steps.cache.write_back.flush_copies()
    again = longer(prompt, 3)
    *deeper, first = steps.lookup(again).candidates
    for each in deeper:
        steps.ram.drop(each.snapshot)
    steps.ram.add = Mock(return_value=False)  # type: ignore[method-assign]
    stats = RequestStats(len(again))
    restored = steps.restore(steps.lookup(again), stats)
    assert stats.source == "disk"
    assert restored == ()
    assert first.n < stats.n_cached < deeper[0].n
    assert steps.cache.device.counts.returned == first.n
    assert steps.digest() == cold_digest("hybrid", again, stats.n_cached)
    assert steps.cache.close()
