"""A model with a classifier ranks texts of any length that the context takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyctl.engine.llama import load
from pyctl.engine.model_settings import ModelSettings
from pyctl.errors import ContextSizeError
from pyctl.prompt import as_tokens
from tools.generator import TINY_RERANK, cached_model


def test_a_text_is_ranked_alike_in_one_batch_and_in_many(tmp_path_factory: pytest.TempPathFactory) -> None:
    path: Path = cached_model(TINY_RERANK, tmp_path_factory.mktemp("models"))
    tokens = as_tokens(np.random.default_rng(3).integers(0, 256, 300).tolist())
    scores = []
    for n_ubatch in (64, 512):
        settings = ModelSettings(str(path), n_ctx=1024, n_ubatch=n_ubatch, n_threads=1, embeddings=True, pooling="rank")
        loaded = load(settings)
        try:
            assert loaded.info.pooling == "rank"
            assert "{query}" in loaded.info.rerank_template
            scores.append(loaded.backend.embed(tokens))
            assert scores[-1].shape == (1, TINY_RERANK.num_classes)
            assert float(scores[-1].sum()) == pytest.approx(1.0, abs=1e-5)
            other = loaded.backend.embed(tokens[:100])
            assert not np.allclose(other, scores[-1], atol=1e-4)
            with pytest.raises(ContextSizeError):
                loaded.backend.embed(as_tokens([1] * 1025))
            assert np.array_equal(loaded.backend.embed(tokens), scores[-1])
        finally:
            loaded.backend.unload()
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
