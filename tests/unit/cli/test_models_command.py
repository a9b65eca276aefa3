"""The list of the models that are here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.cli.models_command import run_models


@pytest.fixture
def environ(tmp_path: Path, model_path: Callable[[str], Path]) -> dict[str, str]:
    """Return the environment of a home with a model in the hub's cache, one that was downloaded,
    and a directory with one and with junk.
    """
    model = model_path("tiny-hybrid")
    for place in (
        "huggingface/hub/models--org--m/snapshots/1/m-F32.gguf",
        "pyctl/models/1/d.gguf",
        "dir/a.gguf",
    ):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).symlink_to(model)
    (tmp_path / "dir" / "junk.gguf").write_bytes(b"<!DOCTYPE html>")
    return {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}


def test_all_models_with_their_sizes_and_what_fits(
    environ: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`pyctl models` lists the models of all origins with the context that fits. A file that is no
    model has a note, and one without room in memory still has its line.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the hub's library reads it
    flags = ["--models-dir", str(tmp_path / "dir"), "-c", "1k", "-np", "1"]
    assert run_models([*flags, "--json"], environ) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    origins = {name: row["origin"] for name, row in rows.items()}
    assert origins.pop("(without -m)") == "built-in"
    assert origins == {
        "org/m:F32": "cache",
        "a": "models_dir",
        "junk": "models_dir",
        "d": "download",
    }
    assert rows["a"]["n_bytes"] == (tmp_path / "dir" / "a.gguf").stat().st_size
    assert {name: row["n_ctx"] for name, row in rows.items() if row["n_ctx"] != 1024} == {"junk": 0}
    assert rows["junk"]["note"].endswith("is not a GGUF file")
    assert run_models([*flags, "-c", "2000m"], environ) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "none; " in lines["a"]  # no machine has memory for that context
