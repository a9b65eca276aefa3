"""The load of a model during the imports of a server: its owner, its errors, and its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from pyctl.cli import load_model
from pyctl.cli.arguments import CommandSettings, parse_serve
from pyctl.cli.assemble import assemble
from pyctl.cli.load_model import LoadedModel, ModelLoad
from pyctl.errors import ConfigError, UnavailableError


def settings_of(model: Path | str) -> CommandSettings:
    return parse_serve(["-m", str(model), "-c", "256", "--no-kv-cache"], {})


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Return the model that every load returns."""
    model = Mock(LoadedModel)
    monkeypatch.setattr(load_model, "load_model", lambda *_: model)
    return model


def test_a_model_that_is_taken_stays_open(loaded: Mock) -> None:
    with closing(ModelLoad(settings_of("m.gguf"))) as loading:
        assert loading.take() is loaded
    loaded.close.assert_not_called()


def test_a_model_that_nobody_takes_is_freed(loaded: Mock) -> None:
    loading = ModelLoad(settings_of("m.gguf"))
    loading.close()
    loaded.close.assert_called_once_with()


def test_a_missing_file_is_an_error_of_the_taker(tmp_path: Path) -> None:
    loading = ModelLoad(settings_of(tmp_path / "none.gguf"))
    with closing(loading), pytest.raises(ConfigError, match=r"none\.gguf"):
        loading.take()


def test_a_load_that_has_loading_is_assembled(model_path: Callable[[str], Path]) -> None:
    settings = settings_of(model_path("tiny-dense"))
    with closing(ModelLoad(settings)) as loading:
        service = assemble(settings, loading=loading)
    with closing(service.worker):
        assert service.info.n_ctx == 256


def test_a_stopped_load_of_a_model_ends_early(model_path: Callable[[str], Path]) -> None:
    reports: list[float] = []

    def stop(fraction: float) -> bool:
        reports.append(fraction)
        return False

    with pytest.raises(UnavailableError, match="loading was stopped"):
        load_model.load_model(settings_of(model_path("tiny-dense")), stop, load_model.LoadMemory())
    assert reports
