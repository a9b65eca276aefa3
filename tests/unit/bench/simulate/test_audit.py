"""Checks of a cache directory from outside."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from bench.simulate.audit import Audit, WrongError
from bench.simulate.server import Server
from pyctl.disk.file_format import StateName
from pyctl.prompt import Prompt
from tests.unit.bench.simulate.machine import SETUP, Machine, ask

PROMPT = Prompt.from_ids(np.arange(300) + 2_000, range(20, 300, 20))


def written(machine: Machine) -> tuple[Server, Audit]:
    """Return a server that has written snapshots of a prompt, and the audit of its directory."""
    server = machine.server()
    ask(server, PROMPT)
    return server, Audit(machine.drive, machine.log, random.Random(1), machine.clock)


def record_many(audit: Audit, server: Server, state: StateName) -> None:
    """Report ``state`` so often that it is read back."""
    for _ in range(50):
        audit.record_stored(server, state)


def test_a_file_without_its_bytes_is_found_unless_it_was_damaged(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with machine.running():
        server, audit = written(machine)
        server.close()
        audit.check_bytes()
        path = next(machine.root.rglob("*.rows"))
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(WrongError, match="without all its bytes"):
            audit.check_bytes()
        audit.damaged.add(str(path.relative_to(machine.root)))
        audit.check_bytes()


def test_a_state_that_a_power_failure_takes_is_found(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with machine.running():
        server, audit = written(machine)
        for state in machine.stored:
            record_many(audit, server, state)
        server.close()
        before = audit.whole_states()
        assert before == {(SETUP.fingerprint, state) for state in machine.stored}
        audit.check_survivors(before)
        fingerprint, lost = min(before)
        (machine.root / fingerprint / str(lost)).unlink()
        with pytest.raises(WrongError, match="a power failure took"):
            audit.check_survivors(before)


def test_a_state_whose_files_were_written_again_need_not_survive(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with machine.running():
        server, audit = written(machine)
        record_many(audit, server, machine.stored[0])
        server.close()
        (path,) = machine.root.rglob(str(machine.stored[0]))
        data = path.read_bytes()
        path.rename(path.with_name("elsewhere"))
        path.write_bytes(data)
        assert audit.whole_states() == set()


def test_a_snapshot_that_is_reported_and_not_there_is_found(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with machine.running():
        server, audit = written(machine)
        with pytest.raises(WrongError, match="is missing"):
            record_many(audit, server, StateName(5, bytes(16)))
        server.close()


def test_a_file_that_no_index_has_is_found_after_a_recovery(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with machine.running():
        server, audit = written(machine)
        audit.check_recovered(server)
        state = next(machine.root.rglob("*.state"))
        state.unlink()
        with pytest.raises(WrongError, match="is missing"):
            audit.check_recovered(server)
        server.close()
