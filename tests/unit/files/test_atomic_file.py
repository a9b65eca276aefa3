"""Files appear whole or not at all; temp files of killed processes are told apart from those of
running ones.
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from pyctl.files.atomic_file import (
    FileCalls,
    is_abandoned,
    make_private,
    open_private,
    replacing,
    temp_name,
    temp_path,
    temp_pid,
    write_atomic,
)


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    full = Mock(side_effect=OSError(28, "No space left on device"))
    for calls in (FileCalls(fsync=full), FileCalls(replace=full)):
        with pytest.raises(OSError, match="No space"):
            write_atomic(path, b"new", calls=calls)
    assert full.call_count == 2
    with pytest.raises(TypeError):
        write_atomic(path, "text")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_written_is_synced_before_it_has_its_name(tmp_path: Path) -> None:
    order: list[str] = []

    def fsync(descriptor: int) -> None:
        order.append("sync")

    def rename(source: Path, target: Path) -> None:
        order.append("rename")
        os.replace(source, target)

    write_atomic(tmp_path / "file", b"x", calls=FileCalls(fsync=fsync, replace=rename))
    assert order == ["sync", "rename"]


def test_private_files_are_private_from_the_beginning(tmp_path: Path) -> None:
    with replacing(tmp_path / "file") as file:
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    deep = tmp_path / "a" / "b" / "c"
    make_private(deep)
    os.close(open_private(deep / "file", os.O_WRONLY))
    write_atomic(deep / "other", b"x")
    assert {mode(path) for path in (deep, deep.parent, deep.parent.parent)} == {0o700}
    assert {mode(path) for path in deep.iterdir()} == {0o600}


def test_what_exists_keeps_its_mode(tmp_path: Path) -> None:
    (directory := tmp_path / "shared").mkdir()
    directory.chmod(0o775)
    (file := directory / "file").write_bytes(b"kept")
    file.chmod(0o664)
    make_private(directory)
    os.close(open_private(file, os.O_WRONLY | os.O_APPEND))
    assert mode(directory) == 0o775
    assert mode(file) == 0o664
    assert file.read_bytes() == b"kept"
    with pytest.raises(FileExistsError):
        make_private(file)
    with pytest.raises(FileExistsError):
        open_private(file, os.O_WRONLY | os.O_EXCL)


def test_a_new_file_without_its_mode_is_closed(tmp_path: Path) -> None:
    opened = os.listdir("/proc/self/fd")
    refused = patch("os.fchmod", side_effect=PermissionError("no chmod here"))
    with refused, pytest.raises(PermissionError, match="no chmod here"):
        open_private(tmp_path / "file", os.O_WRONLY)
    assert os.listdir("/proc/self/fd") == opened


def hold_open(path: str, ready: object) -> None:
    with replacing(Path(path)) as file:
        file.write(b"half")
        file.flush()
        ready.set()  # type: ignore[attr-defined]
        signal.pause()


def test_a_killed_writer_leaves_what_is_found(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    child = spawn.Process(target=hold_open, args=(str(tmp_path / "file"), ready), daemon=True)
    child.start()
    assert ready.wait(60)
    (left,) = tmp_path.iterdir()
    assert temp_pid(left.name) == child.pid
    assert not is_abandoned(left)
    child.kill()
    child.join(60)
    assert is_abandoned(left)


def test_file_being_written_is_not_abandoned_whatever_its_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file written in another container is not abandoned, though the number of a living process
    there is that of none here.
    """
    dead = subprocess.Popen(["true"])
    dead.wait()
    monkeypatch.setattr(os, "getpid", lambda: dead.pid)
    with temp_path(tmp_path) as written:
        assert temp_pid(written.name) == dead.pid
        os.utime(written, (0, 0))
        assert not is_abandoned(written)
        os.rename(written, left := tmp_path / temp_name())
    assert is_abandoned(left)


def test_what_is_abandoned_is_removed_before_a_writer_can_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that has created its file, but has no lock yet."""
    (left := tmp_path / temp_name()).touch()
    taken: list[bool] = []
    unlink = Path.unlink

    def take_first(path: Path, missing_ok: bool = False) -> None:
        with path.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken.append(True)
            except BlockingIOError:
                taken.append(False)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", take_first)
    assert is_abandoned(left, remove=True)
    assert taken == [False]
    assert not left.exists()


def test_others_files_are_not_abandoned(tmp_path: Path) -> None:
    (tmp_path / ".5-x.tmp").touch()
    (tmp_path / "a.tmp").touch()
    (left := tmp_path / temp_name()).touch()
    assert [path for path in tmp_path.iterdir() if is_abandoned(path)] == [left]


def test_without_locks_nothing_is_abandoned(tmp_path: Path) -> None:
    calls = FileCalls(flock=Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    write_atomic(tmp_path / "file", b"x", calls=calls)
    (left := tmp_path / temp_name()).touch()
    assert not is_abandoned(left, calls=calls)


def test_file_judged_abandoned_before_its_lock_is_made_again(tmp_path: Path) -> None:
    taken: list[Path] = []

    def slow(descriptor: int, operation: int) -> None:
        if not taken:
            taken.extend(tmp_path.iterdir())
            taken[0].unlink()
        fcntl.flock(descriptor, operation)

    write_atomic(tmp_path / "file", b"x", calls=FileCalls(flock=slow))
    assert (tmp_path / "file").read_bytes() == b"x"
    assert os.listdir(tmp_path) == ["file"]
