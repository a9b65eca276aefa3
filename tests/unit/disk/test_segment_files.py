"""Files of segments and states: written whole, read with every checksum, removed without harm."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.block_sizes import BlockSizes
from pyctl.cache.snapshot import Block
from pyctl.disk.file_format import CorruptFileError, Header, PartKind, SegmentName, StateName
from pyctl.disk.segment_files import (
    NOT_DAMAGE,
    check_jobs,
    read_header,
    read_jobs,
    remove_file,
    segment_parts,
    write_file,
)

NAME = StateName(7, bytes(16))

PARENT = SegmentName(0, 7, bytes(16), bytes(8))


def written(home: Path, *blocks: Block) -> Path:
    """Return the path of a state's file with these blocks, of the state and of its draft part."""
    path = home / "model" / str(NAME)
    path.parent.mkdir(exist_ok=True)
    path.touch()
    kinds = (PartKind.STATE, PartKind.DRAFT_STATE)
    parts = dict(zip(kinds, blocks, strict=False))
    header = Header("model", NAME, PARENT, True, 1.5, segment_parts(parts))
    write_file(path, header, parts)
    return path


def read(path: Path, *kinds: PartKind) -> dict[PartKind, Block]:
    header = read_header(path)
    outs = {part.kind: np.zeros(part.size, np.uint8) for part in header.parts}
    outs = {kind: outs[kind] for kind in kinds}
    for job in read_jobs(path, header, outs):
        job()
    return outs


@given(size=st.integers(0, 5000), n_draft=st.integers(0, 100))
def test_blocks_come_back(
    size: int, n_draft: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    random = np.random.default_rng(size)
    state = random.integers(0, 256, size, np.uint8)
    draft = random.integers(0, 256, n_draft, np.uint8)
    path = written(tmp_path_factory.mktemp("files"), state, draft)
    outs = read(path, PartKind.STATE, PartKind.DRAFT_STATE)
    assert outs[PartKind.STATE].tobytes() == state.tobytes()
    assert outs[PartKind.DRAFT_STATE].tobytes() == draft.tobytes()


def test_only_the_wanted_parts_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, np.ones(500, np.uint8), np.ones(60, np.uint8))
    assert len(list(read_jobs(path, read_header(path), {}))) == 0
    assert read(path, PartKind.DRAFT_STATE).keys() == {PartKind.DRAFT_STATE}


def test_each_chunk_has_a_checksum(tmp_path: Path) -> None:
    state = np.zeros(1000, np.uint8)
    path = written(tmp_path, state)
    header = read_header(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match="wrong checksum in the state"):
        read(path, PartKind.STATE)
    (job,) = check_jobs(path, header)
    with pytest.raises(CorruptFileError, match="wrong checksum"):
        job()


def test_a_header_larger_than_the_first_read_is_read_whole(tmp_path: Path) -> None:
    path = written(tmp_path, np.zeros(100, np.uint8))
    with patch("pyctl.disk.segment_files.FIRST_READ", 30):
        assert read_header(path).name == NAME


def test_blocks_of_other_sizes_are_refused_before_memory_is_allocated(tmp_path: Path) -> None:
    path = written(tmp_path, np.zeros(100, np.uint8))
    assert read_header(path, BlockSizes(0, 1, 100)).name == NAME
    with pytest.raises(CorruptFileError, match="100 bytes of state"):
        read_header(path, BlockSizes(0, 1, 99))


def test_a_file_belongs_to_the_folder_of_its_fingerprint(tmp_path: Path) -> None:
    path = written(tmp_path, np.zeros(100, np.uint8))
    other = tmp_path / "other"
    path.parent.rename(other)
    with pytest.raises(CorruptFileError, match="a file of model"):
        read_header(other / path.name)


def test_a_file_is_read_by_another_name_than_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, np.zeros(100, np.uint8))
    temp = path.rename(path.with_name("temp"))
    assert read_header(temp, file=str(NAME)).name == NAME
    with pytest.raises(CorruptFileError, match="the content of"):
        read_header(temp)


@pytest.mark.parametrize("number", [errno.EIO, errno.EBADMSG, errno.EUCLEAN, *NOT_DAMAGE])
def test_errors_that_are_not_the_files_own_are_no_damage(tmp_path: Path, number: int) -> None:
    path = written(tmp_path, np.zeros(100, np.uint8))
    error = OSError(number, os.strerror(number))
    expected = OSError if number in NOT_DAMAGE else CorruptFileError
    with patch("os.pread", side_effect=error), pytest.raises(expected):
        read_header(path)


def test_a_file_that_is_gone_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_header(tmp_path / "model" / str(NAME))


def test_a_write_goes_on_where_the_disk_took_a_part(tmp_path: Path) -> None:
    real = os.pwrite
    with patch("os.pwrite", lambda at, data, offset: real(at, data[:100], offset)):
        path = written(tmp_path, np.arange(250, dtype=np.uint8))
    assert read(path, PartKind.STATE)[PartKind.STATE].tolist() == list(range(250))


def test_a_file_that_ends_too_early_is_damaged(tmp_path: Path) -> None:
    path = written(tmp_path, np.zeros(1000, np.uint8))
    (job,) = check_jobs(path, read_header(path))
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CorruptFileError, match="ends too early"):
        job()


def test_what_lies_in_the_place_of_a_file_is_removed_if_that_does_no_harm(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    remove_file(missing)
    empty = tmp_path / "empty"
    empty.mkdir()
    remove_file(empty)
    assert not empty.exists()
    full = tmp_path / "full"
    full.mkdir()
    (full / "note").touch()
    remove_file(full)
    assert (full / "note").exists()
    (tmp_path / "link").symlink_to(full)
    remove_file(tmp_path / "link" / "note")
    assert (full / "note").exists(), "it lies behind a link"
