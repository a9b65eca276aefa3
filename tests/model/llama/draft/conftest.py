"""Backends that draft, and separate draft models, open for the time of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyctl.errors import ModelError
from pyctl.llama.draft.separate_model import SeparateModel
from pyctl.llama.llama_backend import LlamaBackend
from pyctl.llama.loader import Loaded, load
from pyctl.llama.settings.draft_settings import DraftSettings
from pyctl.llama.settings.model_settings import ModelSettings
from tests.model.llama.draft.drafting import HYBRIDS, UBATCH, set_device
from tests.model.llama.draft.separate import (
    SHAPES,
    PlainModel,
    open_draft,
)
from tools.generator import Shape, write_model


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


@pytest.fixture
def open_head(open_model: Callable[..., Loaded]) -> Callable[..., LlamaBackend]:
    """open_head("tiny-hybrid-nextn", n_draft=3, type_k="q8_0") -> a backend whose head drafts, all
    sequences empty.
    """

    def get(
        name: str = "tiny-hybrid-nextn",
        types: tuple[str, ...] = ("draft-mtp",),
        n_draft: int = 3,
        as_on_gpu: bool = False,
        **fields: Any,
    ) -> LlamaBackend:
        sizes = {"n_ctx": 2048, "n_ubatch": UBATCH, "n_seqs": 3, **fields}
        drafts = DraftSettings(draft_types=types, n_draft=n_draft)
        backend = open_model(name, drafts=drafts, **sizes).backend
        if types:
            set_device(backend, n_draft, as_on_gpu=as_on_gpu)
        return backend

    return get


@pytest.fixture
def open_reader(
    open_model: Callable[..., Loaded], model_path: Callable[[str], Path]
) -> Callable[..., LlamaBackend]:
    """open_reader("eagle3", n_draft=3) -> a backend that drafts with a file of this kind, all
    sequences empty.
    """

    def get(kind: str, n_draft: int = 3, *, as_on_gpu: bool = False, **fields: Any) -> LlamaBackend:
        path = str(model_path(f"tiny-hybrid-{kind}"))
        drafts = DraftSettings(draft_path=path, n_draft=n_draft, **fields)
        sizes = {"n_ctx": 2048, "n_ubatch": UBATCH, "n_seqs": 3}
        backend = open_model(HYBRIDS[0], drafts=drafts, **sizes).backend
        set_device(backend, n_draft, as_on_gpu=as_on_gpu)
        return backend

    return get


@pytest.fixture
def check_refused(model_path: Callable[[str], Path], tmp_path: Path) -> Callable[..., None]:
    """check_refused(shape, "reads layers 9"): a draft file of this shape is refused with this error
    beside the model of a name.
    """

    def check(shape: Shape, reason: str, name: str = HYBRIDS[0], **fields: Any) -> None:
        path = tmp_path / "draft.gguf"
        write_model(path, shape)
        settings = ModelSettings(
            path=str(model_path(name)), n_ctx=1024, n_ubatch=64, n_threads=1, n_seqs=2
        )
        with pytest.raises(ModelError, match=reason):
            load(settings, drafts=DraftSettings(draft_path=str(path), **fields))

    return check
