"""Checks of cached snapshots: what they find, what they skip, and what they leave behind."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from pyctl.cache.snapshot import RECURRENT
from pyctl.engine.canary.canary_limits import CanaryLimits
from pyctl.engine.handle import RequestHandle
from pyctl.errors import EngineError
from pyctl.files.image_file import ImageFile
from pyctl.prompt import ImageSpan, Prompt
from tests.unit.engine.canary.bench import (
    HOUR,
    NEXT,
    PROMPT,
    CanaryBench,
    Kind,
    flip,
    flip_row,
)
from tests.unit.engine.drive import cold, collect, flushed, request, run_all, tier_of
from tests.unit.engine.messages import KINDS, chat

OTHER = chat((1, 160), (9, 100), (8, 40))
"""A prompt that shares its first message with PROMPT."""


def rows_file(directory: Path) -> Path:
    """Return a file of rows on disk, the largest."""
    files = directory.rglob("*.rows")
    return max(files, key=lambda path: path.stat().st_size)


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


# -- intact snapshots
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("can_hold", [False, True])
def test_intact_snapshots_are_verified(kind: Kind, can_hold: bool, tmp_path: Path) -> None:
    bench = CanaryBench(kind, tmp_path / "kv", can_hold=can_hold)
    bench.talk()
    view = bench.check_all()
    places = {"ram", "disk"} | ({"device"} if can_hold and kind != "opaque" else set())
    assert set(view.verified) == places
    assert sum(view.verified.values()) == 40
    assert not view.differing
    assert not view.skipped


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_leaves_sequences_and_replies_as_they_were(kind: Kind) -> None:
    """A check borrows the only sequence: its rows, positions and the bytes in RAM are the same
    afterwards, and the next reply equals a cold one.
    """
    bench = CanaryBench(kind)
    bench.talk()
    (seq,) = bench.engine.sequences
    digest = bench.backend.digest(0)
    tokens = seq.tokens.tolist()
    ends = list(seq.batch_ends)
    spans = seq.reply_spans
    n_bytes = bench.cache.n_bytes
    assert bench.check().verified
    assert bench.engine.sequences[0] is seq
    assert seq.tokens.tolist() == tokens
    assert seq.batch_ends == ends
    assert seq.reply_spans == spans
    assert bench.backend.digest(0) == digest
    assert bench.cache.n_bytes == n_bytes
    longer = chat((1, 160), (2, 100), (3, 40), (4, 100), (5, 50))
    expected = cold(type(bench.backend)(kind), longer, 6, bench.engine.settings)
    assert bench.ask(longer).tokens == expected.tokens


def test_a_check_evaluates_one_batch_where_rows_are_enough() -> None:
    bench = CanaryBench("attention")
    bench.talk()
    before = bench.backend.n_evaluated
    bench.check()
    assert 0 < bench.backend.n_evaluated - before <= bench.backend.facts.n_ubatch


def test_nothing_to_check_is_no_error() -> None:
    bench = CanaryBench()
    view = bench.check()
    assert not view.verified
    assert not view.skipped
    assert bench.canary.seconds == HOUR


# -- wrong bits
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_flipped_bit_in_ram_is_found(kind: Kind) -> None:
    bench = CanaryBench(kind, can_hold=False)
    bench.talk()
    flip(bench.snapshots[-1].segment.rows)
    view = bench.check_only("ram") if bench.check_all(20).differing else bench.check_all(60)
    assert view.differing == {"ram": 1}
    assert view.reports[0]["differs"] == "rows"


@pytest.mark.parametrize("kind", ["hybrid", "opaque"])
def test_a_flipped_bit_in_a_state_is_found(kind: Kind) -> None:
    bench = CanaryBench(kind)
    bench.talk()
    snapshot = bench.snapshots[-1]
    flip(snapshot.state.parts[RECURRENT])
    view = bench.check_all(60)
    assert sum(view.differing.values()) == 1
    assert bench.cache.get(snapshot.prefix) is None


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_flipped_bit_on_the_device_is_found(kind: Kind) -> None:
    bench = CanaryBench(kind)
    bench.talk()
    snapshot = bench.snapshots[-1]
    flip_row(bench.backend, snapshot.segment)
    view = bench.check_all(60)
    assert view.differing == {"device": 1}
    assert bench.cache.get(snapshot.prefix) is None
    assert bench.engine.sequences[0].n == 0, "it had the same rows"


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_in_a_file_is_found(kind: Kind, tmp_path: Path) -> None:
    bench = CanaryBench(kind, tmp_path / "kv")
    bench.talk()
    path = max((tmp_path / "kv").rglob("*.state" if kind == "opaque" else "*.rows"))
    flip_last_byte(path)
    view = bench.check_all(60)
    assert view.differing == {"disk": 1}
    assert view.reports[0]["file"] == path.name
    assert flushed(bench.engine).find
    assert not path.exists()
    assert bench.snapshots, "a checksum shows that only the file is wrong"


def test_rows_that_were_written_wrong_are_found_in_the_file(tmp_path: Path) -> None:
    """The checksum of the file is right then."""
    bench = CanaryBench("hybrid", tmp_path / "kv", can_hold=False)
    may_write = threading.Event()
    tier_of(bench.engine).queue.run_soon(may_write.wait)
    assert bench.ask(PROMPT).error is None
    bench.backend.synchronize()
    flip(bench.snapshots[-1].segment.rows)
    may_write.set()
    flushed(bench.engine)
    bench.cache.clear(pinned=True)
    view = bench.check_all(60)
    assert view.differing == {"disk": 1}
    assert view.reports[0]["differs"] == "rows"
    flushed(bench.engine)
    assert tier_of(bench.engine).checks.prefixes() == []


# -- the quarantine
# ----------------------------------------------------------------------------------


def test_a_quarantined_snapshot_is_never_used_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pinned snapshot with a flipped row leaves GPU, RAM and disk with all that shares its rows,
    so that the next request is evaluated from nothing and correct.
    """
    bench = CanaryBench("hybrid", tmp_path / "kv")
    bench.talk()
    bench.cache.pin(bench.snapshots[0].prefix.name, True)
    flip_row(bench.backend, bench.snapshots[0].segment)
    with caplog.at_level(logging.ERROR):
        view = bench.check_all(60)
    assert sum(view.differing.values()) == 1
    assert "is quarantined" in caplog.text
    assert bench.snapshots == [], "all share rows with it"
    assert len(bench.cache.prompt_ends) == 0
    flushed(bench.engine)
    assert tier_of(bench.engine).checks.prefixes() == []
    (case,) = tier_of(bench.engine).checks.quarantine.cases()
    assert (case / "report.json").is_file()
    assert list(case.glob("*.rows"))
    expected = cold(type(bench.backend)("hybrid"), NEXT, 6, bench.engine.settings)
    again = bench.ask(NEXT)
    assert again.done is not None
    assert again.done.stats.n_cached == 0
    assert again.tokens == expected.tokens


def test_what_shares_no_row_stays() -> None:
    bench = CanaryBench("hybrid")
    stranger = chat((7, 160), (6, 100))
    assert bench.ask(stranger).error is None
    staying = set(bench.snapshots)
    bench.talk()
    flip_row(bench.backend, bench.snapshots[-1].segment)
    bench.check_all(60)
    assert set(bench.snapshots) == staying


def test_nothing_is_found_on_disk_if_files_cannot_be_moved(tmp_path: Path) -> None:
    bench = CanaryBench("hybrid", tmp_path / "kv")
    bench.talk()
    disk = tier_of(bench.engine)
    disk.checks.quarantine.keep = Mock(side_effect=OSError("read-only"))
    flip_row(bench.backend, bench.snapshots[0].segment)
    bench.check_all(60)
    disk.flush(60)
    assert disk.checks.prefixes() == []
    again = bench.ask(NEXT)
    assert again.done is not None
    assert again.done.stats.n_cached == 0


# -- no false alarms
# ----------------------------------------------------------------------------------


def test_without_exact_only_checksums_are_verified(tmp_path: Path) -> None:
    bench = CanaryBench("hybrid", tmp_path / "kv", exact=False)
    bench.talk()
    n_before = bench.backend.n_evaluated
    view = bench.check()
    assert set(view.skipped) == {"not_exact"}
    assert bench.backend.n_evaluated == n_before
    flip_last_byte(rows_file(tmp_path / "kv"))
    assert bench.check_all(5).differing == {"disk": 1}


def test_results_that_do_not_repeat_are_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """A card that computes other bits now and then says nothing about the cache."""
    bench = CanaryBench("attention")
    bench.talk()
    real = bench.backend.evaluate
    calls = iter(range(1, 10**6))

    def evaluate(seq: int, tokens: np.ndarray, start: int, **options: object) -> None:
        real(seq, tokens, start, **options)
        sequence = bench.backend.seqs[seq]
        sequence.memory.rows[sequence.cells[-1]] = bytes([next(calls) % 256]) * 16

    bench.backend.evaluate = evaluate
    n_before = len(bench.snapshots)
    view = bench.check()
    assert view.skipped["unstable"] > 0
    assert not view.differing
    assert len(bench.snapshots) == n_before
    assert "neither counts" in caplog.text


def test_a_snapshot_from_other_batches_is_skipped() -> None:
    bench = CanaryBench("hybrid")
    bench.talk()
    for snapshot in bench.snapshots:
        snapshot.exact = False
    view = bench.check()
    assert set(view.skipped) == {"not_exact"}


def test_an_end_within_an_image_is_skipped() -> None:
    bench = CanaryBench("attention")
    image = ImageSpan(b"a key", 10, 6, ImageFile(b"", "png", 1, 1), 100)
    text = chat((1, 160), (2, 100)).tokens
    tokens = np.concatenate([text[:100], image.tokens, text[100:200]]).astype(np.int32)
    assert bench.ask(Prompt(tokens, (100, 160, 220), pictures=(image,))).error is None
    view = bench.check_all(30)
    assert view.skipped["image"] > 0, "the snapshot right after the image"
    assert sum(view.verified.values()) > 0, "the others"
    assert not view.differing


def test_an_evaluation_that_takes_too_long_is_skipped() -> None:
    bench = CanaryBench("attention", limits=CanaryLimits(a_check=1.0, seed=1))
    bench.talk()
    bench.cache.costs.record_evaluated(0, 2000, 2000.0)  # a second for each token
    assert set(bench.check().skipped) == {"too_long"}


def test_ram_without_room_for_the_sequences_is_left_alone() -> None:
    bench = CanaryBench("hybrid")
    bench.talk()
    bench.cache.prompt_ends.clear()
    for segment in bench.cache.index.pool.copies():
        bench.cache.index.pool.drop_ram_copy(segment)
    bench.cache.budget.limit = bench.cache.n_bytes
    names = [snapshot.prefix for snapshot in bench.snapshots]
    view = bench.check()
    assert set(view.skipped) == {"no_room"}
    assert [snapshot.prefix for snapshot in bench.snapshots] == names


def test_a_full_context_gives_up_only_rows_that_ram_has() -> None:
    bench = CanaryBench("hybrid", n_ctx=512)
    bench.talk()
    assert bench.ask(chat((5, 160), (6, 100))).error is None
    while bench.engine.prefix_cache.write_back.copy_next():
        pass
    names = {snapshot.prefix for snapshot in bench.snapshots}
    view = bench.check_all()
    assert sum(view.verified.values()) > 20
    assert not view.differing
    assert {snapshot.prefix for snapshot in bench.snapshots} == names
    assert bench.engine.prefix_cache.device.counts.lost == 0


def test_a_snapshot_that_was_dropped_in_between_is_gone() -> None:
    bench = CanaryBench("hybrid", can_hold=False)
    bench.talk()
    bench.clock.advance(HOUR)
    bench.canary.step()
    assert bench.canary.is_running
    bench.cache.clear(pinned=True)
    while bench.canary.is_running:
        bench.canary.step()
    view = bench.canary.view()
    assert not view.differing
    assert sum(view.verified.values()) <= 1, "what was loaded before counts"
    assert bench.cache.index.retained == []


def test_an_error_ends_the_check_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    bench = CanaryBench("attention")
    bench.talk()
    digest = bench.backend.digest(0)
    bench.backend.evaluate = Mock(side_effect=EngineError("a kernel failed"))
    view = bench.check()
    assert view.skipped["failed"] == 1
    assert "a kernel failed" in caplog.text
    assert bench.backend.digest(0) == digest


# -- requests
# ----------------------------------------------------------------------------------


def begin(bench: CanaryBench, n_steps: int) -> None:
    """Run ``n_steps`` of a check."""
    bench.clock.advance(HOUR)
    for _ in range(n_steps):
        bench.canary.step()
    assert bench.canary.is_running


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_steps", [1, 2, 3, 4])
def test_a_request_ends_a_check_at_any_step(kind: Kind, n_steps: int) -> None:
    """However far a check is, a request finds its sequence as before and gets a cold run's reply;
    an interrupted check stays due.
    """
    bench = CanaryBench(kind)
    bench.talk()
    digest = bench.backend.digest(0)
    bench.clock.advance(HOUR)
    for _ in range(n_steps):
        if not bench.canary.seconds:
            bench.canary.step()
    is_interrupted = bench.canary.is_running
    handle = RequestHandle(request(OTHER, 6))
    bench.engine.submit(handle)
    assert not bench.canary.is_running
    assert bench.backend.digest(0) == digest, "the sequence is back before the request starts"
    run_all(bench.engine)
    expected = cold(type(bench.backend)(kind), OTHER, 6, bench.engine.settings)
    assert collect(handle).tokens == expected.tokens
    assert bench.canary.counts.interrupted == is_interrupted
    assert (bench.canary.seconds == 0) == is_interrupted, "it stays due"


def test_a_request_preempts_a_batch() -> None:
    bench = CanaryBench("attention")
    bench.talk()
    digest = bench.backend.digest(0)
    bench.clock.advance(HOUR)
    bench.backend.preempt()
    while bench.canary.seconds == 0 and not bench.canary.counts.interrupted:
        bench.canary.step()
    assert bench.canary.counts.interrupted == 1
    assert not bench.canary.is_running
    assert not bench.backend.is_preempt_wanted, "the next evaluation is not preempted for it"
    assert bench.backend.digest(0) == digest
    assert bench.check().verified


@pytest.mark.parametrize("way", ["sleep", "step", "close"])
def test_other_work_ends_a_check(way: str) -> None:
    bench = CanaryBench("hybrid")
    bench.talk()
    begin(bench, 2)
    n = [snapshot.prefix for snapshot in bench.snapshots]
    work = {
        "sleep": bench.engine.sleep,
        "step": bench.engine.step,
        "close": lambda: bench.engine.close(EngineError("the end")),
    }
    work[way]()
    assert not bench.canary.is_running
    assert bench.cache.index.retained == []
    assert set(n) <= {snapshot.prefix for snapshot in bench.snapshots}


def test_steps_count_as_seconds_of_the_day() -> None:
    bench = CanaryBench("attention", limits=CanaryLimits(a_day=5.0, seed=1))
    bench.talk()
    real = bench.backend.evaluate

    def evaluate(*args: object, **options: object) -> None:
        bench.clock.advance(3.0)
        real(*args, **options)

    bench.backend.evaluate = evaluate
    assert bench.check().seconds == 3.0
    assert bench.canary.seconds == HOUR
    assert bench.check().seconds == 6.0
    assert bench.canary.seconds > HOUR, "the day's seconds are used up"


def test_an_interval_of_zero_turns_it_off() -> None:
    bench = CanaryBench(interval=0)
    bench.talk()
    bench.clock.advance(100 * HOUR)
    assert bench.canary.seconds is None
