"""Models that are replaced by a reload leave nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp as api

from pyctl.cli.arguments import parse_serve
from pyctl.cli.serve_command import several
from pyctl.server.models import Models
from tests.waiting import until

N_RELOADS = 4


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The addresses of all llama_models that have been loaded and not freed."""
    found = set[int]()
    load, free = api.llama_model_load_from_file, api.llama_model_free

    def counted_load(*args: Any) -> Any:
        if model := load(*args):
            found.add(model)
        return model

    def counted_free(model: Any) -> None:
        found.remove(model)
        free(model)

    monkeypatch.setattr(api, "llama_model_load_from_file", counted_load)
    monkeypatch.setattr(api, "llama_model_free", counted_free)
    return found


def write(preset: Path, model: Path, n_ctx: int) -> None:
    preset.write_text(f"[it]\nmodel = {model}\nc = {n_ctx}\nt = 1\n[same]\nmodel = {model}\nc = 512\nt = 1\n")


def load(models: Models, name: str) -> None:
    models.ask(models.named(name)).result(60).close()


def test_a_reload_frees_the_vocabulary_of_what_it_replaces(
    model_path: Callable[[str], Path], tmp_path: Path, living: set[int]
) -> None:
    preset, model = tmp_path / "models.ini", model_path("tiny-hybrid")
    write(preset, model, 512)
    argv = ["--models-preset", str(preset), "--models-patience", "0", "--no-kv-cache"]
    models = several(parse_serve(argv, {}), argv, {})
    assert models is not None
    thread = threading.Thread(target=models.run, daemon=True)
    thread.start()
    for name in ("same", "it"):
        load(models, name)
    counts = []
    for number in range(N_RELOADS):
        counts.append(len(living))
        write(preset, model, 768 + 256 * number)
        # A thread may still prepare a vocabulary; what it used goes with the next reload.
        until(lambda: models.reload().result(60) or len(living) == 2)  # weights and vocabulary of what stays
        load(models, "it")
    assert counts == [4] * N_RELOADS
    models.close()
    thread.join(60)
