"""A model and a context that a test has opened itself."""

from __future__ import annotations

from typing import Any

from pyctl.llama.llama_backend import ModelOpener, OpenModel


class GivenModel(ModelOpener):
    """``model`` with its context ``ctx``, without drafts and embeddings."""

    def __init__(self, model: Any, ctx: Any) -> None:
        self._opened = OpenModel(model, ctx)

    def open(self) -> OpenModel:
        return self._opened
