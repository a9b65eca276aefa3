"""The description of a loaded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pyctl.llama.loader import load
from pyctl.llama.settings.model_settings import ModelSettings


def test_a_model_is_described_by_its_file_and_its_settings(
    model_path: Callable[[str], Path],
) -> None:
    """The description has each field of the settings once: the first alias is the name, and doubles
    are left out.
    """
    path = model_path("tiny-hybrid")
    settings = ModelSettings(
        path=str(path), alias=("b", "a", "b"), tags=("t",), n_ctx=512, n_seqs=2, n_threads=1
    )
    loaded = load(settings)
    info = loaded.info
    loaded.backend.unload()
    assert info.model_path == str(path)
    assert info.model_alias == "a"
    assert info.model_aliases == ("a", "b")
    assert info.model_tags == ("t",)
    assert info.n_seqs == 2
    assert info.n_ctx == 512
    assert info.fingerprint == loaded.backend.memory.identity
    assert info.n_vocab == loaded.tokenizer.n_vocab
    assert not info.vision
    assert info.pool is None


def test_the_description_has_each_value_with_its_reason(model_path: Callable[[str], Path]) -> None:
    loaded = load(ModelSettings(path=str(model_path("tiny-dense")), n_ctx=512, n_threads=1))
    loaded.backend.unload()
    values = {flag: (value, reason) for flag, value, reason in loaded.info.placement.resolved}
    assert values["--ctx-size"] == ("512", "given")
    assert values["--threads"] == ("1", "given")
    assert values["--spec-type"] == ("none", "default")


def test_without_an_alias_the_file_names_the_model(model_path: Callable[[str], Path]) -> None:
    path = model_path("tiny-dense")
    loaded = load(ModelSettings(path=str(path), n_ctx=512, n_threads=1))
    loaded.backend.unload()
    assert loaded.info.model_alias == path.name
    assert loaded.info.model_aliases == (path.name,)
