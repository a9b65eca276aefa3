"""The graph of files: which of them depend on each other, and which are evicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.disk.file_format import SegmentName, StateName
from pyctl.disk.graph import FileGraph
from pyctl.disk.index import Key, Record
from tests.unit.cache.grown import SHAPES, Held, grown


def records_of(held: list[Held], data: st.DataObject) -> list[Record]:
    """Return a record of each segment's file and of each state's."""
    found = []
    rows: dict[int, SegmentName] = {}
    for key, one in enumerate(held):
        parent = next((at for at in one.chain if at != key), None)
        start = one.chain[parent] if parent is not None else 0
        rows[key] = SegmentName(start, one.n, key.to_bytes(16, "big"), bytes(8))
        above = rows[parent] if parent is not None else None
        found.append(Record("f", rows[key], (one.n - start) * 4, above, True, 0.0, one.used))
        name = StateName(one.n, key.to_bytes(16, "big"))
        size = data.draw(st.integers(1, 100))
        pinned = st.booleans()
        found.append(Record("f", name, size, rows[key], True, 0.0, one.used, 0, data.draw(pinned)))
    return found


@given(SHAPES, st.data())
def test_disk_keeps_pinned_and_protected_within_its_budget(
    shapes: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    """Eviction never removes a pinned or protected state or a file that one needs, evicts nothing
    that would still fit, and keeps the sums of bytes right, for any graph and falling budgets.
    """
    graph = FileGraph(records_of(grown(shapes), data))
    states = [record for record in graph.records.values() if record.is_state]
    pinned: set[Key] = {record.key for record in states if record.pinned}
    protected = {record.key for record in states if data.draw(st.booleans())}
    budgets = sorted(
        data.draw(st.lists(st.integers(0, graph.n_bytes), min_size=1, max_size=4)), reverse=True
    )
    for budget in budgets:
        before = graph.n_bytes
        files = set(graph.records)
        going = graph.shrink(budget, protected)
        assert graph.n_bytes == sum(record.n_bytes for record in graph.records.values())
        assert graph.n_bytes == before - sum(record.n_bytes for record in going)
        assert {record.key for record in going} == files - graph.records.keys()
        assert pinned | protected <= graph.records.keys()
        assert not graph.invalid_keys()
        left = [record.key for record in graph.records.values() if record.is_state]
        assert graph.n_bytes <= budget or all(key in pinned | protected for key in left)
        assert graph.shrink(budget, protected) == [], "no more than it had to"
        assert sum(graph.added().values()) == graph.n_bytes
        gone = {record.key: record for record in going}
        for at in (record for record in going if record.is_state and graph.n_bytes <= budget):
            n_bytes = graph.n_bytes
            while at is not None:
                n_bytes = n_bytes + at.n_bytes
                at = gone.get(at.parent_key)
            assert n_bytes > budget, "what would fit after all stays"


def rows(start: int, end: int, parent: SegmentName | None = None, tag: int = 0) -> Record:
    """Return the record of a segment's file of 4 bytes a token."""
    name = SegmentName(start, end, end.to_bytes(16, "big"), tag.to_bytes(8, "big"))
    return Record("f", name, 4 * (end - start), parent, True, 0.0, 0.0)


def state(n: int, parent: Record, **fields: Any) -> Record:
    """Return the record of a state's file of 10 bytes at ``n``, on the rows ``parent``."""
    assert isinstance(parent.name, SegmentName)
    name = StateName(n, n.to_bytes(16, "big"))
    return Record("f", name, 10, parent.name, True, 0.0, 0.0, **fields)


def child(start: int, end: int, parent: Record, tag: int = 0) -> Record:
    """Return the record of the rows that follow those of ``parent``."""
    assert isinstance(parent.name, SegmentName)
    return rows(start, end, parent.name, tag)


ROOT = rows(0, 10)
LEFT = child(10, 20, ROOT)
RIGHT = child(10, 30, ROOT, tag=1)
AT_LEFT = state(20, LEFT)
AT_RIGHT = state(30, RIGHT)
FORK = (ROOT, LEFT, RIGHT, AT_LEFT, AT_RIGHT)
"""Two conversations with one beginning."""


def test_a_chain_is_the_nearest_segment_first() -> None:
    graph = FileGraph(FORK)
    assert graph.chain(AT_LEFT.key) == [LEFT.key, ROOT.key]
    assert graph.chain(ROOT.key) == []
    assert graph.chain(("other", AT_LEFT.name)) == []


def test_a_removal_takes_what_nothing_else_needs() -> None:
    graph = FileGraph(FORK)
    assert {record.key for record in graph.remove(AT_LEFT.key)} == {AT_LEFT.key, LEFT.key}
    assert graph.records.keys() == {ROOT.key, RIGHT.key, AT_RIGHT.key}
    assert {record.key for record in graph.remove(AT_RIGHT.key)} == graph_keys(
        ROOT, RIGHT, AT_RIGHT
    )
    assert graph.n_bytes == 0


def graph_keys(*records: Record) -> set[Key]:
    return {record.key for record in records}


def test_the_removal_of_a_segment_takes_its_dependents() -> None:
    graph = FileGraph(FORK)
    assert {record.key for record in graph.remove(ROOT.key)} == graph_keys(*FORK)
    assert graph.remove(ROOT.key) == []


@pytest.mark.parametrize(
    ("records", "invalid"),
    [
        (FORK, ()),
        ((ROOT, LEFT), (ROOT, LEFT)),
        ((LEFT, AT_LEFT), (LEFT, AT_LEFT)),
        ((ROOT, LEFT, RIGHT, AT_LEFT), (RIGHT,)),
        ((AT_LEFT,), (AT_LEFT,)),
    ],
    ids=["whole", "no state", "no beginning", "an unused branch", "a state alone"],
)
def test_files_that_no_whole_state_needs_are_invalid(
    records: tuple[Record, ...], invalid: tuple[Record, ...]
) -> None:
    assert FileGraph(records).invalid_keys() == graph_keys(*invalid)


def test_a_file_takes_the_place_of_one_of_its_name() -> None:
    graph = FileGraph(FORK)
    graph.build_tree()
    n_before = graph.n_bytes
    graph.add(replace(AT_LEFT, n_bytes=25, hits=3))
    assert graph.n_bytes == n_before + 15
    assert graph.records[AT_LEFT.key].hits == 3
    assert not graph.invalid_keys()


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_use_is_counted(is_prepared: bool) -> None:
    graph = FileGraph(FORK)
    if is_prepared:
        graph.build_tree()
    graph.touch(AT_LEFT.key, 50.0)
    graph.touch(("other", AT_LEFT.name), 60.0)
    assert graph.records[AT_LEFT.key] == replace(AT_LEFT, hits=1, used=50.0)
    assert graph.records[AT_RIGHT.key] == AT_RIGHT


def test_the_ancestor_is_the_deepest_shallower_state_of_the_chain() -> None:
    inner = state(10, ROOT)
    graph = FileGraph([*FORK, inner])
    assert graph.ancestor(AT_LEFT) == inner
    assert graph.ancestor(AT_RIGHT) == inner
    assert graph.ancestor(inner) is None


def test_shared_segments_count_for_the_shallowest_state() -> None:
    added = FileGraph(FORK).added()
    assert added == {AT_LEFT.key: 10 + 40 + 40, AT_RIGHT.key: 10 + 80}


def test_files_of_older_rules_go_first() -> None:
    old_rows = replace(ROOT, fingerprint="old")
    old = replace(state(10, ROOT), fingerprint="old", used=1e9, hits=100)
    graph = FileGraph([*FORK, old_rows, old], frozenset({"old"}))
    assert {record.key for record in graph.shrink(graph.n_bytes - 1)} == graph_keys(old_rows, old)
    assert graph.shrink(graph.n_bytes) == []
