"""Files in doubt leave the directory with all that needs them; a few are kept, within limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.cache.condemned import Condemned
from pyctl.cache.snapshot import Prefix, Snapshot
from pyctl.disk.file_format import StateName
from pyctl.disk.model_folder import AUXILIARY_SHARE
from pyctl.disk.quarantine import MAX_CASES, Quarantine
from tests.unit.disk.making import DirectStore, check_read, conversation


def condemned_of(snapshot: Snapshot, **report: str) -> Condemned:
    return Condemned((snapshot.prefix,), tuple(snapshot.chain), report=report)


def names_in(case: Path, suffix: str) -> list[str]:
    return sorted(path.name for path in case.glob(f"*{suffix}"))


def test_all_that_needs_a_file_in_doubt_leaves_the_directory(
    store: DirectStore, made: list[Snapshot]
) -> None:
    """Snapshots that continue a damaged one go with it, others stay readable; the case keeps the
    files of the damaged chain alone, for a report.
    """
    others = conversation(8)
    for each in others:
        store.write(each)
    quarantine = Quarantine(store.folder)
    removed = quarantine.keep(condemned_of(made[1], about="a name"))
    states = {record.name for record in removed if record.is_state}
    assert states == {StateName.from_prefix(each.prefix) for each in made}
    assert not any(store.contains(each.prefix) for each in made)
    for each in others:
        check_read(store, each)
    (case,) = quarantine.cases()
    assert names_in(case, ".state") == [str(StateName.from_prefix(made[1].prefix))]
    assert len(names_in(case, ".rows")) == 2, "those of its chain, not of what continues it"
    report = json.loads((case / "report.json").read_text())
    assert report == {"about": "a name", "files_removed": len(removed)}
    assert store.directory.verify().is_consistent


def test_kept_files_are_private_and_count_in_the_budget(
    store: DirectStore, made: list[Snapshot]
) -> None:
    before = store.directory.n_bytes
    quarantine = Quarantine(store.folder)
    quarantine.keep(condemned_of(made[-1]))
    (case,) = quarantine.cases()
    kept = sum(path.stat().st_size for path in case.iterdir())
    assert 0 < store.directory.auxiliary_bytes() == kept
    assert store.directory.n_bytes < before + kept
    assert case.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in case.iterdir()} == {0o600}


def test_a_damaged_file_goes_with_those_that_need_it(
    store: DirectStore, made: list[Snapshot]
) -> None:
    name = made[1].segment.file.name
    Quarantine(store.folder).keep(Condemned(file=str(name)))
    assert [store.contains(each.prefix) for each in made] == [True, False, False]
    check_read(store, made[0])
    (case,) = Quarantine(store.folder).cases()
    assert names_in(case, ".rows") == [str(name)]


def test_names_that_no_file_has_are_no_error(store: DirectStore, made: list[Snapshot]) -> None:
    condemned = Condemned((Prefix(bytes(16), 7),), file="none of ours")
    assert Quarantine(store.folder).keep(condemned) == []
    for each in made:
        check_read(store, each)


def test_only_the_newest_cases_are_kept(store: DirectStore) -> None:
    quarantine = Quarantine(store.folder)
    for seed in range(MAX_CASES + 3):
        snapshots = conversation(seed + 20)
        for each in snapshots:
            store.write(each)
        quarantine.keep(condemned_of(snapshots[-1], about=f"{seed}"))
    reports = [json.loads((case / "report.json").read_text()) for case in quarantine.cases()]
    assert [report["about"] for report in reports] == ["3", "4", "5", "6"]
    assert len(reports) == MAX_CASES


@pytest.mark.parametrize("n_budget", [AUXILIARY_SHARE * 2500, AUXILIARY_SHARE * 100])
def test_the_bytes_that_are_kept_are_bounded(
    open_store: Callable[..., DirectStore], n_budget: int
) -> None:
    store = open_store(budget=n_budget)
    quarantine = Quarantine(store.folder)
    for seed in range(MAX_CASES):
        snapshots = conversation(seed + 20, turns=1)
        store.write(snapshots[-1])
        quarantine.keep(condemned_of(snapshots[-1]))
    files = [
        path for case in quarantine.cases() for path in case.iterdir() if path.suffix != ".json"
    ]
    assert sum(path.stat().st_size for path in files) <= n_budget // AUXILIARY_SHARE
    assert (quarantine.cases()[-1] / "report.json").is_file()


def test_a_check_of_the_directory_leaves_the_quarantine_alone(
    store: DirectStore, made: list[Snapshot]
) -> None:
    quarantine = Quarantine(store.folder)
    quarantine.keep(condemned_of(made[-1]))
    (case,) = quarantine.cases()
    files = sorted(case.iterdir())
    store.directory.recover()
    report = store.directory.verify(fix=True)
    assert report.is_consistent
    assert report.foreign == []
    assert sorted(case.iterdir()) == files
