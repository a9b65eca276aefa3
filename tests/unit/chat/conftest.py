"""Real vocabularies and chat templates, from the unpacked sources of llama.cpp."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pyctl.chat.tokenizer import Tokenizer

MODELS = Path(__file__).resolve().parents[3] / "vendor" / "llama.cpp" / "models"


def unpacked(name: str) -> Path:
    path = MODELS / name
    if not path.is_file():
        pytest.skip(f"{path} is missing: the build unpacks it")
    return path


@pytest.fixture(scope="session")
def qwen_template() -> str:
    return unpacked("templates/Qwen3.5-4B.jinja").read_text()


@pytest.fixture(scope="session")
def qwen_tokenizer() -> Tokenizer:
    return tokenizer_of("qwen35")


@cache
def vocabulary_of(name: str) -> Any:
    """Return a model of llama.cpp's that has a vocabulary alone."""
    path = unpacked(f"ggml-vocab-{name}.gguf")
    api = pytest.importorskip("llama_cpp.llama_cpp")
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(str(path).encode(), params)
    assert model
    return model


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """Return the tokenizer of one of llama.cpp's vocabularies."""
    from pyctl.llama.library.llama_tokenizer import LlamaTokenizer

    return LlamaTokenizer(vocabulary_of(name))
