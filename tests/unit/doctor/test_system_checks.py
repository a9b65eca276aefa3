"""Checks of memory and limits: each reports its problem with a fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyctl.doctor.examine import examine
from tests.unit.doctor.machines import GIB, desktop
from tests.unit.doctor.problem import Problem

PROBLEMS = (
    pytest.param(
        Problem(
            "overcommit",
            "is 2",
            "overcommit_memory=0",
            files={"proc/sys/vm/overcommit_memory": "2"},
        ),
        id="overcommit",
    ),
    pytest.param(
        Problem(
            "container",
            "may use 8.0 GiB",
            "--cache-ram 4096",
            files={"sys/fs/cgroup/memory.max": str(8 * GIB)},
            facts={"ram_bytes": 16 * GIB},
        ),
        id="container",
    ),
    pytest.param(
        Problem(
            "container",
            "may use 4.0 GiB",
            "--cache-ram 2048",
            files={
                "proc/self/cgroup": "4:memory:/d/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
            },
            facts={"ram_bytes": 16 * GIB},
        ),
        id="older container",
    ),
    pytest.param(
        Problem(
            "locked memory",
            "--mlock needs",
            "ulimit -l",
            facts={"locks_memory": True, "limit_of": lambda number: (64, 64)},
        ),
        id="locked memory",
    ),
)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_check_finds_its_problem(problem: Problem, tmp_path: Path) -> None:
    problem.check_finding(tmp_path)


def test_a_cache_of_the_default_size_fits_its_container(tmp_path: Path) -> None:
    found = examine(desktop(tmp_path, {"sys/fs/cgroup/memory.max": str(8 * GIB)}))
    assert found.findings == ()
