"""Snapshots that share anything with one that is wrong are in doubt."""

from __future__ import annotations

import pytest

from pyctl.cache.condemned import Condemned
from pyctl.cache.snapshot import Snapshot
from tests.unit.cache.snapshots import snapshot


@pytest.fixture
def tree() -> list[Snapshot]:
    """A head, two that build on it, and a stranger."""
    head = snapshot(1, 100)
    return [
        head,
        snapshot(1, 200, head.segment),
        snapshot(1, 300, head.segment),
        snapshot(3, 100),
    ]


def in_doubt(condemned: Condemned, tree: list[Snapshot]) -> list[bool]:
    return [condemned.includes(each) for each in tree]


def test_what_shares_a_segment_is_in_doubt_and_the_rest_is_not(tree: list[Snapshot]) -> None:
    head, longer, *_ = tree
    assert in_doubt(Condemned(segments=tuple(head.chain)), tree) == [True, True, True, False]
    assert in_doubt(Condemned(segments=(longer.segment,)), tree) == [False, True, False, False]


def test_a_prefix_alone_is_only_its_snapshot(tree: list[Snapshot]) -> None:
    condemned = Condemned(prefixes=(tree[1].prefix,))
    assert in_doubt(condemned, tree) == [False, True, False, False]


def test_segments_of_one_file_are_one(tree: list[Snapshot]) -> None:
    """Rows that were read twice are two segments."""
    head, *_, stranger = tree
    head.segment.file.name = "a file"
    stranger.segment.file.name = "a file"
    condemned = Condemned(segments=(stranger.segment,))
    assert in_doubt(condemned, tree) == [True] * 4
    assert condemned.file_names == {"a file"}


def test_segments_without_a_file_are_not_one(tree: list[Snapshot]) -> None:
    condemned = Condemned(segments=(tree[3].segment,))
    assert in_doubt(condemned, tree) == [False, False, False, True]


def test_a_damaged_file_puts_nothing_in_ram_in_doubt(tree: list[Snapshot]) -> None:
    assert in_doubt(Condemned(file="1-2.rows"), tree) == [False] * 4
