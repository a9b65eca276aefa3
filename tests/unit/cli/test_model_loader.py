"""Loading one of several models: its files, and the room for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.cli import model_loader
from pyctl.cli.arguments import parse_serve
from pyctl.cli.assemble import LoadContext
from pyctl.cli.model_loader import ModelLoader
from pyctl.errors import ModelError
from pyctl.llama.settings.memory_plan import MemoryPlan
from pyctl.server.app_state import AppState


@pytest.fixture
def model(model_path: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a copy of a tiny model, which a test may change."""
    copy = tmp_path / "m.gguf"
    copy.write_bytes(model_path("tiny-dense").read_bytes())
    return copy


def loader_of(model: Path, *flags: str) -> ModelLoader:
    words = ["-m", str(model), "-c", "512", "-t", "1", "--no-kv-cache", *flags]
    settings = parse_serve(words, {})
    return ModelLoader(settings, LoadContext(AppState(settings.server)))


def test_a_model_is_current_until_its_file_changes(model: Path) -> None:
    loader = loader_of(model)
    assert loader.is_current(), "nothing is loaded"
    service = loader.load(lambda fraction: True)
    service.worker.close()
    assert loader.is_current()
    status = model.stat()
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert not loader.is_current()
    model.unlink()
    assert loader.is_current(), "a file that cannot be read counts as unchanged"


def test_room_is_planned_once_and_again_for_another_file(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory plan is computed once as long as the file of the model is the same, and again
    after it has changed.
    """
    planned: list[MemoryPlan] = []
    wanted = model_loader.required_memory

    def counted(*settings: object) -> MemoryPlan:
        planned.append(wanted(*settings))  # type: ignore[arg-type]
        return planned[-1]

    monkeypatch.setattr(model_loader, "required_memory", counted)
    loader = loader_of(model)
    assert loader.fits()
    assert loader.fits()
    assert len(planned) == 1
    service = loader.load(lambda fraction: True)
    service.worker.close()
    os.utime(model, ns=(0, 0))
    assert loader.fits()
    assert len(planned) == 2


def test_a_pool_has_no_room_next_to_other_models(model: Path) -> None:
    assert not loader_of(model, "--kv-pool", "512").fits()


def test_a_file_that_is_no_model_is_refused(model: Path) -> None:
    model.write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        loader_of(model).fits()
