"""`pyctl worker` without a client: its flags, and the directory of tensors."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from pyctl.cli.tensor_directory import LOW_BYTES, TensorDirectory
from pyctl.cli.worker_command import run_worker
from pyctl.errors import ConfigError


def tensor(directory: Path, n: int, n_bytes: int = 10, age: int = 0) -> Path:
    path = directory / f"{n:016x}"
    path.write_bytes(bytes(n_bytes))
    os.utime(path, (10**9 - age, 10**9 - age))
    return path


def roomy(_: Path) -> int:
    """Free bytes of a disk with room."""
    return LOW_BYTES


def names(directory: Path) -> set[int]:
    return {int(path.name, 16) for path in directory.iterdir() if re.fullmatch("[0-9a-f]{16}", path.name)}


def test_what_was_not_complete_when_a_worker_ended_is_never_found_again(tmp_path: Path) -> None:
    files = TensorDirectory(tmp_path, 1000, roomy)
    tensor(tmp_path, 1)
    with tensor(tmp_path, 2).open("ab"):
        files.look()  # the second is being written
    (tmp_path / "notes.txt").write_text("the user's")
    TensorDirectory(tmp_path, 1000, roomy)
    assert names(tmp_path) == {1}
    assert (tmp_path / "notes.txt").exists()


def test_the_directory_keeps_to_its_budget(tmp_path: Path) -> None:
    files = TensorDirectory(tmp_path, 25, roomy)
    for n in range(4):
        tensor(tmp_path, n, age=n)
    files.look()
    assert names(tmp_path) == {0, 1}
    TensorDirectory(tmp_path, 25, roomy)
    assert names(tmp_path) == {0, 1}


def test_a_disk_that_is_almost_full_gets_no_tensor(tmp_path: Path) -> None:
    """A write that finds no room leaves a file that looks whole."""
    free = LOW_BYTES
    files = TensorDirectory(tmp_path, 1000, lambda _: free)
    tensor(tmp_path, 1)
    files.look()
    free -= 1
    tensor(tmp_path, 2)
    files.look()
    assert names(tmp_path) == {1}
    with pytest.raises(ConfigError, match="less than 4,096 MiB are free there"):
        TensorDirectory(tmp_path, 1000, lambda _: free)


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot use --cache .*/file: "):
        run_worker(["--cache", str(tmp_path / "file")])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--port", "65536"], "--port must be in [0, 65535]"),
        (["--threads", "-1"], "--threads at least 0"),
        (["--cache-budget", "0"], "--cache-budget at least 1"),
        (["--host", "::1"], "--host ::1: "),
        (["--device", "CPU,TPU"], "--device: no device TPU; found CPU"),
        (["--model", "x"], "unrecognized arguments: --model x"),
    ],
)
def test_flags_that_do_not_work(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        run_worker(flags)
