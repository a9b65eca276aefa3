"""Attention caches written in another order than the pinned release's: read if they can be, else
saved whole.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.llama.library.extension import library_file

ROOT = Path(__file__).resolve().parents[3]
HEADERS = [ROOT / "vendor/llama.cpp" / place for place in ("src", "include", "ggml/include")]

ASK = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # its functions come before llama.cpp's
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.loader import load
backend = load(ModelSettings(path=sys.argv[2], n_ctx=1024, n_ubatch=64, n_threads=1)).backend
backend.check_restoring(in_depth=True)
kv = backend.memory.kv
print(kv.kind, "|", kv.layout.partition(" values=")[2], "|", backend.memory_text)
backend.unload()
"""


@pytest.fixture(scope="module")
def other_order(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that is loaded before llama.cpp's, see other_order.cpp."""
    path = tmp_path_factory.mktemp("order") / "other_order.so"
    command = ["c++", "-std=c++17", "-shared", "-fPIC", *(f"-I{place}" for place in HEADERS)]
    subprocess.run(
        [
            *command,
            str(Path(__file__).with_suffix(".cpp").with_name("other_order.cpp")),
            "-o",
            str(path),
        ],
        check=True,
    )
    return path


def ask(library: Path, order: str, model: Path, tmp_path: Path) -> list[str]:
    """Return kind, values about the whole cache, and description of the memory of ``model``."""
    environ = {
        **os.environ,
        "OTHER_ORDER": order,
        "OTHER_LIBRARY": str(library_file("libllama.so")),
    }
    environ["XDG_CACHE_HOME"] = str(tmp_path)
    command = [sys.executable, "-c", ASK, str(library), str(model)]
    shown = subprocess.run(
        command, capture_output=True, text=True, env=environ, check=False, cwd=ROOT
    )
    assert shown.returncode == 0, shown.stderr
    return [part.strip() for part in shown.stdout.splitlines()[-1].split("|")]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("tiny-llama", "attention"),
        ("tiny-gemma3", "hybrid"),
        ("tiny-lfm2-window", "hybrid"),
        ("tiny-minimax-m3", "attention"),
    ],
)
def test_more_values_about_a_cache_are_read(
    family: str, kind: str, other_order: Path, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    found, values, text = ask(other_order, "values", model_path(family), tmp_path)
    assert found == kind
    assert (
        "64,64," in values.split(" ")[0]
    )  # they decide what rows mean, so they are in the fingerprint
    assert "not cached" not in text


def test_rows_in_an_unknown_order_are_saved_whole(
    other_order: Path, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    kind, _, text = ask(other_order, "rows", model_path("tiny-llama"), tmp_path)
    assert kind == "opaque"
    assert text == (
        "whole sequences of llama_kv_cache, without separate rows: llama.cpp wrote its state in "
        "an order this "
        "extension cannot read"
    )
