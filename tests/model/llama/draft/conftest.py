"""Separate draft models, open for the time of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyctl.llama.draft.separate_model import SeparateModel
from pyctl.llama.loader import Loaded
from tests.model.llama.draft.separate import (
    SHAPES,
    PlainModel,
    open_draft,
)


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    """Return the shape of a draft model with rows alone, or with rows and states."""
    return str(request.param)


@pytest.fixture
def open_separate(
    shape: str, model_path: Callable[[str], Path]
) -> Iterator[Callable[..., SeparateModel]]:
    """open_separate(n_seqs=2, ...) -> a draft model without a trunk, as `open_draft`."""
    models: list[SeparateModel] = []

    def get(**given: object) -> SeparateModel:
        models.append(open_draft(model_path(shape), **given))
        return models[-1]

    yield get
    for model in models:
        model.close()


@pytest.fixture
def reference(shape: str, open_model: Callable[..., Loaded]) -> PlainModel:
    """Return the model that drafts, as a backend."""
    return PlainModel(open_model(shape).backend)
