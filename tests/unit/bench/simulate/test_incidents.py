"""Incidents of a household: each of them happens, and episodes end."""

from __future__ import annotations

from pathlib import Path

from bench.simulate.household import Household
from tests.unit.bench.simulate.test_clients import SESSION


def test_incidents_happen_and_nothing_is_wrong(tmp_path: Path) -> None:
    """Short sessions, so that there is little to do between two incidents."""
    household = Household([SESSION], 3, tmp_path)
    for _ in household.run(6.0):
        continue
    assert household.totals.n_requests > 50
    assert household.log.counts["start"] > 1
    assert household.servers == []
    assert household.n_calls > 1000


def test_the_same_seed_has_the_same_incidents(tmp_path: Path) -> None:
    digests = set()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        household = Household([SESSION], 4, tmp_path / name, until=60)
        for _ in household.run(24.0):
            continue
        assert household.log.step == 60
        digests.add(household.log.digest)
    assert len(digests) == 1
