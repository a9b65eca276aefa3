"""The disk store: written snapshots are read back equal, share segments, and stay within the
budget.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyctl.cache.snapshot import Segment, Snapshot, State
from pyctl.disk.file_format import CHUNK
from pyctl.disk.graph import FileGraph
from pyctl.disk.index import Index
from pyctl.prompt import as_tokens
from tests.effort import examples
from tests.unit.disk.making import (
    DirectStore,
    check_directory,
    check_equal,
    check_read,
    conversation,
    on_disk,
    segment,
    snapshot,
)
from tests.unit.engine.drive import ManualClock

Opener = Callable[..., DirectStore]


@st.composite
def trees(draw: st.DrawFn) -> list[Snapshot]:
    """Return snapshots on branching chains: clipped parents, positions within segments, states
    without new rows.
    """
    rows = draw(st.booleans())
    segments: list[Segment] = []
    found: dict[object, Snapshot] = {}
    for _ in range(draw(st.integers(1, 6))):
        tokens = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
        parent = draw(st.sampled_from(segments)) if segments and draw(st.booleans()) else None
        start = draw(st.integers(parent.start + 1, parent.end)) if parent else 0
        segments.append(segment(tokens, parent, start, rows))
        for _ in range(draw(st.integers(1, 2))):
            n = draw(st.integers(start + 1, segments[-1].end))
            made = snapshot(segments[-1], n, draw(st.booleans()), draw(st.sampled_from([0, 40])))
            found.setdefault(made.prefix, made)
    return list(found.values())


@given(made=trees())
@settings(max_examples=examples(40))
def test_round_trip(made: list[Snapshot]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = DirectStore(Path(directory), "model", None)
        for each in made:
            assert store.write(each) > 0
            assert store.write(each) == 0
        check_directory(store)
        store.close()
        store = DirectStore(Path(directory), "model", None)
        for each in made:
            check_read(store, each)
        assert store.lengths() == {each.n for each in made}
        assert store.damaged == 0
        store.close()


def test_big_parts_are_raw_in_many_chunks(open_store: Opener) -> None:
    tokens = as_tokens(np.random.default_rng(0).integers(0, 1000, 3000))
    # which any codec makes smaller
    rows = np.zeros(10_000_002, np.uint8)
    state = np.zeros(6_000_000, np.uint8)
    made = snapshot(Segment(0, tokens, rows, None, (3000,)), state=None)
    made = Snapshot(made.prefix, made.segment, State.of(state))
    store = open_store()
    n_bytes = rows.nbytes + state.nbytes
    assert n_bytes < store.write(made) == store.directory.n_bytes < n_bytes + tokens.nbytes + 500
    check_read(store, made)
    check_directory(store)


def test_a_turn_writes_only_what_is_new(open_store: Opener) -> None:
    store = open_store()
    made = conversation(0, turns=5)
    written = [store.write(each) for each in made]
    assert max(written) - min(written) < 150
    assert len(on_disk(store.directory.path)) == 10


def test_files_come_back_the_same_from_memory_and_from_the_drive(open_store: Opener) -> None:
    store = open_store()
    rows = np.random.default_rng(0).integers(0, 256, 2 * CHUNK + 12_345, np.uint8)
    large = snapshot(Segment(0, as_tokens(range(40)), rows, None))
    store.write(large)
    for path in on_disk(store.directory.path):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    check_read(store, large)  # from the drive, unless this file system keeps everything in memory
    for path in on_disk(store.directory.path):
        path.read_bytes()
    check_read(store, large)


def test_chains_share_segments_unless_they_were_given_up(open_store: Opener) -> None:
    store = open_store()
    made = conversation(0, turns=2)
    for each in made:
        store.write(each)
    short = store.read(made[0].prefix, made[1].last_tokens(made[1].n))
    long = store.read(made[1].prefix, made[1].last_tokens(made[1].n))
    assert long.segment.parent is short.segment
    short.segment.rows = np.empty(0, np.uint8)
    short.segment.dropped = True
    check_equal(store.read(made[0].prefix, made[1].last_tokens(made[1].n)), made[0])


def test_equal_tokens_with_other_rows_are_kept_apart(open_store: Opener) -> None:
    store = open_store()
    decoded = conversation(0, turns=1)[0]
    prefilled = conversation(0, turns=1)[0]
    decoded.segment.rows = decoded.segment.rows ^ 1
    decoded.exact = False
    assert store.write(decoded)
    store.directory.pin(decoded.prefix.name, True)
    assert store.write(prefilled), "what is exact replaces what is not"
    check_read(store, prefilled)
    assert store.write(decoded) == 0
    assert [entry.pinned for entry in store.directory.entries()] == [True]
    check_directory(store)


def test_tokens_decide_not_digests(open_store: Opener) -> None:
    store = open_store()
    made = conversation(0)[0]
    store.write(made)
    other = as_tokens(made.last_tokens(made.n) + 1)
    assert store.read(made.prefix, other) is None
    assert store.read(made.prefix, other[:3]) is None
    assert store.damaged == 0
    check_read(store, made)


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


def test_use_and_pins_decide_who_goes(open_store: Opener, clock: ManualClock) -> None:
    store = open_store()
    pinned, old, used = (conversation(seed, turns=1)[0] for seed in range(3))
    for made in (pinned, old, used):
        store.write(made)
    assert store.directory.pin(pinned.prefix.name, True)
    assert not store.directory.pin("1-0", True)
    clock.advance(3600)
    store.touch(used.prefix)
    one = store.directory.n_bytes // 3
    assert store.directory.prune(2 * one + 50) > 0
    assert not store.contains(old.prefix)
    assert store.directory.prune(0) > 0
    assert [entry.name for entry in store.directory.entries()] == [pinned.prefix.name]
    check_read(store, pinned)
    store.close()
    again = open_store()
    entry = again.directory.entries()[0]
    assert entry.pinned
    assert again.directory.pin(f"model/{entry.name}", False)
    again.directory.prune(0)
    assert on_disk(again.directory.path) == []


def test_interior_states_go_before_ends_and_rows_stay_for_children(open_store: Opener) -> None:
    store = open_store()
    made = conversation(0, turns=1, step=100)
    inner = snapshot(segment(range(4), made[0].segment))
    outer = snapshot(segment(range(100), inner.segment))
    for each in (made[0], inner, outer):
        store.write(each)
    assert [(e.n, e.parent) for e in sorted(store.directory.entries(), key=lambda e: e.n)] == [
        (100, ""),
        (104, made[0].prefix.name),
        (204, inner.prefix.name),
    ]
    store.directory.prune(store.directory.n_bytes - 1)
    assert store.lengths() == {100, 204}
    check_read(store, outer)
    check_directory(store)


def test_remove_takes_only_what_nobody_needs(open_store: Opener) -> None:
    store = open_store()
    first, second = conversation(0, turns=2)
    store.write(first)
    store.write(second)
    assert store.directory.remove(first.prefix.name)
    assert not store.directory.remove(first.prefix.name)
    check_read(store, second)
    check_directory(store)
    assert store.directory.remove(second.prefix.name)
    assert on_disk(store.directory.path) == []


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


def test_other_fingerprints_count_and_go_by_the_same_rule(
    open_store: Opener, clock: ManualClock
) -> None:
    other = open_store("old-model")
    mine = open_store("model", budget=5_000)
    stale = [conversation(seed, turns=1)[0] for seed in range(2)]
    for each in stale:
        other.write(each)
    assert mine.lengths() == set()
    assert mine.read(stale[0].prefix, stale[0].last_tokens(stale[0].n)) is None
    clock.advance(3600)
    fresh = conversation(9, turns=1)[0]
    mine.write(fresh)
    assert {(entry.fingerprint, entry.n) for entry in mine.directory.entries()} == {
        ("model", 20),
        ("old-model", 20),
    }
    check_directory(mine)
    check_read(mine, fresh)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "x" * 200, "ä"])
def test_fingerprints_are_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        DirectStore(tmp_path, name, None)


def test_a_state_with_a_part_that_no_file_has_room_for_stays_in_ram(open_store: Opener) -> None:
    store, (made, *_) = open_store(), conversation(1)
    other = Snapshot(
        made.prefix, made.segment, State({**made.state.parts, "other": made.state.recurrent})
    )
    assert store.write(other) == 0
    assert store.write(made) > 0


def test_writes_that_evict_do_not_read_the_whole_index(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    other = open_store()
    reads = Mock(wraps=Index)
    for name in ("records", "states"):
        monkeypatch.setattr(Index, name, getattr(reads, name))
    store.write(conversation(0)[0])
    store.directory.budget = store.directory.n_bytes * 4
    reads.reset_mock()
    for seed in range(1, 30):
        made = conversation(seed, turns=1)[0]
        assert store.write(made) > 0
        assert store.contains(made.prefix)
        store.touch(made.prefix)
        store.directory.refresh()
    assert reads.method_calls == []
    assert len(store.lengths()) == 1
    other.write(conversation(50, turns=1)[0])
    reads.reset_mock()
    store.write(conversation(51, turns=1)[0])
    assert {name for name, *_ in reads.method_calls} == {"records", "states"}, (
        "what another process wrote is looked at"
    )
    assert store.contains(conversation(50, turns=1)[0].prefix)
    check_directory(store)


def test_what_is_known_of_the_index_is_what_is_in_it(open_store: Opener) -> None:
    choice = random.Random(2)
    stores = [open_store(budget=40_000), open_store(budget=40_000)]
    made = [each for seed in range(12) for each in conversation(seed)]
    for step in range(300):
        store = choice.choice(stores[: 1 + step // 150])
        each = choice.choice(made)
        what = choice.randrange(10)
        if what < 6:
            store.write(each)
        elif what < 8:
            store.touch(each.prefix)
        elif what == 8:
            store.directory.remove(each.prefix.name)
        else:
            store.directory.pin(each.prefix.name, choice.random() < 0.3)
        with store.directory.changing() as transaction:
            graph = transaction.graph
            fresh = FileGraph(Index.records(transaction.connection))
        assert graph.records.keys() == fresh.records.keys()
        assert graph.n_bytes == fresh.n_bytes
        assert {key: record.hits for key, record in graph.records.items()} == {
            key: record.hits for key, record in fresh.records.items()
        }
        states = {record.name for record in fresh.records.values() if record.is_state}
        assert set(store.directory.contents.of("model")) == states
    check_directory(stores[0])
