"""The writer of snapshots: whatever fails at whichever call, files, index and limits stay right."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pyctl.cache.snapshot import Prefix, Segment, Snapshot, State
from pyctl.disk.file_format import (
    INDEX,
    MAX_TOKENS,
    StateName,
)
from pyctl.disk.index import Index
from pyctl.disk.writer import MAX_ATTEMPTS
from pyctl.errors import NotWrittenError
from pyctl.prompt import as_tokens
from tests.effort import examples
from tests.unit.disk.making import (
    DirectStore,
    check_directory,
    check_equal,
    check_read,
    conversation,
    failing,
    on_disk,
)
from tests.unit.engine.drive import ManualClock

Opener = Callable[..., DirectStore]

CALLS = ("open", "pwrite", "fsync", "replace", "unlink")
"""The system calls of a write that change the drive, beside those of SQLite."""

N_MADE = 9

PROCESSES = st.integers(0, 1)
PLACES = st.integers(0, N_MADE - 1)

FAILURES = st.fixed_dictionaries(
    {
        "call": st.sampled_from(CALLS),
        "after": st.integers(0, 4),
        "lasts": st.integers(1, 3),
        "number": st.sampled_from([errno.ENOSPC, errno.EIO, errno.EROFS]),
    }
)


def conversations(is_exact: bool) -> list[Snapshot]:
    """Return the N_MADE snapshots of three conversations, the same in each process."""
    made = [each for seed in range(3) for each in conversation(seed)]
    for each in made:
        each.exact = is_exact
    return made


class WriterHistories(RuleBasedStateMachine):
    """A state machine of two processes on one directory, whose disk fails now and then.

    After any order of writes, evictions, removals, failures and restarts, each snapshot that is
    reported as stored is read back to the same bytes. A write that fails changes nothing.
    """

    @initialize(budget=st.sampled_from([None, 4_000, 8_000]))
    def open(self, budget: int | None) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.budget = budget
        self.stores = [DirectStore(Path(self.folder.name), budget=budget) for _ in range(2)]
        self.made = {
            (process, is_exact): conversations(is_exact)
            for process in range(2)
            for is_exact in (False, True)
        }

    def teardown(self) -> None:
        if not hasattr(self, "stores"):
            return
        first, second = self.stores
        first.directory.recover()
        second.directory.refresh()
        assert first.folder.states == second.folder.states
        check_directory(second)
        for store in self.stores:
            store.close()
        self.folder.cleanup()

    @rule(process=PROCESSES, at=PLACES, is_exact=st.booleans(), is_spilled=st.booleans())
    def write(self, process: int, at: int, is_exact: bool, is_spilled: bool) -> None:
        store = self.stores[process]
        store.directory.refresh()
        before = dict(store.folder.states)
        snapshot = self.made[process, is_exact][at]
        name = StateName.from_prefix(snapshot.prefix)
        store.write(snapshot, spilled=is_spilled)
        assert not (before.get(name) and store.folder.states.get(name) is False), (
            "an exact one is not replaced by one that is not"
        )

    @rule(process=PROCESSES, at=PLACES, is_exact=st.booleans(), failure=FAILURES)
    def fail_to_write(self, process: int, at: int, is_exact: bool, failure: dict[str, Any]) -> None:
        store = self.stores[process]
        store.directory.refresh()
        before = dict(store.folder.states)
        snapshot = self.made[process, is_exact][at]
        try:
            with failing(**failure):
                store.write(snapshot)
        except OSError:
            name = StateName.from_prefix(snapshot.prefix)
            self.check_failed(store, name, failure["call"], before)
        if failure["call"] == "unlink":
            store.directory.recover()  # temp files that did not go

    def check_failed(
        self, store: DirectStore, name: StateName, call: str, before: dict[StateName, bool]
    ) -> None:
        after = dict(store.folder.states)
        if call in ("fsync", "open") and after != before:
            assert name in after, "the folder was not synced, but all is published"
        else:
            assert after == before

    @rule(process=PROCESSES, at=PLACES)
    def remove(self, process: int, at: int) -> None:
        name = self.made[process, True][at].prefix.name
        self.stores[process].directory.remove(name)
        assert not self.stores[process].directory.remove(name)

    @rule(process=PROCESSES, at=PLACES, is_pinned=st.booleans())
    def pin(self, process: int, at: int, is_pinned: bool) -> None:
        self.stores[process].directory.pin(self.made[process, True][at].prefix.name, is_pinned)

    @rule(process=PROCESSES)
    def restart(self, process: int) -> None:
        self.stores[process].close()
        self.stores[process] = DirectStore(Path(self.folder.name), budget=self.budget)
        for is_exact in (False, True):
            self.made[process, is_exact] = conversations(is_exact)

    @invariant()
    def holds(self) -> None:
        """Every snapshot that the index lists is read as it was written, in each process. No
        temporary file stays and the budget holds.
        """
        if not hasattr(self, "stores"):
            return
        for process, store in enumerate(self.stores):
            store.directory.refresh()
            for each in self.made[process, True]:
                is_exact = store.folder.states.get(StateName.from_prefix(each.prefix))
                if is_exact is None:
                    continue
                snapshot = store.read(each.prefix, each.last_tokens(each.n))
                assert snapshot is not None
                assert snapshot.exact == is_exact
                each.exact = is_exact
                check_equal(snapshot, each)
                each.exact = True
            assert store.damaged == 0
        files = on_disk(Path(self.folder.name))
        assert not [path for path in files if path.suffix == ".tmp"]
        assert self.budget is None or sum(each.stat().st_size for each in files) <= self.budget


TestWriterHistories = WriterHistories.TestCase
TestWriterHistories.settings = settings(
    max_examples=examples(40), stateful_step_count=10, deadline=None
)


def test_a_write_that_fails_at_its_renames_evicts_nothing(open_store: Opener) -> None:
    store = open_store(budget=4_000)
    first, second = (conversation(seed, turns=1)[0] for seed in range(2))
    assert store.write(first) > 0
    store.directory.budget = store.directory.n_bytes
    for after in range(2):
        with (
            failing("replace", after, 1, errno.ENOSPC),
            pytest.raises(OSError, match="No space"),
        ):
            store.write(second)
        check_read(store, first)
        check_directory(store)
    assert store.write(second) > 0
    assert not store.contains(first.prefix)
    check_directory(store)


def test_a_segment_is_written_each_time_that_its_rows_are_there(open_store: Opener) -> None:
    store = open_store()
    made = conversation(1)[-1]
    rows = [segment.rows for segment in made.chain]
    for segment in made.chain:
        segment.rows = np.empty(0, np.uint8)
    writing = store.writer.write(made)
    pairs = list(zip(made.chain, rows, strict=True))
    for n_written, (segment, block) in enumerate(reversed(pairs)):
        assert next(writing) is segment
        assert len(list(store.home.glob("*.tmp"))) == n_written
        segment.rows = block
    with pytest.raises(StopIteration):
        next(writing)
    check_read(store, made)
    check_directory(store)


def test_a_write_that_is_given_up_counts_for_the_day_and_leaves_no_file(
    open_store: Opener,
) -> None:
    store = open_store()
    writing = store.writer.write(conversation(1)[-1])
    next(writing)
    next(writing)
    (temp,) = store.home.glob("*.tmp")
    n_bytes = temp.stat().st_size
    writing.close()
    assert on_disk(store.directory.path) == []
    with store.directory.reading() as connection:
        assert Index.written_today(connection) == n_bytes


def test_segments_that_others_remove_meanwhile_are_written_again(open_store: Opener) -> None:
    store = open_store()
    other = open_store()
    first, second, _ = conversation(1)
    store.write(first)
    writing = store.writer.write(second)
    assert next(writing) is second.segment
    other.directory.remove(first.prefix.name)
    assert list(writing) == [first.segment, second.segment]
    check_read(store, second)
    check_directory(store)


def test_a_file_below_the_deepest_one_that_is_removed_by_hand_is_written_again(
    open_store: Opener,
) -> None:
    store = open_store()
    first, second, third = conversation(1)
    store.write(second)
    writing = store.writer.write(third)
    assert next(writing) is third.segment
    (path,) = store.home.glob("0-20-*.rows")
    path.unlink()
    assert list(writing) == [first.segment, second.segment, third.segment]
    check_read(store, third)
    check_directory(store)


def test_segments_that_are_removed_each_time_end_the_write(open_store: Opener) -> None:
    store = open_store()
    first, second, _ = conversation(1)
    store.write(first)
    writing = store.writer.write(second)

    def write_all() -> None:
        for n_yielded, segment in enumerate(writing):
            assert n_yielded < 2 * MAX_ATTEMPTS
            if segment is second.segment:
                store.directory.remove(first.prefix.name)
            else:
                store.write(first)

    with pytest.raises(NotWrittenError, match="other processes remove segments"):
        write_all()
    assert on_disk(store.directory.path) == []


def test_a_snapshot_that_is_removed_while_it_is_written_is_not_published(
    open_store: Opener,
) -> None:
    store = open_store()
    made = conversation(1)[0]
    writing = store.writer.write(made)
    next(writing)
    made.facts = type(made.facts)(for_disk=False)
    with pytest.raises(NotWrittenError, match="no longer selected"):
        next(writing)
    assert on_disk(store.directory.path) == []


def test_a_prefix_that_is_too_long_is_not_written(open_store: Opener) -> None:
    store = open_store()
    far = Segment(MAX_TOKENS, as_tokens([1]), np.zeros(48, np.uint8), None)
    made = Snapshot(Prefix(bytes(16), far.end), far, State.from_parts(np.zeros(9, np.uint8)))
    assert store.write(made) == 0
    assert on_disk(store.directory.path) == []


def test_what_is_written_beside_counts_towards_the_day(
    open_store: Opener, made: list[Snapshot], clock: ManualClock
) -> None:
    store = open_store(daily_bytes=3_000)
    assert store.writer.reserve_write(2_000)
    assert not store.writer.reserve_write(2_000)
    assert store.write(made[0]) == 0
    assert store.writer.reserve_write(900)


@pytest.mark.parametrize("lost", [INDEX, "model/20-40-*"])
def test_a_write_replaces_what_vanished(store: DirectStore, lost: str) -> None:
    (path,) = store.directory.path.glob(lost)
    path.unlink()
    following = conversation(3, turns=4)
    assert store.write(following[-1]) > 0
    for each in following if lost == INDEX else following[-1:]:
        check_read(store, each)
    check_directory(store)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_full_disk(
    open_store: Opener, made: list[Snapshot], monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    """A disk that is full at any call leaves no file of the write behind and all others readable,
    and the same write succeeds once there is room.
    """
    store = open_store()
    store.write(made[0])
    before = on_disk(store.directory.path)
    real = getattr(os, call)
    calls = itertools.count()

    def full(*args: object) -> object:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space"):
            store.write(made[2])
    assert on_disk(store.directory.path) == before
    check_read(store, made[0])
    check_directory(store)
    assert store.write(made[2]) > 0
    check_directory(store)


def test_small_disk(open_store: Opener, tmp_path: Path) -> None:
    """Writes to a real file system of 256 KiB fail with an error once it is full, leave no
    temporary file, and every snapshot written before is read.
    """
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", mount], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        store = open_store(directory=mount)
        kept: list[Snapshot] = []

        def fill() -> None:
            for seed in range(200):
                made = conversation(seed, turns=1, step=100)[0]
                store.write(made)
                kept.append(made)

        with pytest.raises(OSError, match=r"space|full|disk"):
            fill()
        assert len(kept) > 3
        assert not [path for path in on_disk(mount) if path.suffix == ".tmp"]
        for made in kept:
            check_read(store, made)
        check_directory(store)
        store.close()
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


def test_given_up_snapshots_are_not_written(open_store: Opener) -> None:
    store = open_store()
    short, long = conversation(0, turns=2)
    short.segment.rows = np.empty(0, np.uint8)
    short.segment.dropped = True
    assert store.write(long) == 0
    assert on_disk(store.directory.path) == []


def test_everything_is_synced_before_it_has_its_name(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data reach the disk before the rename gives them their names, and the directory is synced
    last, so that a power failure leaves whole files only.
    """
    store = open_store()
    home = store.directory.path / "model"
    order: list[str] = []
    real = os.replace

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        order.append("directory" if path == home.resolve() else path.suffix)

    def rename(source: Path, target: Path) -> None:
        order.append("rename")
        real(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    store.write(conversation(0, turns=2)[-1])
    assert order == [".tmp"] * 3 + ["rename"] * 3 + ["directory"]


def test_what_can_never_fit_drives_nothing_out(open_store: Opener) -> None:
    store = open_store(budget=4_000)
    small = conversation(0, turns=1)[0]
    big = conversation(1, turns=1, step=400)[0]
    store.write(small)
    assert store.write(big) == 0
    check_read(store, small)
    check_directory(store)


def test_daily_budget_survives_a_restart(
    open_store: Opener, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(daily_bytes=4_500)
    made = [conversation(seed, turns=1)[0] for seed in range(4)]
    assert [store.write(each) > 0 for each in made] == [True, True, False, False]
    assert caplog.text.count("--kv-cache-daily-writes") == 1
    store.close()
    store = open_store(daily_bytes=4_500)
    assert store.write(made[2]) == 0
    clock.advance(86_400)
    assert store.write(made[2]) > 0


def test_a_state_with_a_part_that_no_file_has_room_for_stays_in_ram(open_store: Opener) -> None:
    store, (made, *_) = open_store(), conversation(1)
    other = Snapshot(
        made.prefix, made.segment, State({**made.state.parts, "other": made.state.recurrent})
    )
    assert store.write(other) == 0
    assert store.write(made) > 0
