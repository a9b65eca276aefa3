"""Statistics of requests and of the cache, and the view of its contents."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyctl.cache.cache_stats import (
    CONTEXT,
    SHOWN,
    CacheStats,
    CacheView,
    Divergence,
    KnownParts,
    RequestStats,
    SnapshotView,
    build_cache_view,
)
from pyctl.cache.plan import MIN_SHARED
from pyctl.cache.ram import RamCache
from pyctl.cache.snapshot import PromptMatch, Segment, Snapshot, State
from pyctl.prompt import Tokens, as_tokens
from tests.unit.cache.steps import TickingStats

TEXT = as_tokens(np.random.default_rng(1).integers(0, 1000, 400))
ROW = 10
STATE = 1000


def following(parent: Segment | None, tokens: Tokens) -> Segment:
    start = parent.end if parent is not None else 0
    return Segment(start, tokens, np.zeros(ROW * tokens.size, np.uint8), parent)


def at(segment: Segment) -> Snapshot:
    probe = Snapshot(PromptMatch(TEXT).prefix(segment.end), segment, State())
    prefix = PromptMatch(probe.last_tokens(segment.end)).prefix(segment.end)
    return Snapshot(prefix, segment, State.from_parts(np.zeros(STATE, np.uint8)))


def forked() -> tuple[RamCache, dict[str, Snapshot]]:
    """Return a cache with a beginning of 100 tokens, and two continuations of it by 50."""
    cache = RamCache(0, None)
    root = following(None, as_tokens(TEXT[:100]))
    left = following(root, as_tokens(TEXT[100:150]))
    right = following(root, as_tokens(TEXT[200:250]))
    made = {"root": at(root), "left": at(left), "right": at(right)}
    for snapshot in made.values():
        assert cache.add(snapshot)
    return cache, made


def view(cache: RamCache, known: KnownParts | None = None, **fields: Any) -> CacheView:
    parts = known if known is not None else KnownParts()
    return build_cache_view(cache, CacheStats(), parts, **fields)


def views(cache: RamCache, **fields: Any) -> dict[str, SnapshotView]:
    return {snapshot.id: snapshot for snapshot in view(cache, **fields).snapshots}


def test_a_divergence_shows_the_tokens_around_it() -> None:
    other = as_tokens([*TEXT[:50], 7, 8])
    miss = Divergence.around(50, 40, TEXT, other)
    assert miss.recent == tuple(TEXT[50 - CONTEXT : 50 + CONTEXT].tolist())
    assert miss.given == (*TEXT[50 - CONTEXT : 50].tolist(), 7, 8)


def test_a_divergence_near_the_beginning_shows_fewer() -> None:
    assert Divergence.around(3, 0, TEXT, TEXT).recent == tuple(TEXT[: 3 + CONTEXT].tolist())


@pytest.mark.parametrize(("lost", "is_by_chance"), [(MIN_SHARED - 1, True), (MIN_SHARED, False)])
def test_what_unrelated_prompts_share_is_lost_by_chance(lost: int, is_by_chance: bool) -> None:
    assert Divergence(1000 + lost, 1000).is_by_chance == is_by_chance


def test_times_of_several_blocks_add_up() -> None:
    stats = TickingStats(0)
    for _ in range(3):
        with stats.timed("save_ms"):
            pass
    assert stats.save_ms == 3000
    assert stats.lookup_ms == 0


def test_saved_snapshots_are_counted_with_their_ids() -> None:
    stats = RequestStats(10)
    stats.count_saved("100-ab", 100)
    stats.count_saved("200-cd", 200)
    assert stats.n_saved == 2
    assert stats.saved == ["100-ab", "200-cd"]


@pytest.mark.parametrize("source", ["none", "live", "ram", "disk"])
def test_requests_are_summed_by_the_tier_that_they_resumed_from(source: Any) -> None:
    totals = CacheStats()
    stats = RequestStats(100, source=source, n_cached=60, n_evaluated=40, n_saved=2)
    totals.add(stats, 8, 1.5)
    totals.add(stats, 8, 1.5)
    assert totals.requests == 2
    assert totals.n_prompt == 200
    assert totals.n_evaluated == 80
    assert totals.n_predicted == 16
    assert totals.n_saved == 4
    assert totals.saved_seconds == 3.0
    expected = {tier: 2 * (tier == source) for tier in ("live", "ram", "disk")}
    assert totals.hits == expected
    assert totals.n_cached == {tier: 60 * n for tier, n in expected.items()}


def test_a_view_counts_the_rows_that_each_snapshot_adds() -> None:
    cache, made = forked()
    shown = views(cache)
    root = shown[made["root"].prefix.name]
    left = shown[made["left"].prefix.name]
    assert root.parent == ""
    assert root.row_bytes == 100 * ROW
    assert left.parent == root.id
    assert left.row_bytes == 50 * ROW
    assert left.state_bytes == STATE
    assert left.device_bytes == 0


def test_a_view_shows_the_beginning_of_the_added_part_and_the_end() -> None:
    cache, made = forked()
    left = views(cache)[made["left"].prefix.name]
    assert left.head == tuple(TEXT[100 : 100 + SHOWN].tolist())
    assert left.tail == tuple(TEXT[150 - SHOWN : 150].tolist())


def test_parents_come_before_their_children() -> None:
    cache, made = forked()
    order = [snapshot.id for snapshot in view(cache).snapshots]
    assert order[0] == made["root"].prefix.name
    assert set(order[1:]) == {made["left"].prefix.name, made["right"].prefix.name}


def test_branches_share_the_tokens_up_to_where_they_part() -> None:
    """Also where there is no snapshot: the rows of both show it."""
    cache, made = forked()
    middle = following(made["left"].segment, as_tokens(TEXT[150:180]))
    first = following(middle, as_tokens(TEXT[180:200]))
    second = following(middle, as_tokens(TEXT[300:320]))
    for segment in (first, second):
        cache.add(at(segment))
    deep = [snapshot for snapshot in view(cache).snapshots if snapshot.n == 200]
    assert [snapshot.shared for snapshot in deep] == [150, 180]


def test_tiers_are_those_that_have_a_part() -> None:
    cache, made = forked()
    segment = made["left"].segment
    segment.held = SimpleNamespace(n_bytes=500, n_cells=50)
    name = made["left"].prefix.name
    assert views(cache)[name].tiers == ("device", "ram")
    assert views(cache)[name].device_bytes == 500
    disk: Any = SimpleNamespace(contains=lambda prefix: prefix.n == 150, view=lambda: None)
    assert views(cache, disk=disk)[name].tiers == ("device", "ram", "disk")
    assert views(cache, disk=disk)[made["root"].prefix.name].tiers == ("ram",)


def test_pins_and_hits_are_shown() -> None:
    cache, made = forked()
    assert cache.pin(made["left"].prefix.name, True)
    cache.touch(made["left"])
    shown = views(cache)[made["left"].prefix.name]
    assert shown.pinned
    assert shown.hits == 1
    assert shown.idle <= shown.age


def test_a_view_is_of_one_moment() -> None:
    cache, _ = forked()
    totals = CacheStats()
    before = build_cache_view(cache, totals, KnownParts())
    totals.requests += 1
    totals.hits["ram"] += 1
    assert before.totals.requests == 0
    assert before.totals.hits["ram"] == 0
    assert before.budget == -1
    assert before.n_bytes == cache.n_bytes


def test_only_snapshots_with_another_parent_are_read_again() -> None:
    cache, made = forked()
    known = KnownParts()
    view(cache, known)
    parts = {name: known[snapshot] for name, snapshot in made.items()}
    view(cache, known)
    assert all(known[made[name]] is part for name, part in parts.items())
    cache.drop(made["root"])
    view(cache, known)
    assert known[made["left"]] is not parts["left"]
    assert known[made["left"]].n_parent == 0


def test_deltas_keep_no_snapshot_alive() -> None:
    cache, made = forked()
    known = KnownParts()
    view(cache, known)
    cache.drop(made.pop("right"))
    assert len(known) == 2
