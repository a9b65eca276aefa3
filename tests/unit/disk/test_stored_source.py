"""Snapshots are read again from their files, whatever RAM has."""

from __future__ import annotations

import pytest

from pyctl.cache.reads import finish
from pyctl.cache.segment_pool import SegmentPool
from pyctl.cache.snapshot import Prefix, Snapshot
from pyctl.disk.file_format import CorruptFileError
from pyctl.prompt import as_tokens
from tests.unit.disk.making import DirectStore, drafting


def whole(store: DirectStore, snapshot: Snapshot) -> Snapshot:
    """Read all parts of ``snapshot`` again, and return them together."""
    source = finish(store.reader.source(snapshot.prefix))
    assert source is not None
    found = source.snapshot
    for segment in found.chain:
        rows = finish(source.rows(segment))
        assert segment.rows.size == 0, "the caller owns them"
        segment.rows = rows.block
        segment.draft_rows = rows.draft
    found.state = finish(source.state())
    return found


def test_all_parts_come_back(store: DirectStore, made: list[Snapshot]) -> None:
    for each in made:
        found = whole(store, each)
        assert found.prefix == each.prefix
        assert found.exact == each.exact
        assert found.batch_ends == each.batch_ends
        assert found.last_tokens(found.n).tolist() == each.last_tokens(each.n).tolist()
        for segment, original in zip(found.chain, each.chain, strict=True):
            assert segment.rows.tobytes() == original.rows.tobytes()
            assert segment.file.name == original.file.name
        assert found.state.recurrent.tobytes() == each.state.recurrent.tobytes()


def test_parts_of_a_draft_model_come_too(store: DirectStore, made: list[Snapshot]) -> None:
    others = drafting(made)
    store.directory.remove(made[-1].prefix.name)
    for each in made[:-1]:
        store.directory.remove(each.prefix.name)
    for each in others:
        store.write(each)
    found = whole(store, others[-1])
    assert found.state.draft.tobytes() == others[-1].state.draft.tobytes()
    assert found.segment.draft_rows.tobytes() == others[-1].segment.draft_rows.tobytes()


def test_a_copy_in_ram_does_not_hide_damage(store: DirectStore, made: list[Snapshot]) -> None:
    """A restore takes the segment that RAM has; a check reads its file."""
    last = made[-1]
    tokens = as_tokens([*last.last_tokens(last.n), 5])
    in_ram = store.read(last.prefix, tokens)
    assert in_ram is not None
    SegmentPool().add_reference(in_ram)
    path = store.home / str(last.segment.file.name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    assert store.read(last.prefix, tokens) is not None
    source = finish(store.reader.source(last.prefix))
    assert source is not None
    with pytest.raises(CorruptFileError) as caught:
        finish(source.rows(source.snapshot.segment))
    assert caught.value.file == path.name
    assert path.exists(), "it stays for the quarantine"
    assert in_ram.segment.rows.tobytes() == last.segment.rows.tobytes()


def test_what_is_not_there_is_a_miss(store: DirectStore, made: list[Snapshot]) -> None:
    other = Prefix(bytes(16), 20)
    assert finish(store.reader.source(other)) is None
    (store.home / str(made[0].segment.file.name)).unlink()
    assert finish(store.reader.source(made[0].prefix)) is None
