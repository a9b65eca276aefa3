"""A wrong snapshot leaves RAM with all that shares rows with it, and a report stays."""

from __future__ import annotations

import logging

import pytest

from pyctl.engine.canary.canary_counts import CanaryCounts
from pyctl.engine.canary.recheck import Measurement, RecheckPlan
from pyctl.engine.canary.removal import Removal
from pyctl.engine.canary.targets import Target
from pyctl.errors import DamagedError
from tests.unit.cache.checks import check_invariants
from tests.unit.engine.canary.bench import CanaryBench
from tests.unit.engine.messages import chat

PLAN = RecheckPlan(300, None, (364, 400))

STRANGER = chat((7, 160), (6, 100))


@pytest.fixture
def bench() -> CanaryBench:
    bench = CanaryBench("attention")
    bench.talk()
    assert bench.ask(STRANGER).error is None
    return bench


def removal_of(bench: CanaryBench) -> tuple[Removal, CanaryCounts]:
    counts = CanaryCounts()
    return Removal(bench.engine.prefix_cache, counts), counts


@pytest.mark.parametrize(
    ("wrong", "part", "first", "last"),
    [(0, "rows", 300, 364), (1, "rows", 364, 400), (2, "state", 364, 400)],
)
def test_a_report_names_the_first_difference(
    bench: CanaryBench, wrong: int, part: str, first: int, last: int
) -> None:
    snapshot = max(bench.snapshots, key=lambda each: each.n)
    target = Target(snapshot.prefix, "ram")
    evaluated = tuple(b"other" if i >= wrong else b"same" for i in range(3))
    removal, counts = removal_of(bench)
    removal.remove_snapshot(target, snapshot, PLAN, Measurement((b"same",) * 3, evaluated))
    (report,) = counts.reports
    assert report["snapshot"] == snapshot.prefix.name
    assert report["place"] == "ram"
    assert report["differs"] == part
    assert report["first"] == first
    assert report["last"] == last
    assert report["evaluated_digest"] == b"other".hex()
    assert counts.differing == {"ram": 1}


def test_all_that_shares_rows_leaves_ram(
    bench: CanaryBench, caplog: pytest.LogCaptureFixture
) -> None:
    """Pins and prompt ends do not keep a damaged row in use; snapshots without shared rows stay."""
    snapshot = max(bench.snapshots, key=lambda each: each.n)
    bench.cache.pin(bench.snapshots[0].prefix.name, True)
    strangers = [each for each in bench.snapshots if not set(each.chain) & set(snapshot.chain)]
    measured = Measurement((b"a", b"b", b"c"), (b"a", b"b", b"x"))
    removal, counts = removal_of(bench)
    with caplog.at_level(logging.ERROR):
        condemned = removal.remove_snapshot(
            Target(snapshot.prefix, "device"), snapshot, PLAN, measured
        )
    assert strangers
    assert bench.snapshots == strangers
    assert not any(condemned.includes(end) for end in bench.cache.prompt_ends)
    assert not bench.cache.index.pinned
    assert counts.reports[0]["snapshots_dropped"] > 0
    assert "is quarantined" in caplog.text
    check_invariants(bench.cache)


def test_a_damaged_file_leaves_ram_alone(bench: CanaryBench) -> None:
    before = bench.snapshots
    removal, counts = removal_of(bench)
    error = DamagedError("0-9.rows", "wrong checksum in the rows")
    removal.remove_file(Target(before[0].prefix, "disk"), error)
    assert bench.snapshots == before
    assert counts.differing == {"disk": 1}
    assert counts.reports[0]["file"] == "0-9.rows"
