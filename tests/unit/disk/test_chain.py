"""Chains of files: their names, and the checks of what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from pyctl.cache.snapshot import Snapshot, State
from pyctl.disk.chain import ChainNames, open_chain, segment_blocks
from pyctl.disk.file_format import PartKind, SegmentName, StateName
from pyctl.errors import NotWrittenError
from tests.unit.disk.making import (
    DirectStore,
    check_equal,
    conversation,
    opened,
    segment,
    snapshot,
)

Opener = Callable[..., DirectStore]


def test_names_are_those_of_a_process_that_knows_nothing(
    open_store: Opener, tmp_path: Path
) -> None:
    store = open_store()
    other = open_store(directory=tmp_path / "other")
    made = conversation(2, turns=4)
    for each in made:
        store.write(each)
    other.write(conversation(2, turns=4)[-1])
    names = [
        sorted(path.name for path in at.rglob("*.rows"))
        for at in (tmp_path / "cache", tmp_path / "other")
    ]
    assert names[0] == names[1]
    assert all(
        link.file.is_there and isinstance(link.file.name, SegmentName) for link in made[-1].chain
    )


def test_rows_of_another_way_to_the_same_tokens_stay_apart(open_store: Opener) -> None:
    """A reply's rows were evaluated token by token: a state depends on them and not on those of a
    prompt.
    """
    first = segment(range(20))
    reply = segment(range(100, 120), first)
    reply.batch_ends = ()
    made = snapshot(reply, exact=False)
    store = open_store()
    store.write(made)
    prompt = segment(range(100, 120), segment(range(20)))
    base = Snapshot(made.prefix, prompt, State())
    found = opened(open_store(), made, base)
    check_equal(found, made)
    links = list(found.chain)
    assert links[0] is not prompt
    assert links[1] is prompt.parent, "but what both began with is shared"


def test_the_parts_of_a_segment_are_bytes() -> None:
    made = segment(range(20))
    blocks = segment_blocks(made)
    assert blocks.keys() == {PartKind.TOKENS, PartKind.ENDS, PartKind.ROWS}
    assert blocks[PartKind.TOKENS].view("<i4").tolist() == list(range(20))
    assert blocks[PartKind.ENDS].view("<u4").tolist() == [10, 20]
    assert blocks[PartKind.ROWS] is made.rows
    made.draft_rows = np.ones(7, np.uint8)
    assert segment_blocks(made)[PartKind.DRAFT_ROWS].size == 7


def test_the_missing_segments_are_those_above_the_deepest_one_on_disk() -> None:
    made = conversation(1)[-1]
    names = ChainNames(made, lambda name: False)
    assert names.missing == list(reversed(made.chain))
    first = names.missing[0]
    for each in names.missing:
        _, parent = names.name(each)
        assert parent == (names.chain[-2] if len(names.chain) > 1 else None)
    assert [name.end for name in names.chain] == [20, 40, 60]
    again = ChainNames(made, lambda name: name == first.file.name)
    assert again.missing == names.missing[1:]
    assert again.chain == [first.file.name]


def test_a_segment_has_one_name_for_ever() -> None:
    made = conversation(1)[-1]
    runs = []
    for _ in range(2):
        names = ChainNames(made, lambda name: False)
        runs.append([names.name(each) for each in names.missing])
    assert runs[0] == runs[1]


def test_other_rows_ends_or_parents_are_another_name() -> None:
    tokens = range(20)
    plain = segment(tokens)
    other_rows = segment(tokens)
    other_rows.rows = other_rows.rows ^ 1
    other_ends = segment(tokens)
    other_ends.batch_ends = (5, 20)
    drafted = segment(tokens)
    drafted.draft_rows = np.ones(9, np.uint8)
    found = []
    for each in (plain, other_rows, other_ends, drafted):
        name, _ = ChainNames(snapshot(each), lambda name: False).name(each)
        found.append(name)
    assert len({name.digest for name in found}) == 1, "the tokens are the same"
    assert len({name.tag for name in found}) == 3
    assert found[0] == found[3], "a server without the draft model uses the same file"


def test_rows_that_were_dropped_have_no_name() -> None:
    made = conversation(1)[-1]
    names = ChainNames(made, lambda name: False)
    names.missing[0].drop()
    with pytest.raises(NotWrittenError, match="rows before 20 were dropped"):
        names.name(names.missing[0])


def test_a_chain_is_opened_with_its_tokens(store: DirectStore, made: list[Snapshot]) -> None:
    last = made[-1]
    top, chain, tokens = open_chain(store.home, StateName.from_prefix(last.prefix), None, run)
    assert tokens.tolist() == last.last_tokens(last.n).tolist()
    assert [(each.start, each.last) for each in chain] == [(0, 20), (20, 40), (40, 60)]
    assert [each.batch_ends for each in chain] == [link.batch_ends for link in reversed(last.chain)]
    assert top.last == 60
    assert top.start == 0


def run(jobs: Iterable[Callable[[], None]]) -> None:
    for job in jobs:
        job()


def test_large_parts_have_memory_once_it_is_made(store: DirectStore, made: list[Snapshot]) -> None:
    last = made[-1]
    top, chain, _ = open_chain(store.home, StateName.from_prefix(last.prefix), None, run)
    assert chain[0].segment(None).rows.size == 0
    run(chain[0].make_space(lambda size: np.zeros(size, np.uint8), None))
    assert chain[0].large_bytes == last.segment_at(1).rows.nbytes
    assert chain[0].segment(None).rows.tobytes() == last.segment_at(1).rows.tobytes()
    run(top.make_space(lambda size: np.zeros(size, np.uint8), None))
    assert top.state().recurrent.tobytes() == last.state.recurrent.tobytes()


def test_a_segment_that_was_made_before_is_filled(store: DirectStore, made: list[Snapshot]) -> None:
    _, chain, _ = open_chain(store.home, StateName.from_prefix(made[0].prefix), None, run)
    link = chain[0].segment(None)
    run(chain[0].fill(link, lambda size: np.zeros(size, np.uint8), None))
    assert link.rows.tobytes() == made[0].segment.rows.tobytes()
    assert link.draft_rows.size == 0


def test_a_chain_without_one_of_its_files_is_missing(
    store: DirectStore, made: list[Snapshot]
) -> None:
    (path,) = store.home.glob("20-40-*")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        open_chain(store.home, StateName.from_prefix(made[-1].prefix), None, run)


def test_files_may_have_other_paths_until_they_are_published(
    store: DirectStore, made: list[Snapshot]
) -> None:
    (path,) = store.home.glob("20-*.state")
    path.rename(path.with_name("elsewhere"))
    name = StateName.from_prefix(made[0].prefix)
    paths = {name: path.with_name("elsewhere")}
    _, _, tokens = open_chain(store.home, name, None, run, paths)
    assert tokens.size == 20
