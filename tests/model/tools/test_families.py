"""Large models of other families: layers after a pattern, and quantised matrices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader

from pyctl.llama.loader import load
from pyctl.llama.settings.model_settings import ModelSettings
from tools.generator.families import LARGE, write_family

N_LAYERS = 6


def test_a_pattern_of_layers_is_repeated_and_large_matrices_are_quantised(tmp_path: Path) -> None:
    """A generated model of any depth repeats its pattern of layers with different weights, and
    quantises each matrix as published files do.
    """
    whole = LARGE["gemma4-26b-a4b"].of_layers(range(N_LAYERS))
    sizes = {
        "vocab_size": 2048,
        "embedding_length": 256,
        "feed_forward_length": 256,
        "expert_count": 8,
    }
    family = replace(whole, keys={**whole.keys, **sizes, "expert_feed_forward_length": 160})
    write_family(tmp_path / "model.gguf", family)
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    of_layer = [{name for name in tensors if name.startswith(f"blk.{i}.")} for i in range(N_LAYERS)]
    plain = [{name.partition(".")[2].partition(".")[2] for name in names} for names in of_layer]
    assert plain[0]
    assert all(names == plain[0] for names in plain)
    assert tensors["blk.5.attn_q.weight"].shape[1] == 2 * tensors["blk.4.attn_q.weight"].shape[1]

    types = {name: tensor.tensor_type for name, tensor in tensors.items()}
    assert types["token_embd.weight"] == types["blk.0.attn_q.weight"] == GGMLQuantizationType.Q4_K
    assert types["blk.0.ffn_down_exps.weight"] == GGMLQuantizationType.Q8_0, (
        "rows of 160 are no whole blocks"
    )
    assert (
        types["blk.0.ffn_gate_inp.weight"]
        == types["blk.0.attn_norm.weight"]
        == GGMLQuantizationType.F32
    )
    assert not np.array_equal(
        tensors["blk.0.attn_q.weight"].data, tensors["blk.1.attn_q.weight"].data
    )


def test_model_of_three_layer_kinds_loads_as_published(tmp_path: Path) -> None:
    """A shortened model of three kinds of layers has each kind where the published one has it, and
    llama.cpp loads it.
    """
    whole = LARGE["qwen4exp-20b-a6b"].of_layers(range(N_LAYERS))
    rows = {"ple.head_offsets": tuple(range(0, 16 * 64, 64)), "ple.head_vocab_sizes": (64,) * 16}
    sizes = {
        "vocab_size": 2048,
        "ple.eos_token_id": 2047,
        "embedding_length": 256,
        "expert_count": 16,
        **rows,
    }
    per_head = {
        "embedding_length_per_layer_input": 16,
        "hyper_connection.low_rank": 32,
        "attention.head_count": 4,
    }
    family = replace(
        whole,
        keys={**whole.keys, **sizes, **per_head, "ssm.inner_size": 2048, "ssm.time_step_rank": 16},
    )
    write_family(tmp_path / "model.gguf", family)
    names = {tensor.name for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    with_part = {
        part: [i for i in range(N_LAYERS) if f"blk.{i}.{part}" in names]
        for part in ("ple_key.weight", "indexer.k_proj.weight", "ssm_a", "ffn_gate_inp.weight")
    }
    assert with_part == {
        "ple_key.weight": [1],
        "indexer.k_proj.weight": [3],
        "ssm_a": [0, 1, 2, 4, 5],
        "ffn_gate_inp.weight": [*range(N_LAYERS)],
    }
    assert not [name for name in names if name.endswith("scale")]
    backend = load(ModelSettings(path=str(tmp_path / "model.gguf"), n_threads=1)).backend
    try:
        assert backend.tokenizer.n_vocab == 2048
    finally:
        backend.unload()
