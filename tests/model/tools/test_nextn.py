"""Heads for drafts in generated models: llama.cpp evaluates them, and what they guess is partly
right.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp import llama_cpp_ext

from tests.model.tools.conftest import Load
from tools.generator import (
    QWEN36_27B,
    QWEN36_35B_A3B,
    TINY_HYBRID,
    TINY_MOE,
    Shape,
    cached_model,
    write_model,
)
from tools.generator.__main__ import main
from tools.generator.shapes import tensors

Matrix = npt.NDArray[np.float32]
PROMPT = "<|im_start|>user\nTell me of the sea.<|im_end|>\n<|im_start|>assistant\n"


def evaluate(
    path: Path, tokens: Sequence[int], hidden: Matrix | None = None
) -> tuple[Matrix, Matrix]:
    """Return logits and hidden rows of all tokens: the trunk's, or with hidden rows the head's."""
    model_params = llama_cpp.llama_model_default_params()
    model_params.load_mtp = hidden is not None
    model_params.n_gpu_layers = 0
    model_params.use_extra_bufts = False  # kernels of AMX crash
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
    assert model, f"llama.cpp cannot load {path}"
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 1
    if hidden is not None:
        params.ctx_type = llama_cpp.LLAMA_CONTEXT_TYPE_MTP
    context = llama_cpp.llama_init_from_model(model, params)
    assert context, f"llama.cpp cannot run {path}"
    llama_cpp_ext.llama_set_embeddings_nextn(context, True, False)
    n = len(tokens)
    width = llama_cpp.llama_model_n_embd(model)
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    if hidden is not None:
        batch.embd = np.ascontiguousarray(hidden).ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    for at, token in enumerate(tokens):
        batch.token[at] = token
        batch.pos[at] = at
        batch.n_seq_id[at] = 1
        batch.logits[at] = 1
        batch.seq_id[at][0] = 0
    batch.n_tokens = n
    assert llama_cpp.llama_decode(context, batch) == 0
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (n, n_vocab)).copy()
    rows = np.ctypeslib.as_array(
        llama_cpp_ext.llama_get_embeddings_nextn(context), (n, width)
    ).copy()
    batch.embd = None
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return logits, rows


@pytest.mark.parametrize("own_file", [False, True])
@pytest.mark.parametrize("shape", [TINY_HYBRID, TINY_MOE], ids=lambda shape: shape.name)
def test_a_head_is_right_about_every_other_time(
    loaded: Load, models: Path, shape: Shape, own_file: bool
) -> None:
    """A generated head is right for about half of the tokens, in the model's file or its own, and
    depends on hidden rows and context: drafts of random weights are accepted as often as real ones.
    """
    path = cached_model(shape.with_nextn(), models)
    trunk = loaded(path)
    prompt = trunk.tokenize(PROMPT)
    tokens = prompt + trunk.reply(PROMPT, 300)
    _, hidden = evaluate(path, tokens)
    before = np.vstack([np.zeros_like(hidden[:1]), hidden[:-1]])
    head = cached_model(shape.only_nextn(), models) if own_file else path
    logits, _ = evaluate(head, tokens, before)
    guesses = logits.argmax(axis=1)[len(prompt) - 1 : -1]
    assert 0.35 < np.mean(guesses == tokens[len(prompt) :]) < 0.75

    # The hidden rows matter, and so do the tokens further back.
    blind, _ = evaluate(head, tokens, np.zeros_like(before))
    assert np.mean(blind.argmax(axis=1)[len(prompt) - 1 : -1] != guesses) > 0.2
    late, _ = evaluate(head, tokens[-100:], before[-100:])
    assert np.mean(late.argmax(axis=1) != logits.argmax(axis=1)[-100:]) > 0.02


@pytest.mark.parametrize("shape", [TINY_HYBRID, TINY_MOE], ids=lambda shape: shape.name)
def test_the_trunk_is_the_same_with_and_without_a_head(models: Path, shape: Shape) -> None:
    with_head = shape.with_nextn()
    tokens = list(range(60, 120))
    logits = [
        evaluate(cached_model(one, models), tokens)[0]
        for one in (with_head, replace(with_head, num_nextn=0))
    ]
    assert np.array_equal(*logits)


def test_a_quantised_head_can_be_evaluated(models: Path) -> None:
    """The heads of the full-size shapes, narrowed, evaluate to finite logits that vary with the
    token.
    """
    narrow = {
        "embedding": 512,
        "feed_forward": 512,
        "num_heads": 2,
        "num_kv_heads": 1,
        "vocab_size": 512,
    }
    for full in (QWEN36_27B, QWEN36_35B_A3B):
        fewer = {
            "num_experts": min(full.num_experts, 4),
            "num_experts_used": min(full.num_experts_used, 2),
        }
        shape = replace(
            full, num_layers=4, num_key_heads=2, num_value_heads=4, **narrow, **fewer
        ).with_nextn()
        path = cached_model(shape, models)
        logits, _ = evaluate(path, range(30), evaluate(path, range(30))[1])
        assert np.isfinite(logits).all()
        assert len(set(logits.argmax(axis=1))) > 10


@pytest.mark.parametrize(
    ("shape", "mib"), [(QWEN36_27B, 276), (QWEN36_35B_A3B, 525)], ids=["27b", "35b-a3b"]
)
def test_a_full_size_head_is_one_block_more(shape: Shape, mib: int) -> None:
    without = {tensor.name for tensor in tensors(shape)}
    more = [tensor for tensor in tensors(shape.with_nextn()) if tensor.name not in without]
    assert {tensor.name.split(".")[1] for tensor in more} == {str(shape.num_layers)}
    assert sum(tensor.num_bytes for tensor in more) / 2**20 == pytest.approx(mib, abs=0.5)
    assert without < {tensor.name for tensor in tensors(shape.with_nextn())}


def test_the_command_line_adds_a_head(tmp_path: Path) -> None:
    main(["--shape", "tiny-hybrid-nextn", "-o", str(tmp_path / "a.gguf")])
    write_model(tmp_path / "b.gguf", TINY_HYBRID.with_nextn())
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
