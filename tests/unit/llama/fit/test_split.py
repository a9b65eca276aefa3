"""The models that llama.cpp cannot evaluate with --split-mode tensor: each is found once, in
another process, and gets layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.llama.fit.split import try_split, with_split
from pyctl.llama.library.devices import Device
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings

CARDS = [Device(name, "", True, 1, name, 1, 1, 1) for name in ("CUDA0", "CUDA1")]


def test_a_model_that_has_no_parts_gets_layers_and_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that fails its trial of `tensor` is split by layers, and the log has the reason. The
    result is remembered for the file until it changes.
    """
    path = tmp_path / "model.gguf"
    asked = []

    def attempt(settings: ModelSettings, _: DraftSettings) -> str:
        asked.append(settings)
        return path.read_text()

    def mode(given: str = "tensor", cards: list[Device] = CARDS) -> str:
        return with_split(
            ModelSettings(path=str(path), split_mode=given), DraftSettings(), cards, attempt
        ).split_mode

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path.write_text("GGML_ASSERT(axis) failed")
    assert [mode(), mode(), mode("layer"), mode("none")] == ["layer", "layer", "layer", "none"]
    assert "--split-mode layer instead of tensor: GGML_ASSERT(axis) failed" in caplog.text
    assert mode(cards=CARDS[:1]) == "tensor", "one device has everything"
    path.write_text("")
    assert [mode(), mode(), len(asked)] == ["tensor", "tensor", 2]


def test_a_full_card_is_no_reason_against_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A trial that could not run, for lack of memory, decides nothing: this start uses layers, the
    next one tries again, and only its result is remembered.
    """
    path = tmp_path / "model.gguf"
    reasons = [OSError("CUDA error: out of memory"), None]
    path.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def attempt(*_: object) -> str:
        if error := reasons.pop(0):
            raise error
        return ""

    settings = ModelSettings(path=str(path), split_mode="tensor")
    modes = [with_split(settings, DraftSettings(), CARDS, attempt).split_mode for _ in range(3)]
    assert modes == ["layer", "tensor", "tensor"]
    assert reasons == []
    assert (
        "it cannot be tried: CUDA error: out of memory; the next start tries again" in caplog.text
    )


def test_a_trial_says_what_is_wrong(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    settings = ModelSettings(path=str(model_path("tiny-dense")), devices=("none",), n_threads=1)
    assert try_split(settings, DraftSettings()) == ""
    assert "missing.gguf" in try_split(
        ModelSettings(path=str(tmp_path / "missing.gguf")), DraftSettings()
    )
