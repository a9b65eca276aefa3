"""Files of models in the page cache: which ones are read, and that a read leaves them there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pyctl.measure.observed import evict
from pyctl.models import warm_files
from pyctl.models.warm_files import PIECE, WarmFiles, read_dropped

MIB = 1 << 20


def files(directory: Path, **sizes: int) -> dict[str, list[Path]]:
    found = {}
    for name, size in sizes.items():
        (directory / name).write_bytes(b"x" * size)
        found[name] = [directory / name]
    return found


def test_the_pieces_that_were_dropped_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = files(tmp_path, a=3 * PIECE + 5)["a"]
    monkeypatch.setattr(warm_files, "_is_cached", lambda descriptor, at: at == PIECE)
    assert read_dropped([tmp_path / "gone", path]) == 2 * PIECE + 5
    assert read_dropped([path], lambda: True) == 0


def test_the_kernel_is_asked_what_it_has_dropped(tmp_path: Path) -> None:
    (path,) = files(tmp_path, a=PIECE)["a"]
    evict([path])
    assert read_dropped([path]) in (0, PIECE), "a file system in RAM drops nothing"
    assert path.read_bytes() == b"x" * PIECE


def test_models_that_fit_are_kept_in_their_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = files(tmp_path, a=3 * MIB, b=4 * MIB, c=MIB, empty=0) | {"gone": [tmp_path / "gone"]}
    room: int | None = 5 * MIB
    warm = WarmFiles(lambda: wanted, lambda: room)
    with caplog.at_level(logging.INFO):
        assert warm.look() == ["a", "c"]
        assert warm.look() == ["a", "c"]
        room = None
        assert warm.look() == []
    assert [record.getMessage() for record in caplog.records] == [
        "files kept in RAM for a switch: a (3 MiB), c (1 MiB)",
        "files kept in RAM for a switch: none, RAM has no room",
    ]
    warm.close()
