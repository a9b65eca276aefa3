"""Models that are replaced by a reload leave nothing behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp as api

from pyctl.cli.arguments import parse_serve
from pyctl.cli.serving import build_router
from pyctl.server.models import Models
from tests.unit.server.parts import supervised
from tests.waiting import until

N_RELOADS = 4


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the addresses of all llama_models that have been loaded and not freed."""
    found = set[int]()
    load = api.llama_model_load_from_file
    free = api.llama_model_free

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


def text_of(model: Path, n_ctx: int) -> str:
    return f"[it]\nmodel = {model}\nc = {n_ctx}\nt = 1\n[same]\nmodel = {model}\nc = 512\nt = 1\n"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[str], Models]]:
    """run(text) -> the models of a preset file, which are served."""
    with ExitStack() as stack:

        def start(text: str) -> Models:
            preset = tmp_path / "models.ini"
            preset.write_text(text)
            argv = ["--models-preset", str(preset), "--models-patience", "0", "--no-kv-cache"]
            models = build_router(parse_serve(argv, {}), argv, {})
            assert models is not None
            return stack.enter_context(supervised(models))

        yield start


def load(models: Models, name: str) -> None:
    models.acquire(models.get(name)).result(60).close()


def test_a_reload_frees_the_vocabulary_of_what_it_replaces(
    model_path: Callable[[str], Path],
    tmp_path: Path,
    living: set[int],
    run: Callable[[str], Models],
) -> None:
    """Each reload frees weights and vocabulary of the model that it replaces: a server that is
    reloaded often does not grow.
    """
    preset = tmp_path / "models.ini"
    model = model_path("tiny-hybrid")
    models = run(text_of(model, 512))
    for name in ("same", "it"):
        load(models, name)
    counts = []
    for number in range(N_RELOADS):
        counts.append(len(living))
        preset.write_text(text_of(model, 768 + 256 * number))
        # A thread may still prepare a vocabulary; what it used goes with the next reload.
        until(
            lambda: models.reload().result(60) or len(living) == 2
        )  # weights and vocabulary of what stays
        load(models, "it")
    assert counts == [4] * N_RELOADS


@pytest.mark.parametrize(("is_loaded", "reloads"), [(False, False), (False, True), (True, True)])
def test_a_model_whose_file_was_replaced_is_loaded_from_the_new_one(
    model_path: Callable[[str], Path],
    tmp_path: Path,
    run: Callable[[str], Models],
    is_loaded: bool,
    reloads: bool,
) -> None:
    """A file that was replaced is loaded anew, with or without a reload in between, and a reload
    without a change keeps the loaded model.
    """
    file = tmp_path / "it.gguf"
    shutil.copy(model_path("tiny-hybrid"), file)
    models = run(f"[it]\nmodel = {file}\nc = 512\nt = 1\n")
    load(models, "it")
    before = models.get("it").service
    if not is_loaded:
        models.unload(models.get("it"))
        until(lambda: models.get("it").status == "unloaded")
    shutil.copy(model_path("tiny-dense"), tmp_path / "new")
    (tmp_path / "new").rename(file)  # as a download does
    if reloads:
        models.reload().result(60)
    load(models, "it")
    service = models.get("it").service
    assert before is not None
    assert service is not None
    assert service.info.fingerprint != before.info.fingerprint
    if reloads:
        models.reload().result(60)
        assert models.get("it").service is service, "nothing has changed since"
