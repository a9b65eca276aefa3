"""Opening of models and contexts: what is opened is freed if the next step fails."""

from __future__ import annotations

import mmap
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from llama_cpp import llama_cpp as api

from pyctl.errors import ModelError, UnavailableError
from pyctl.llama.library.devices import file_head
from pyctl.llama.open_model import load_model, make_context, open_embedder
from pyctl.llama.read_vocabulary import read_vocabulary
from pyctl.llama.settings.model_settings import ModelSettings
from pyctl.llama.settings.params import ModelParams, context_params
from pyctl.llama.settings.resolved import Resolved
from pyctl.prompt import as_tokens
from tests.gguf_copy import copy_with


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


HEAD = "blk.8."
"""The layer of tiny-hybrid-nextn that only drafts use."""


def resident(file: Path) -> int:
    """Return the bytes of ``file`` that are in memory and mapped by this process."""
    maps = Path("/proc/self/smaps").read_text(encoding="utf-8")
    found = re.findall(rf"{re.escape(str(file))}\n(?:\w+: .*\n)*?Rss: +(\d+) kB", maps)
    return 1024 * sum(map(int, found))


@pytest.mark.skipif(sys.platform != "linux", reason="the extension is")
def test_weights_that_are_not_used_in_place_leave_memory(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """A head that is not loaded stands for weights of which a device or a repacked buffer has a
    copy: it lies between weights that are used, so llama.cpp does not unmap it.
    """

    def order(name: str) -> int:
        return 2 if name.startswith("blk.7.") else int(name.startswith(HEAD))

    source = model_path("tiny-hybrid-nextn")
    file = copy_with(source, tmp_path / "model.gguf", {}, order=order)
    tensors = file_head(file).tensors
    head = [tensor for tensor in tensors if tensor.name.startswith(HEAD)]
    first = -(-head[0].first // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (head[-1].first + head[-1].n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    assert last - first > 50 * mmap.PAGESIZE

    model = load_model(file, ModelParams(ModelSettings(path=str(file), repack=False)))
    try:
        n_bytes = resident(file)
        assert n_bytes > 0
        assert n_bytes <= file.stat().st_size - (last - first)
    finally:
        api.llama_model_free(model)
