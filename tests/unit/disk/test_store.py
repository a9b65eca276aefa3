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

from pyctl.cache.segment_pool import SegmentPool
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
    made = Snapshot(made.prefix, made.segment, State.from_parts(state))
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
    pool = SegmentPool()
    short = store.read(made[0].prefix, made[1].last_tokens(made[1].n))
    pool.add_reference(short)
    long = store.read(made[1].prefix, made[1].last_tokens(made[1].n))
    assert long.segment.parent is short.segment
    pool.release(short)
    assert not short.segment.rows.size
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


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "x" * 200, "ä"])
def test_fingerprints_are_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        DirectStore(tmp_path, name, None)


def test_writes_that_evict_do_not_read_the_whole_index(
    open_store: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evictions, touches and refreshes of the only writer read no row of the index again. The index
    is read after a write of another process.
    """
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
    """The graph in memory equals one read afresh from the index after each of 300 random steps of
    one, then two stores, evictions included.
    """
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
        assert set(store.directory.contents.states_of("model")) == states
    check_directory(stores[0])
