"""The first half of a load: the settings that fit, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.errors import ModelError
from pyctl.llama.library import extension
from pyctl.llama.loader import finish_load
from pyctl.llama.prepare_load import prepare_load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.pool_settings import PoolSettings
from pyctl.llama.settings.vision_settings import VisionSettings


def settings_of(path: Path) -> ModelSettings:
    return ModelSettings(path=str(path), n_ctx=512, n_ubatch=64, n_threads=1)


def test_a_prepared_load_has_the_plan_and_the_vocabulary(model_path: Callable[[str], Path]) -> None:
    prepared = prepare_load(settings_of(model_path("tiny-dense")))
    assert prepared.resolved.memory.n_ctx == 512
    assert prepared.vocabulary.result().n_vocab > 0
    assert prepared.encoder is None


def test_the_second_half_loads_what_was_prepared(model_path: Callable[[str], Path]) -> None:
    prepared = prepare_load(settings_of(model_path("tiny-dense")))
    loaded = finish_load(prepared)
    assert loaded.resolved is prepared.resolved
    assert loaded.tokenizer is prepared.vocabulary.result()
    loaded.backend.unload()


def test_a_missing_file_is_an_error_of_the_first_half(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf"):
        prepare_load(settings_of(tmp_path / "none.gguf"))


def test_without_the_extension_there_are_no_images_and_no_pool(
    model_path: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(extension, "core", None)
    monkeypatch.setattr(extension, "pool", None)
    settings = settings_of(model_path("tiny-dense"))
    images = VisionSettings(mmproj_path="encoder.gguf")
    prepared = prepare_load(settings, vision=images, pool=PoolSettings(n_pooled=1024))
    assert prepared.encoder is None
    assert prepared.resolved.memory.pool is None
    assert "--mmproj disabled: it requires the extension" in caplog.text
    assert "--kv-pool disabled: it requires the extension" in caplog.text
