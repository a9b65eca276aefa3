"""The examination of a machine, and the screen with its findings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyctl.doctor.examine import CHECKS, examine, screen
from pyctl.doctor.finding import UnknownError
from tests.unit.doctor import test_card_checks, test_storage_checks, test_system_checks
from tests.unit.doctor.machines import GIB, desktop
from tests.unit.doctor.problem import Problem, report_of

MOUNTS = "22 1 8:1 / / rw - {} {} rw\n"


def test_nothing_is_wrong_with_a_good_machine(tmp_path: Path) -> None:
    found = examine(desktop(tmp_path))
    assert found.findings == ()
    assert found.is_sound
    assert set(found.absent) == {"container", "locked memory"}


def test_every_check_is_tried() -> None:
    rows = (
        *test_card_checks.PROBLEMS,
        *test_storage_checks.PROBLEMS,
        *test_system_checks.PROBLEMS,
    )
    problems = [problem for row in rows for problem in row.values if isinstance(problem, Problem)]
    assert {check.name for check in CHECKS} == {problem.check for problem in problems}


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("overcommit", "proc/sys/vm/overcommit_memory"),
        ("container", "sys/fs/cgroup/user.slice/memory.max"),
        ("cache directory", "proc/self/mountinfo"),
    ],
)
def test_a_check_that_cannot_be_made_says_so(tmp_path: Path, name: str, missing: str) -> None:
    found = report_of(name, tmp_path, {missing: None}, ram_bytes=GIB)
    (finding,) = found.findings
    assert finding.level == "unknown"
    assert found.fine == ()
    assert found.is_sound  # nothing is known to be wrong


def unknown() -> Any:
    raise UnknownError("not loaded")


def test_without_libraries_their_checks_are_unknown(tmp_path: Path) -> None:
    found = examine(
        desktop(
            tmp_path, card_states=lambda: None, error="no libllama.so", gpus=unknown, cuda=unknown
        )
    )
    levels = {finding.check: finding.level for finding in found.findings}
    assert levels["llama.cpp"] == "wrong"
    assert {levels[name] for name in ("driver", "build", "pinned memory", "PCIe link")} == {
        "unknown"
    }


def test_the_screen_has_80_columns_and_the_worst_first(tmp_path: Path) -> None:
    slow = {"proc/self/mountinfo": MOUNTS.format("nfs4", "nas:/models")}
    files = {"proc/sys/vm/overcommit_memory": "2", **slow}
    lines = list(
        screen(examine(desktop(tmp_path, {**files, "proc/self/cgroup": None}, ram_bytes=GIB)))
    )
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line[0] != " "] == [
        *("wrong", "slow", "slow", "unknown", "fine", "does")
    ]
    assert any(line.strip() == "-> sudo sysctl vm.overcommit_memory=0" for line in lines)
