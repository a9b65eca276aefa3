"""The choice of snapshots and places."""

from __future__ import annotations

from collections import Counter

from pyctl.cache.snapshot import Prefix
from pyctl.engine.canary.targets import MAX_REMEMBERED, Target, TargetChoice, find_targets
from tests.unit.engine.canary.bench import CanaryBench

TARGETS = [Target(Prefix(bytes([n]), n), "ram") for n in range(1, 21)]


def test_a_seed_repeats_the_order() -> None:
    orders = [list(TargetChoice(seed).in_order(TARGETS)) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0], key=TARGETS.index) == TARGETS, "each comes once"


def test_targets_that_were_not_checked_are_likelier() -> None:
    choice = TargetChoice(seed=3)
    for target in TARGETS[:10]:
        choice.record(target)
    firsts = Counter(next(choice.in_order(TARGETS)) in TARGETS[:10] for _ in range(400))
    assert 0 < firsts[True] < firsts[False] / 8


def test_what_is_remembered_is_bounded() -> None:
    choice = TargetChoice(seed=4)
    for n in range(MAX_REMEMBERED + 5):
        choice.record(Target(Prefix(b"", n), "ram"))
    assert choice.n_remembered == MAX_REMEMBERED


def test_a_snapshot_counts_for_each_place_that_has_its_rows() -> None:
    bench = CanaryBench("hybrid")
    bench.talk()
    (first, *_) = bench.snapshots
    found = find_targets(bench.cache, None, has_rows=True)
    places = {target.place for target in found if target.prefix == first.prefix}
    assert places == {"device", "ram"}
    for segment in first.chain:
        bench.cache.index.pool.drop_ram_copy(segment)
    found = find_targets(bench.cache, None, has_rows=True)
    assert [target.place for target in found if target.prefix == first.prefix] == ["device"]


def test_a_snapshot_without_rows_is_its_state() -> None:
    bench = CanaryBench("opaque")
    bench.talk()
    found = find_targets(bench.cache, None, has_rows=False)
    assert {target.place for target in found} == {"ram"}
    assert len(found) == len(bench.snapshots)
