"""Settings of the vision encoder."""

from __future__ import annotations

import pytest

from pyctl.errors import ConfigError
from pyctl.llama.settings.vision_settings import VisionSettings, one_device


def test_by_default_there_is_no_encoder() -> None:
    settings = VisionSettings()
    assert settings.mmproj_path == ""
    assert settings.mmproj_offload
    assert not settings.is_optional


@pytest.mark.parametrize("name", ["CUDA0", "none", ""])
def test_the_encoder_runs_on_one_device(name: str) -> None:
    assert one_device(name) == name


def test_several_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="only one device"):
        one_device("CUDA0,CUDA1")


@pytest.mark.parametrize(
    ("minimum", "maximum", "is_refused"),
    [(8, 4, True), (4, 8, False), (8, 8, False), (8, -1, False), (-1, 4, False)],
)
def test_the_minimum_of_tokens_is_not_above_the_maximum(
    minimum: int, maximum: int, is_refused: bool
) -> None:
    if is_refused:
        with pytest.raises(ConfigError, match="must not be above"):
            VisionSettings(image_min_tokens=minimum, image_max_tokens=maximum)
        return
    settings = VisionSettings(image_min_tokens=minimum, image_max_tokens=maximum)
    assert settings.image_max_tokens == maximum
