"""A model with a classifier ranks texts of any length that the context takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyctl.errors import ContextSizeError, RequestError
from pyctl.llama.loader import load
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.prompt import as_tokens
from tests.contract.tiny_bert import write_tiny_bert
from tools.generator import TINY_RERANK, cached_model


def test_a_text_is_ranked_alike_in_one_batch_and_in_many(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Class probabilities do not depend on the size of a batch, nor on texts that were ranked
    between; a text beyond the context is refused.
    """
    path: Path = cached_model(TINY_RERANK, tmp_path_factory.mktemp("models"))
    tokens = as_tokens(np.random.default_rng(3).integers(0, 256, 300).tolist())
    scores = []
    for n_ubatch in (64, 512):
        settings = ModelSettings(
            str(path), n_ctx=1024, n_ubatch=n_ubatch, n_threads=1, embeddings=True, pooling="rank"
        )
        loaded = load(settings)
        try:
            assert loaded.info.pooling == "rank"
            assert "{query}" in loaded.info.templates.rerank
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


def test_a_model_without_a_memory_ranks_what_fits_into_a_batch(tmp_path: Path) -> None:
    """A BERT without a cache cannot continue a batch, so a text beyond one is refused and the rest
    is ranked by its tokens.
    """
    write_tiny_bert(tmp_path / "bert.gguf")
    settings = ModelSettings(
        str(tmp_path / "bert.gguf"), n_ubatch=64, n_threads=1, embeddings=True, pooling="rank"
    )
    loaded = load(settings)
    try:
        cls = 2
        sep = 3
        assert loaded.info.rerank_marks == ((cls,), (sep,), ())
        assert not loaded.info.templates.rerank
        scores = [
            float(loaded.backend.embed(as_tokens([cls, 9, sep, n]))[0, 0]) for n in range(10, 30)
        ]
        assert len({round(score, 4) for score in scores}) > 10
        with pytest.raises(RequestError, match="too large to process"):
            loaded.backend.embed(as_tokens([9] * 65))
    finally:
        loaded.backend.unload()
