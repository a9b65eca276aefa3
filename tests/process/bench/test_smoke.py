"""Every benchmark runs, in its smallest form, and fails when a request fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from bench import exact
from bench.__main__ import SCRIPTS
from bench.common import answered, finished
from bench.compare import MeasurementError, compare, measured
from pyctl.cache.ram import RamCache
from pyctl.engine.engine import Engine
from pyctl.engine.engine_settings import EngineSettings
from pyctl.engine.request import Request
from pyctl.errors import EngineError
from pyctl.prompt import Prompt
from tests.fake import FakeBackend

ROOT = Path(__file__).resolve().parents[3]


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_prints_its_tables(script: str) -> None:
    check_tables(run(f"bench.{script}", "--quick"))


def check_tables(text: str) -> None:
    assert "━" in text
    assert "nan" not in text


def test_short_prompt_is_exact_and_without_resume_points_refused() -> None:
    check_tables(run("bench.exact", "--tokens", "320", "-t", "1"))
    with pytest.raises(SystemExit, match="no batch ends at 31, a place to resume from"):
        exact.main(["--tokens", "319"])


def test_all_scripts_of_the_folder_are_run() -> None:
    files = [*(ROOT / "bench").glob("*.py"), *(ROOT / "bench").glob("*/__main__.py")]
    scripts = {path for path in files if "def main(" in path.read_text(encoding="utf-8")} - {
        ROOT / "bench/__main__.py"
    }
    assert {path.parent.name if path.stem == "__main__" else path.stem for path in scripts} == set(
        SCRIPTS
    )


def test_one_that_fails_makes_all_fail() -> None:
    command = [sys.executable, "-m", "bench", "--quick", "--keep", "policy"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "failed: policy" in done.stderr


def test_a_failed_request_ends_a_measurement() -> None:
    engine = Engine(backend := FakeBackend(), RamCache(4, None), EngineSettings())
    backend.evaluate = Mock(side_effect=EngineError("broken"))
    with pytest.raises(EngineError, match="broken"):
        answered(engine, Request(Prompt.from_ids([1, 2, 3]), max_tokens=1))
    with pytest.raises(RuntimeError, match="did not end"):
        finished([])


def test_a_checkout_is_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    compare("bench.controller", ["--quick"], ROOT, 1)
    text = capsys.readouterr().out
    assert "total CPU ms" in text
    assert "render, tokenise ms" in text


def test_another_package_than_asked_for_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    found = json.dumps({"package": str(ROOT / "pyctl"), "records": []})
    (tmp_path / "bench" / "controller.py").write_text(f"print({found!r})")
    with pytest.raises(MeasurementError, match="was to be measured"):
        measured("bench.controller", [], tmp_path)
    (tmp_path / "bench" / "controller.py").write_text("raise SystemExit('no vocabulary')")
    with pytest.raises(MeasurementError, match="no vocabulary"):
        measured("bench.controller", [], tmp_path)
