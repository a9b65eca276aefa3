"""The load of a model that settings name: it ends early when it is stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pyctl.cli import load_model
from pyctl.cli.arguments import parse_serve
from pyctl.errors import UnavailableError


def test_a_stopped_load_of_a_model_ends_early(model_path: Callable[[str], Path]) -> None:
    reports: list[float] = []

    def stop(fraction: float) -> bool:
        reports.append(fraction)
        return False

    model = str(model_path("tiny-dense"))
    settings = parse_serve(["-m", model, "-c", "256", "--no-kv-cache"], {})
    with pytest.raises(UnavailableError, match="loading was stopped"):
        load_model.load_model(settings, stop, load_model.LoadMemory())
    assert reports
