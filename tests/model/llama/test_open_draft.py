"""The draft model or head that settings name is opened beside its trunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp as api

from pyctl.llama.draft.draft_model import DraftModel
from pyctl.llama.open_draft import open_draft
from pyctl.llama.open_model import load_model, make_context
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.params import ModelParams, context_params
from pyctl.llama.settings.resolved import Resolved

Opened = Callable[..., tuple[DraftModel | None, list[int]]]


@pytest.fixture
def opened(model_path: Callable[[str], Path]) -> Iterator[Opened]:
    """opened("tiny-dense", draft_types=..) -> the draft model, and contexts with `Pulse`."""
    trunks: list[tuple[Any, Any, DraftModel | None]] = []

    def get(name: str, **drafts: Any) -> tuple[DraftModel | None, list[int]]:
        settings = ModelSettings(path=str(model_path(name)), n_ctx=512, n_ubatch=64, n_threads=1)
        resolved = Resolved.from_settings(settings, DraftSettings(**drafts))
        params = ModelParams(resolved.model, with_head=resolved.drafts.uses_own_head)
        trunk = load_model(resolved.path, params)
        ctx = make_context(trunk, (), context_params(resolved, 512))
        attached: list[int] = []
        model = open_draft(resolved, trunk, ctx, attached.append)
        trunks.append((trunk, ctx, model))
        return model, attached

    yield get
    for trunk, ctx, model in trunks:
        if model is not None:
            model.close()
        api.llama_free(ctx)
        api.llama_model_free(trunk)


@pytest.mark.parametrize(
    "drafts", [{}, {"draft_types": ("cache",)}, {"draft_types": ("draft-mtp",), "n_draft": 0}]
)
def test_nothing_is_opened_where_no_model_drafts(opened: Opened, drafts: dict[str, Any]) -> None:
    assert opened("tiny-hybrid-nextn", **drafts) == (None, [])


def test_the_head_of_the_models_own_file_drafts(opened: Opened) -> None:
    model, attached = opened("tiny-hybrid-nextn", draft_types=("draft-mtp",))
    assert model is not None
    assert model.type == "draft-mtp"
    assert len(attached) == 1, "evaluations of the head can be broken off"


@pytest.mark.parametrize(
    ("name", "draft_type"),
    [
        ("tiny-dense", "draft-simple"),
        ("tiny-hybrid-head", "draft-mtp"),
        ("tiny-hybrid-eagle3", "draft-eagle3"),
        ("tiny-hybrid-dflash", "draft-dflash"),
    ],
)
def test_a_file_drafts_in_the_way_of_its_type(
    opened: Opened, model_path: Callable[[str], Path], name: str, draft_type: str
) -> None:
    path = str(model_path(name))
    model, _ = opened("tiny-hybrid", draft_types=(draft_type,), draft_path=path)
    assert model is not None
    assert model.type == draft_type
