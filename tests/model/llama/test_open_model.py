"""Opening of models and contexts: what is opened is freed if the next step fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llama_cpp import llama_cpp as api

from pyctl.errors import ModelError, UnavailableError
from pyctl.llama.open_model import load_model, make_context, open_embedder
from pyctl.llama.read_vocabulary import read_vocabulary
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.params import ModelParams, context_params
from pyctl.llama.settings.resolved import Resolved
from pyctl.prompt import as_tokens


@pytest.fixture
def resolved(model_path: Callable[[str], Path]) -> Resolved:
    path = str(model_path("tiny-dense"))
    return Resolved.from_settings(ModelSettings(path=path, n_ctx=512, n_ubatch=64, n_threads=1))


def test_the_vocabulary_is_read_beside_the_weights(resolved: Resolved) -> None:
    tokenizer = read_vocabulary(resolved.model).result()
    assert tokenizer.n_vocab > 0


def test_a_damaged_file_fails_where_the_vocabulary_is_used(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="cannot load the vocabulary of"):
        read_vocabulary(ModelSettings(path=str(path))).result()


def test_progress_stops_a_load(resolved: Resolved) -> None:
    with pytest.raises(UnavailableError, match="loading was stopped"):
        load_model(resolved.path, ModelParams(resolved.model), lambda fraction: False)


def test_a_context_without_its_adapter_is_refused(resolved: Resolved, tmp_path: Path) -> None:
    model = load_model(resolved.path, ModelParams(resolved.model))
    missing = [(str(tmp_path / "no.gguf"), 1.0)]
    with pytest.raises(ModelError, match=r"cannot load the adapter .*no\.gguf"):
        make_context(model, missing, context_params(resolved, 512))
    api.llama_model_free(model)


@pytest.mark.parametrize(("pooling", "n_max"), [("mean", 64), ("last", 512)])
def test_an_embedder_takes_a_batch_or_its_context(
    resolved: Resolved, pooling: str, n_max: int
) -> None:
    model = load_model(resolved.path, ModelParams(resolved.model))
    chosen = resolved.chosen("--pooling", "given", pooling=pooling, embeddings=True)
    embedder = open_embedder(model, chosen)
    assert embedder.n_max == n_max
    assert embedder.embed(as_tokens([1, 2, 3])).shape == (1, api.llama_model_n_embd(model))
    embedder.close()
    api.llama_model_free(model)
