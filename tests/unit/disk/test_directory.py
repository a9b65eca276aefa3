"""A cache directory: its entries, pins, removals, and what counts towards its budget."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from pyctl.cache.snapshot import Snapshot
from pyctl.disk.directory import CacheDirectory
from pyctl.disk.index import Index
from pyctl.disk.model_folder import ModelFolder
from pyctl.disk.writer import StoreWriter
from tests.unit.disk.making import (
    DirectStore,
    check_directory,
    check_read,
    conversation,
    on_disk,
    segment,
    snapshot,
)
from tests.unit.engine.drive import ManualClock

Opener = Callable[..., DirectStore]


def test_use_and_pins_decide_who_goes(open_store: Opener, clock: ManualClock) -> None:
    """Pruning takes the least recently used first and never a pinned snapshot, not even for a
    budget of zero. A pin survives a restart, and its end lets the files go.
    """
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


def test_other_fingerprints_count_and_go_by_the_same_rule(
    open_store: Opener, clock: ManualClock
) -> None:
    """Snapshots of another model are no hits, but their bytes count in the shared budget, and the
    older ones of them are evicted for a new one of this model.
    """
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


def test_what_lies_beside_counts_towards_the_budget(open_store: Opener) -> None:
    store = open_store(budget=12_000)
    (store.home / "replies").write_bytes(bytes(6_000))
    for seed in range(8):
        made = conversation(seed, turns=1)[0]
        assert store.write(made) > 0
        assert (
            sum(path.stat().st_size for path in on_disk(store.directory.path))
            == store.directory.n_bytes
            <= 12_000
        )
    assert (store.home / "replies").exists()
    store.directory.prune(7_000)
    assert store.directory.n_bytes <= 7_000


def test_what_another_process_wrote_is_found_after_a_look(
    open_store: Opener, made: list[Snapshot]
) -> None:
    one = open_store()
    other = open_store()
    one.write(made[0])
    assert not other.contains(made[0].prefix)
    other.directory.refresh()
    check_read(other, made[0])
    one.directory.remove(made[0].prefix.name)
    assert other.read(made[0].prefix, made[0].last_tokens(made[0].n)) is None
    assert not other.contains(made[0].prefix)
    assert other.damaged == 0, "it was only evicted"


def test_days_and_ages_follow_the_clock_that_was_handed_in(tmp_path: Path) -> None:
    now = 86_400.0 * 100 + 43_200
    directory = CacheDirectory(tmp_path / "cache", clock=lambda: now)
    writer = StoreWriter(ModelFolder(directory, "model"))
    with closing(directory):
        first, second = (conversation(seed, turns=1)[0] for seed in (1, 2))
        list(writer.write(first))
        with directory.reading() as connection:
            assert Index.written_today(connection, now) == directory.contents.file_bytes
        now += 86_400
        with directory.reading() as connection:
            assert Index.written_today(connection, now) == 0
        list(writer.write(second))
        created = {entry.name: entry.created for entry in directory.entries()}
    assert created[second.prefix.name] - created[first.prefix.name] == 86_400
