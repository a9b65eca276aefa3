"""The load of a model during the imports of a server: its owner, its errors, and its end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from pyctl.cache.cache_settings import DiskSettings
from pyctl.cli import early_load, load_model
from pyctl.cli.arguments import CommandSettings, parse_serve
from pyctl.cli.assemble import assemble
from pyctl.cli.early_load import ModelLoad
from pyctl.cli.load_model import LoadedModel
from pyctl.errors import ConfigError


def settings_of(model: Path | str) -> CommandSettings:
    return parse_serve(["-m", str(model), "-c", "256", "--no-kv-cache"], {})


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Return the model that every load returns."""
    model = Mock(LoadedModel)
    monkeypatch.setattr(early_load, "prepare_model", Mock())
    monkeypatch.setattr(load_model, "finish_loading", lambda *_: model)
    return model


def begun(settings: CommandSettings) -> ModelLoad:
    """Return a load whose cache directory has been tried."""
    loading = ModelLoad(settings)
    loading.go_on(settings.disk)
    return loading


def test_a_model_that_is_taken_stays_open(loaded: Mock) -> None:
    with closing(begun(settings_of("m.gguf"))) as loading:
        assert loading.take() is loaded
    loaded.close.assert_not_called()


def test_a_model_that_nobody_takes_is_freed(loaded: Mock) -> None:
    loading = begun(settings_of("m.gguf"))
    loading.close()
    loaded.close.assert_called_once_with()


def test_a_load_waits_for_the_cache_directory(loaded: Mock) -> None:
    """A directory that cannot be used is an error of the start, which then closes the load."""
    loading = ModelLoad(settings_of("m.gguf"))
    loading.close()
    with pytest.raises(CancelledError):
        loading.take()
    loaded.close.assert_not_called()


def test_the_load_has_the_cache_directory_that_was_chosen(
    loaded: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[DiskSettings] = []

    def finish(settings: CommandSettings, *_: object) -> Mock:
        used.append(settings.disk)
        return loaded

    monkeypatch.setattr(load_model, "finish_loading", finish)
    chosen = DiskSettings(cache_dir="chosen")
    with closing(ModelLoad(settings_of("m.gguf"))) as loading:
        loading.go_on(chosen)
        loading.take()
    assert used == [chosen]


def test_a_missing_file_is_an_error_of_the_taker(tmp_path: Path) -> None:
    loading = ModelLoad(settings_of(tmp_path / "none.gguf"))
    with closing(loading), pytest.raises(ConfigError, match=r"none\.gguf"):
        loading.take()


def test_a_load_that_has_loading_is_assembled(model_path: Callable[[str], Path]) -> None:
    settings = settings_of(model_path("tiny-dense"))
    with closing(begun(settings)) as loading:
        service = assemble(settings, loading=loading)
    with closing(service.worker):
        assert service.info.n_ctx == 256
