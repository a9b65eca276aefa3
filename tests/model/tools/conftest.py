"""Generated models for the tests of this folder, and the few calls of llama.cpp's C API that they
need.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from tools.generator import SHAPES, cached_model

Logits = npt.NDArray[np.float32]


class Loaded:
    """A model with one sequence, on one thread: two would mostly wait for each other, the models
    are that small.
    """

    def __init__(self, path: Path, cache_type: int = llama_cpp.GGML_TYPE_F16) -> None:
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = False  # kernels of AMX crash
        model_params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        assert self.model, f"llama.cpp cannot load {path}"
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = 4096
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = cache_type
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context, f"llama.cpp cannot run {path}"
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def tokenize(self, text: str, parse_special: bool = True) -> list[int]:
        data = text.encode()
        tokens = (llama_cpp.llama_token * (len(data) + 1))()
        n = llama_cpp.llama_tokenize(
            self.vocab, data, len(data), tokens, len(tokens), False, parse_special
        )
        assert n >= 0
        return tokens[:n]

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        buffer = ctypes.create_string_buffer(64 * len(tokens) + 64)
        n = llama_cpp.llama_detokenize(
            self.vocab, array, len(tokens), buffer, len(buffer), False, True
        )
        assert n >= 0
        return buffer.raw[:n]

    def forget(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def evaluate(self, tokens: Sequence[int]) -> Logits:
        """Append `tokens` to the sequence and return the logits after the last."""
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        assert (
            llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(array, len(tokens)))
            == 0
        )
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, (self.vocab_size,)).copy()

    def reply(self, prompt: str, limit: int, temperature: float = 0.0, seed: int = 0) -> list[int]:
        """Return token ids of a reply to `prompt` in an empty sequence, with the end token if it
        came within `limit`.
        """
        random = np.random.default_rng(seed)
        self.forget()
        logits = self.evaluate(self.tokenize(prompt))
        tokens: list[int] = []
        while len(tokens) < limit and (
            not tokens or not llama_cpp.llama_vocab_is_eog(self.vocab, tokens[-1])
        ):
            if tokens:
                logits = self.evaluate(tokens[-1:])
            scores = (
                logits
                if not temperature
                else logits / temperature + random.gumbel(size=logits.size)
            )
            tokens.append(int(scores.argmax()))
        return tokens

    def state(self) -> bytes:
        """Return the recurrent state alone, as llama.cpp serialises it."""
        only = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        buffer = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size_ext(self.context, 0, only))()
        assert llama_cpp.llama_state_seq_get_data_ext(
            self.context, buffer, len(buffer), 0, only
        ) == len(buffer)
        return bytes(buffer)

    def set_state(self, state: bytes) -> None:
        only = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        assert llama_cpp.llama_state_seq_set_data_ext(
            self.context, buffer, len(state), 0, only
        ) == len(state)


Load = Callable[..., Loaded]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of generated models."""
    llama_cpp.llama_backend_init()
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def loaded(models: Path) -> Iterator[Load]:
    """Yield a function that loads models, by the name of their shape or by path; close them in the
    end.
    """
    opened: dict[tuple[str | Path, int], Loaded] = {}

    def load(which: str | Path, cache_type: int = llama_cpp.GGML_TYPE_F16) -> Loaded:
        if (which, cache_type) not in opened:
            path = which if isinstance(which, Path) else cached_model(SHAPES[which], models)
            opened[which, cache_type] = Loaded(path, cache_type)
        return opened[which, cache_type]

    yield load
    for model in opened.values():
        model.close()


@pytest.fixture(params=["tiny-hybrid", "tiny-moe", "tiny-dense"])
def tiny(request: pytest.FixtureRequest, loaded: Load) -> Loaded:
    """Return each tiny model in turn."""
    return loaded(request.param)


@pytest.fixture(scope="session")
def real_vocab_file() -> Path:
    """Return the vocabulary that comes with llama.cpp's sources."""
    name = "ggml-vocab-qwen35.gguf"
    vendor = Path(__file__).parents[3] / "vendor" / "llama.cpp"
    if (path := next(vendor.rglob(name), None)) is None:
        pytest.skip(f"{name} is not unpacked under vendor/llama.cpp; the build does that")
    return path
