"""Parts of a draft model in cache files: a server with that draft model restores them, others skip
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.snapshot import NOTHING, Segment, Snapshot
from pyctl.disk.file_format import PartKind
from pyctl.disk.segment_files import read_header
from tests.unit.disk.lies import RawFile
from tests.unit.disk.making import (
    DRAFT_BASE,
    DRAFT_ROW,
    DRAFT_STATE,
    ROW,
    DirectStore,
    check_directory,
    check_equal,
    check_read,
    conversation,
    drafting,
    on_disk,
    segment,
    snapshot,
)

Opener = Callable[..., DirectStore]

PLAIN = BlockSizes(0, ROW, 500)

DRAFTS = BlockSizes(0, ROW, 500, DRAFT_BASE, DRAFT_ROW, DRAFT_STATE)

OTHERS = BlockSizes(0, ROW, 500, DRAFT_BASE, DRAFT_ROW + 2, DRAFT_STATE + 4)


@pytest.fixture
def plain() -> list[Snapshot]:
    return conversation(3)


@pytest.fixture
def made(plain: list[Snapshot]) -> list[Snapshot]:
    return drafting(plain)


def write(store: DirectStore, snapshots: list[Snapshot]) -> None:
    for each in snapshots:
        assert store.write(each) > 0


def chunks_of(path: Path, what: PartKind) -> tuple[int, int]:
    """Return the span of bytes of a part in a file."""
    header = read_header(path)
    n_before = sum(len(part.chunks) for part in header.parts if part.kind < what)
    n_with = sum(len(part.chunks) for part in header.parts if part.kind <= what)
    return header.offsets[n_before], header.offsets[n_with]


def harm_drafts(store: DirectStore) -> None:
    """Flip a byte of every draft model's part."""
    for path in on_disk(store.directory.path):
        what = PartKind.DRAFT_ROWS if path.suffix == ".rows" else PartKind.DRAFT_STATE
        first, last = chunks_of(path, what)
        assert first < last
        data = bytearray(path.read_bytes())
        data[first] ^= 1
        path.write_bytes(data)


def test_a_model_of_rows_alone_has_a_state_of_its_draft_model_alone(open_store: Opener) -> None:
    (made,) = drafting([snapshot(segment(range(30)), state=0)])
    sizes = replace(DRAFTS, state=0)
    assert made.state.parts.keys() == {"draft"}
    write(open_store(sizes=sizes), [made])
    check_read(open_store(sizes=sizes), made)
    back = open_store(sizes=replace(PLAIN, state=0)).read(made.prefix, made.last_tokens(made.n))
    assert not back.state.parts


@pytest.mark.parametrize("sizes", [PLAIN, OTHERS])
def test_unused_draft_parts_are_not_read(
    open_store: Opener, plain: list[Snapshot], made: list[Snapshot], sizes: BlockSizes
) -> None:
    write(open_store(sizes=DRAFTS), made)
    space = Mock(side_effect=lambda size: np.empty(size, np.uint8))
    store = open_store(sizes=sizes, space=space)
    assert store.directory.verify().is_consistent
    harm_drafts(store)
    for each in plain:
        check_read(store, each)
    assert store.damaged == 0
    assert {each.args for each in space.call_args_list} == {(500,), (20 * ROW,)}, "no memory either"
    assert not store.directory.verify().is_consistent, "who looks at every byte sees it"


def test_who_has_a_draft_model_takes_files_that_have_none(
    open_store: Opener, plain: list[Snapshot], made: list[Snapshot]
) -> None:
    write(open_store(sizes=PLAIN), plain)
    store = open_store(sizes=DRAFTS)
    for each in plain:
        check_read(store, each)
    assert [store.write(each) for each in made] == [0, 0, 0], "what is there is not written again"
    check_directory(store)


def test_a_conversation_goes_on_in_the_same_files_with_and_without(
    open_store: Opener, made: list[Snapshot]
) -> None:
    """A conversation is continued with and without drafts in turn: each time only the new segment
    and state are written, and the spans list which parts have draft rows.
    """
    write(open_store(sizes=DRAFTS), made[:1])
    plain = open_store(sizes=PLAIN)
    first = plain.read(made[0].prefix, made[0].last_tokens(made[0].n))
    longer = snapshot(segment(range(50, 90), first.segment))
    write(plain, [longer])
    assert len(on_disk(plain.directory.path)) == 4, (
        "one segment and one state more: nothing is stored twice"
    )

    store = open_store(sizes=DRAFTS)
    second = store.read(longer.prefix, longer.last_tokens(longer.n))
    tokens = longer.last_tokens(longer.n)[:10]
    last = Segment(60, tokens, segment(range(10)).rows, second.segment, (70,), draft_rows=NOTHING)
    rows = np.arange(DRAFT_BASE + 10 * DRAFT_ROW, dtype=np.uint8)
    end = snapshot(replace(last, draft_rows=rows))
    write(store, [end])
    check_directory(store)
    found = open_store(sizes=DRAFTS).read(end.prefix, end.last_tokens(end.n))
    sizes = [(saved.draft.size, first, last) for saved, first, last in found.spans(0, 70)]
    assert sizes == [(DRAFT_BASE + 20 * DRAFT_ROW, 0, 20), (0, 20, 60), (rows.size, 60, 70)]
    assert (found.spans(65, 70)[0][0].draft == rows).all()


@pytest.mark.parametrize("what", [PartKind.DRAFT_ROWS, PartKind.DRAFT_STATE])
def test_damage_in_them_is_damage(open_store: Opener, made: list[Snapshot], what: PartKind) -> None:
    store = open_store(sizes=DRAFTS)
    write(store, made)
    last = made[-1]
    suffix = ".rows" if what == PartKind.DRAFT_ROWS else ".state"
    for n in range(1, 9):
        path = max(p for p in on_disk(store.directory.path) if p.suffix == suffix)
        first, end = chunks_of(path, what)
        data = bytearray(path.read_bytes())
        data[first + (end - first) * n // 9] ^= 1 << n % 8
        path.write_bytes(data)
        assert store.read(last.prefix, last.last_tokens(last.n)) is None
        assert store.damaged == n
        assert store.write(last) > 0
    check_equal(store.read(last.prefix, last.last_tokens(last.n)), last)
    check_directory(store)


@pytest.mark.parametrize("suffix", [".rows", ".state"])
@pytest.mark.parametrize("kinds", [[5, 6], [6, 5], [5, 5], [6, 6], [7]])
def test_other_parts_are_damage(
    open_store: Opener, made: list[Snapshot], suffix: str, kinds: list[int]
) -> None:
    store = open_store(sizes=DRAFTS)
    write(store, made[:1])
    path = next(path for path in on_disk(store.directory.path) if path.suffix == suffix)
    file = RawFile.read(path)
    draft = file.parts.pop()
    file.parts += [replace(draft, what=kind) for kind in kinds]
    path.write_bytes(file.pack())
    assert path.name in "".join(store.directory.verify().broken)
    assert store.read(made[0].prefix, made[0].last_tokens(made[0].n)) is None
    assert store.damaged == 1
