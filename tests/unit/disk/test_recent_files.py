"""The files of recent prompts: order, bounds, and damage."""

from __future__ import annotations

import hashlib
import itertools
import os
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pyctl.cache.recent import RecentPrompts
from pyctl.disk.recent_files import RecentFiles
from pyctl.files.atomic_file import FileCalls
from pyctl.prompt import Prompt
from tests.unit.cache.recent_prompts import boundaries, chat, contents


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@given(
    recent=st.lists(
        st.tuples(st.lists(st.integers(0, 150_000), min_size=1), boundaries), max_size=6
    )
)
def test_the_list_survives_a_restart(
    recent: list[tuple[list[int], set[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "prompts"
    log = RecentPrompts()
    files = RecentFiles(path)
    for ids, at in recent:
        log.add(Prompt.from_ids(ids, at))
        files.save(log.newest_first())
        loaded = RecentPrompts()
        loaded.load(RecentFiles(path).load())
        assert contents(loaded) == contents(log)
        assert len(files_in(path)) == len(log)


@pytest.mark.parametrize("step", [0, -10])
def test_the_list_keeps_its_order_whatever_the_clock_says(tmp_path: Path, step: int) -> None:
    clock = itertools.count(10**18, step)
    log = RecentPrompts()
    files = RecentFiles(tmp_path, clock_ns=clock.__next__)
    for seed in range(12):
        log.add(chat(30, 10, seed=str(seed)))
        files.save(log.newest_first())
        if seed % 4 == 3:  # a restart
            files = RecentFiles(tmp_path)
            log.load(files.load())
    assert contents(log)[0][0] == chat(30, 10, seed="11").tokens.tolist()
    found = [one.prompt.tokens.tolist() for one in RecentFiles(tmp_path).load()]
    assert found == [chat(30, 10, seed=str(seed)).tokens.tolist() for seed in reversed(range(12))]


def test_a_save_writes_what_is_new_and_removes_what_is_continued(tmp_path: Path) -> None:
    log = RecentPrompts()
    files = RecentFiles(tmp_path)
    log.add(chat(30, 10))
    log.add(chat(40, 5))
    files.save(log.newest_first())
    first, second = files_in(tmp_path)
    log.add(chat(30, 10, 20, 10))
    log.add(chat(50, 5), for_disk=False)
    files.save(log.newest_first())
    kept, new = files_in(tmp_path)
    assert kept == second
    assert new > second
    assert first not in (kept, new)
    files.save(log.newest_first())
    assert files_in(tmp_path) == [kept, new]


def test_the_files_are_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    log = RecentPrompts()
    files = RecentFiles(tmp_path, max_bytes=5_000)
    for seed in range(12):
        log.add(chat(300, 100, seed=str(seed)))
        files.save(log.newest_first())
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 5_000
    found = RecentFiles(tmp_path).load()
    assert len(found) > 3
    newest = [one.prompt.tokens.tolist() for one in log.newest_first()]
    assert [one.prompt.tokens.tolist() for one in found] == newest[: len(found)]
    files.save(log.newest_first())
    assert len(files_in(tmp_path)) == len(found), "what went for want of room is not written again"
    log.add(chat(9000))
    files.save(log.newest_first())
    assert len(files_in(tmp_path)) == len(found), "what can never fit drives nothing out"


def test_nothing_is_written_that_the_day_has_no_bytes_for(tmp_path: Path) -> None:
    left = [1]
    log = RecentPrompts()
    files = RecentFiles(tmp_path, spend=lambda n_bytes: bool(left and left.pop()))
    log.add(chat(30, 10))
    log.add(chat(40, 10))
    files.save(log.newest_first())
    assert len(files_in(tmp_path)) == 1
    left.append(1)
    files.save(log.newest_first())
    assert len(files_in(tmp_path)) == 2


def test_damaged_files_are_removed_and_the_others_are_read(tmp_path: Path) -> None:
    """Every cut and every flipped byte of a file of a prompt is noticed: the file is removed and
    the other one is read. A foreign file is left alone.
    """
    log = RecentPrompts()
    assert RecentFiles(tmp_path / "none").load() == []
    log.add(chat(30, 10))
    log.add(chat(40, 10))
    RecentFiles(tmp_path).save(log.newest_first())
    path, other = sorted(tmp_path.iterdir())
    whole = path.read_bytes()
    damaged = [whole[:n] for n in range(len(whole))] + [whole + b"\0"]
    damaged += [whole[:i] + bytes([whole[i] ^ 0x40]) + whole[i + 1 :] for i in range(len(whole))]
    for data in damaged:
        path.write_bytes(data)
        assert len(RecentFiles(tmp_path).load()) == 1
        assert not path.exists()
    path.write_bytes(whole)
    assert len(RecentFiles(tmp_path).load()) == 2
    (tmp_path / "note").write_bytes(b"x")
    RecentFiles(tmp_path).load()
    assert files_in(tmp_path) == sorted([path.name, other.name, "note"])


def test_a_file_of_another_layout_is_damage(tmp_path: Path) -> None:
    for numbers in ([3], [5, 0, 0, 1, 2], [-4, 9, 0], [2, -1, 0, 7, 7], [2, 1, 0, 1, 2]):
        frame = zstandard.compress(np.array(numbers, "<i4").tobytes())
        data = b"PYRP\x01" + hashlib.blake2b(frame, digest_size=16).digest() + frame
        (tmp_path / f"{1:016x}-{1:08x}.prompt").write_bytes(data)
        assert RecentFiles(tmp_path).load() == []


def test_a_list_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    log = RecentPrompts()
    full = OSError(28, "No space left on device")
    calls = FileCalls(replace=Mock(wraps=os.replace, side_effect=[full, DEFAULT]))
    files = RecentFiles(tmp_path, calls=calls)
    log.add(chat(30, 10))

    with pytest.raises(OSError, match="No space"):
        files.save(log.newest_first())
    assert files_in(tmp_path) == []
    files.save(log.newest_first())
    assert len(files_in(tmp_path)) == 1
