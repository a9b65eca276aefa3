from __future__ import annotations

from pathlib import Path

import pytest

from pyctl.machine.probe import Compiler
from tests.unit.setup.programs import Programs


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    (tmp_path / "programs").mkdir()
    return Programs(tmp_path / "programs")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def compiler() -> Compiler:
    return Compiler("c++", "cc", True)
