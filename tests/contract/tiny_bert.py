"""A tiny random reranker of the architecture `bert`, without a memory and a template: its tokenizer
joins a pair.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, PoolingType

from tools.generator import finish

__all__ = ["write_tiny_bert"]

WIDTH = 64
INNER = 128
HEADS = 2
LAYERS = 2
CONTEXT = 512
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "\u2581machine",
    "\u2581learning",
    "\u2581is",
]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_tiny_bert(path: Path) -> None:
    """Write the model to ``path``, the same each time."""
    random = np.random.default_rng(0)
    words = [*WORDS, *LETTERS, *(f"\u2581{letter}" for letter in LETTERS)]
    writer = GGUFWriter(path, "bert")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.CLS)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_types([3] * 5 + [1] * (len(words) - 5))
    writer.add_token_type_count(2)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_sep_token_id(3)
    writer.add_unk_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_classifier_output_labels(["LABEL_0"])

    def add(name: str, *dims: int) -> None:
        """Add a matrix, or a norm with gain 1, each with a bias where the name says so."""
        if name.endswith("_norm"):
            writer.add_tensor(f"{name}.weight", np.ones(dims, np.float32))
        else:
            values = random.standard_normal(dims) * 0.5 / np.sqrt(dims[-1])
            writer.add_tensor(f"{name}.weight", values.astype(np.float32))
        if "embd" not in name.removesuffix("_norm") or name.endswith("_norm"):
            writer.add_tensor(
                f"{name}.bias", (random.standard_normal(dims[0]) * 0.1).astype(np.float32)
            )

    writer.add_tensor("token_types.weight", np.zeros((2, WIDTH), np.float32))
    add("token_embd", len(words), WIDTH)
    add("position_embd", CONTEXT, WIDTH)
    add("token_embd_norm", WIDTH)
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}", WIDTH, WIDTH)
        add(f"blk.{layer}.attn_output_norm", WIDTH)
        add(f"blk.{layer}.ffn_up", INNER, WIDTH)
        add(f"blk.{layer}.ffn_down", WIDTH, INNER)
        add(f"blk.{layer}.layer_output_norm", WIDTH)
    add("cls", WIDTH, WIDTH)
    add("cls.output", 1, WIDTH)
    finish(writer)
