"""Settings of the engine: their defaults and the values that their flags take."""

from __future__ import annotations

import pytest

from pyctl.cache.plan import DEFAULT_STEP
from pyctl.engine.engine_settings import EngineSettings, idle_seconds


def test_by_default_snapshots_are_dense_and_generated_text_is_reused() -> None:
    settings = EngineSettings()
    assert settings.min_step == DEFAULT_STEP
    assert not settings.exact
    assert settings.clear_idle


def test_by_default_the_model_stays_and_a_hang_ends_the_service() -> None:
    settings = EngineSettings()
    assert settings.sleep_seconds == -1
    assert settings.stall_seconds == 60
    assert settings.n_queue == 512


@pytest.mark.parametrize(("text", "seconds"), [("-1", -1), ("1", 1), ("3600", 3600)])
def test_a_model_sleeps_after_some_seconds_or_never(text: str, seconds: int) -> None:
    assert idle_seconds(text) == seconds


@pytest.mark.parametrize("text", ["-2", "1.5", "soon", ""])
def test_other_seconds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        idle_seconds(text)


def test_no_seconds_are_too_short() -> None:
    with pytest.raises(ValueError, match="use -1 for never"):
        idle_seconds("0")
