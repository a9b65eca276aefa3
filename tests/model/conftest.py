"""A model for tests that need any."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyctl.llama.loader import Loaded


@pytest.fixture
def model(open_model: Callable[..., Loaded]) -> Loaded:
    return open_model("tiny-hybrid")
