"""Condemned snapshots are found no more, neither on disk, nor in the queue, nor in a store."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from pyctl.cache.condemned import Condemned
from pyctl.cache.reads import finish
from pyctl.cache.snapshot import PromptMatch, Snapshot
from pyctl.disk.disk import Disk
from pyctl.disk.file_format import StateName
from pyctl.disk.stored_checks import DiskChecks
from pyctl.prompt import as_tokens
from tests.unit.disk.making import conversation
from tests.unit.engine.drive import standing, tier_on


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return tier_on(tmp_path / "kv", min_tokens=1)


def stored(disk: Disk, seed: int) -> list[Snapshot]:
    made = conversation(seed)
    for each in made:
        disk.write(each)
    assert disk.flush(60)
    return made


def match_of(snapshot: Snapshot) -> PromptMatch:
    return PromptMatch(as_tokens([*snapshot.last_tokens(snapshot.n), 1, 2]))


def test_stored_snapshots_can_be_listed_and_opened(disk: Disk) -> None:
    made = stored(disk, 3)
    assert set(disk.checks.prefixes()) == {each.prefix for each in made}
    source = finish(disk.checks.source(made[-1].prefix))
    assert source is not None
    assert source.snapshot.n == made[-1].n


def test_nothing_is_found_until_the_files_have_moved(disk: Disk) -> None:
    made = stored(disk, 3)
    others = stored(disk, 8)
    with standing(disk):
        disk.checks.condemn(Condemned((made[0].prefix,), tuple(made[0].chain)))
        assert disk.checks.is_in_doubt
        assert disk.find(match_of(others[-1]), 1000) == []
        assert disk.checks.prefixes() == []
    assert disk.flush(60)
    assert not disk.checks.is_in_doubt
    assert disk.find(match_of(made[-1]), 1000) == []
    assert disk.find(match_of(others[-1]), 1000)[0] == others[-1].prefix


def test_a_condemned_snapshot_that_waits_is_not_written(disk: Disk) -> None:
    made = conversation(3)
    with standing(disk):
        for each in made:
            disk.write(each)
        disk.checks.condemn(Condemned(segments=(made[1].segment,)))
    assert disk.flush(60)
    assert disk.checks.prefixes() == [made[0].prefix]


def test_a_condemned_snapshot_is_not_fetched_again(disk: Disk) -> None:
    made = stored(disk, 3)
    remote = Mock()
    checks = DiskChecks(disk.reader, disk.queue, remote)
    checks.condemn(Condemned((made[0].prefix,), tuple(made[0].chain)))
    assert disk.flush(60)
    excluded = {call.args[0] for call in remote.exclude.call_args_list}
    assert excluded == {StateName.from_prefix(each.prefix) for each in made}
