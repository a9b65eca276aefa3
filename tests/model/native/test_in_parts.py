"""--split-mode tensor: rows and states lie in parts on two devices, which two_devices.cpp makes of
the CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pyctl.llama.fit.split import IN_TRIAL
from pyctl.machine.probe import find_compiler
from tools.generator import SHAPES, cached_model
from tools.generator.families import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
GGML = ROOT / "vendor" / "llama.cpp" / "ggml"

HEADS = {"num_heads": 4, "num_kv_heads": 2, "feed_forward": 512, "embedding": 128}
"""Enough for two devices."""
STATES = {**HEADS, "num_key_heads": 8, "num_value_heads": 16}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = find_compiler()
    if compiler is None or not (GGML / "src" / "ggml-backend-impl.h").exists():
        pytest.skip("no compiler, or no headers of ggml")
    path = tmp_path_factory.mktemp("devices") / "two_devices.so"
    source = ROOT / "tests" / "model" / "two_devices.cpp"
    places = [f"-I{GGML / name}" for name in ("include", "src")]
    subprocess.run(
        [compiler.cxx, "-std=c++17", "-shared", "-fPIC", *places, "-o", path, source], check=True
    )
    return path


@pytest.mark.parametrize(
    ("name", "fields", "kind"),
    [
        ("tiny-dense", HEADS, "f16"),
        ("tiny-dense", HEADS, "q8_0"),
        ("tiny-hybrid-nextn", STATES, "f16"),
        ("tiny-moe", STATES, "q8_0"),
        ("tiny-gpt-oss", {}, "f16"),
        ("tiny-lfm2", {}, "f16"),
    ],
)
def test_blocks_are_those_of_any_split(
    name: str,
    fields: dict[str, int],
    kind: str,
    library: Path,
    model_path: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """And from each place to resume at all goes on as in a cold run."""
    path = (
        model_path(name)
        if name in FAMILIES
        else cached_model(replace(SHAPES[name], **fields), tmp_path)
    )
    command = [sys.executable, "-m", "tests.model.in_parts", str(library), str(path), kind]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, IN_TRIAL: "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
