"""A simulated drive: calls that fail, and the bytes that a power failure takes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.simulate.faults import KilledError
from pyctl.files.atomic_file import sync_directory, write_atomic
from tests.unit.bench.simulate.machine import Machine

SEEDS = range(12)
"""Enough for each fate of a file."""


def write(path: Path, *, sync: bool) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    os.pwrite(descriptor, b"bytes", 0)
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def survivors(directory: Path, act: Callable[[Path], None]) -> list[bytes | None]:
    """Return what is in the file ``name`` after ``act`` and a power failure, for each seed."""
    found: list[bytes | None] = []
    for seed in SEEDS:
        (directory / str(seed)).mkdir()
        machine = Machine(directory / str(seed), seed)
        with machine.running():
            machine.process()
            act(machine.root)
            machine.drive.process = None
            machine.drive.lose_power()
        path = machine.root / "name"
        found.append(path.read_bytes() if path.exists() else None)
    return found


def test_a_file_that_was_synced_with_its_folder_stays(tmp_path: Path) -> None:
    def act(root: Path) -> None:
        write(root / "name", sync=True)
        sync_directory(root)

    assert survivors(tmp_path, act) == [b"bytes"] * len(SEEDS)


def test_a_name_that_was_not_synced_may_go_and_its_bytes_are_right(tmp_path: Path) -> None:
    found = survivors(tmp_path, lambda root: write(root / "name", sync=True))
    assert set(found) == {b"bytes", None}


def test_bytes_that_were_not_synced_may_be_others_under_a_durable_name(tmp_path: Path) -> None:
    def act(root: Path) -> None:
        write(root / "name", sync=False)
        sync_directory(root)

    found = survivors(tmp_path, act)
    assert None not in found
    assert b"bytes" in found
    assert bytes(5) in found


def test_a_file_that_was_removed_may_come_back(tmp_path: Path) -> None:
    def act(root: Path) -> None:
        write(root / "name", sync=True)
        sync_directory(root)
        (root / "name").unlink()

    assert set(survivors(tmp_path, act)) == {b"bytes", None}


def test_a_file_that_was_replaced_may_be_the_old_one(tmp_path: Path) -> None:
    def act(root: Path) -> None:
        write(root / "name", sync=True)
        sync_directory(root)
        write_atomic(root / "name", b"new")

    assert {b"bytes", b"new"} <= set(survivors(tmp_path, act))


def test_a_full_disk_refuses_writes_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with machine.running():
        machine.process()
        write(machine.root / "name", sync=True)
        machine.faults.is_active = True
        machine.faults.is_disk_full = True
        with pytest.raises(OSError, match="No space left"):
            write(machine.root / "other", sync=True)
        os.close(os.open(machine.root / "name", os.O_RDONLY))


def test_a_killed_process_changes_nothing_more(tmp_path: Path) -> None:
    """After a kill each further call fails, so that clean-up code of the dead process cannot repair
    files which a real kill would leave.
    """
    machine = Machine(tmp_path)

    def die() -> None:
        assert machine.drive.process is not None
        machine.drive.process.is_dead = True

    machine.faults.on_kill = die
    with machine.running():
        machine.process()
        write(machine.root / "name", sync=True)
        machine.faults.is_active = True
        machine.faults.kill_after(1)
        with pytest.raises(KilledError):
            os.unlink(machine.root / "name")
        with pytest.raises(OSError, match="the process is gone"):
            os.unlink(machine.root / "name")
        assert (machine.root / "name").exists()


def test_the_index_fails_as_sqlite_does(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with machine.running():
        machine.process()
        connection = sqlite3.connect(machine.root / "index.sqlite3")
        machine.faults.is_active = True
        machine.faults.is_disk_full = True
        with pytest.raises(sqlite3.OperationalError, match="database or disk is full"):
            connection.execute("SELECT 1")


def test_calls_outside_of_the_directory_never_fail(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with machine.running():
        machine.process()
        machine.faults.is_active = True
        machine.faults.rate = 1.0
        os.close(os.open(tmp_path / "elsewhere", os.O_CREAT | os.O_WRONLY))
        with pytest.raises(OSError, match=r"Input/output error|No space|Too many open files"):
            os.open(machine.root / "name", os.O_CREAT | os.O_WRONLY)
