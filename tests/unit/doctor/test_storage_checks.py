"""Checks of files and disks: each reports its problem with a fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pyctl.errors import ModelError
from tests.unit.doctor.problem import Problem

MOUNTS = "22 1 8:1 / / rw - {} {} rw\n"


def refuse(*_: object) -> Any:
    raise ModelError("cannot make the context: 9 tokens need too much")


PROBLEMS = (
    pytest.param(
        Problem(
            "model",
            "cut off: 1,000 bytes of 1,101",
            "again",
            facts={"file": lambda path: (1101, True)},
        ),
        id="cut off",
    ),
    pytest.param(Problem("model", "cannot make", "again", facts={"file": refuse}), id="no GGUF"),
    pytest.param(
        Problem(
            "chat template",
            "ChatML",
            "--chat-template-file",
            facts={"file": lambda path: (1000, False)},
        ),
        id="no template",
    ),
    pytest.param(
        Problem(
            "model", "no file /nowhere", "-m", facts={"model_files": (Path("/nowhere/model.gguf"),)}
        ),
        id="no such file",
    ),
    pytest.param(
        Problem(
            "model's disk",
            "nfs4",
            "local SSD",
            files={"proc/self/mountinfo": MOUNTS.format("nfs4", "nas:/models")},
        ),
        id="model far away",
    ),
    pytest.param(
        Problem(
            "cache directory",
            "does not outlive",
            "SSD",
            files={"proc/self/mountinfo": MOUNTS.format("tmpfs", "tmpfs")},
        ),
        id="cache in RAM",
    ),
    pytest.param(
        Problem("disk space", "GiB free", "--kv-cache-budget", facts={"cache_bytes": 2**60}),
        id="no space",
    ),
    pytest.param(
        Problem(
            "memory plan",
            "9 MiB too little",
            "-np 1",
            facts={"plan": lambda: [("CUDA0 has 9 MiB too little; to fix it: -np 1")]},
        ),
        id="plan",
    ),
    pytest.param(
        Problem("memory plan", "cannot make the context", "-c", facts={"plan": refuse}),
        id="refused",
    ),
)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_check_finds_its_problem(problem: Problem, tmp_path: Path) -> None:
    problem.check_finding(tmp_path)
