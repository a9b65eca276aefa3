"""The tensors of a model of some shape, in file order: names, dimensions and types, no content.

Names and dimensions are those that llama.cpp looks up for the architectures `qwen3`, `qwen35` and `qwen35moe`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tools.generator.shapes import Shape

__all__ = ["F16", "F32", "Q4_K", "Q6_K", "Q8_0", "Tensor", "tensors"]

F32 = GGMLQuantizationType.F32
F16 = GGMLQuantizationType.F16
Q4_K = GGMLQuantizationType.Q4_K
Q6_K = GGMLQuantizationType.Q6_K
Q8_0 = GGMLQuantizationType.Q8_0

# Read by operators that take f32 only.
_F32_MATRICES = {"ssm_conv1d", "ffn_gate_inp"}
# A few columns of 32 or 48: too narrow a matrix to be worth four bits.
_Q8_MATRICES = {"ssm_alpha", "ssm_beta"}
# More sensitive to rounding; six bits in every second group of four layers, much as the usual four-bit mixes do.
_Q6_MATRICES = {"attn_v", "ffn_down", "ffn_down_exps", "ffn_down_shexp"}


@dataclass(frozen=True)
class Tensor:
    """One tensor: `role` is its name without block number and suffix, `dims` are slowest first, as in numpy."""

    name: str
    role: str
    dims: tuple[int, ...]
    type: GGMLQuantizationType

    @property
    def fan_in(self) -> int:
        """Length of a row, over which a product sums."""
        return self.dims[-1]

    @property
    def num_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return math.prod(self.dims) // block * size


def tensors(shape: Shape) -> list[Tensor]:
    """All tensors of a model of this shape."""
    last = Q6_K if shape.quantised else F16
    first = Q4_K if shape.quantised else F16
    listing = [
        Tensor("token_embd.weight", "token_embd", (shape.vocab_size, shape.embedding), first),
        Tensor("output_norm.weight", "output_norm", (shape.embedding,), F32),
        Tensor("output.weight", "output", (shape.vocab_size, shape.embedding), last),
    ]
    for layer in range(shape.num_layers):
        for suffixed, dims in _layer(shape, layer):
            role = suffixed.split(".")[0]
            listing.append(Tensor(f"blk.{layer}.{suffixed}", role, dims, _type(shape, role, dims, layer)))
    return listing


def _type(shape: Shape, role: str, dims: tuple[int, ...], layer: int) -> GGMLQuantizationType:
    if len(dims) == 1 or role in _F32_MATRICES:
        return F32
    if not shape.quantised:
        return F16
    if role in _Q8_MATRICES:
        return Q8_0
    return Q6_K if role in _Q6_MATRICES and layer // 4 % 2 == 0 else Q4_K


def _layer(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = shape.embedding
    yield "attn_norm.weight", (width,)
    yield from _recurrent(shape) if shape.is_recurrent(layer) else _attention(shape)
    yield "ffn_norm.weight" if shape.arch == "qwen3" else "post_attention_norm.weight", (width,)
    yield from _experts(shape) if shape.num_experts else _feed_forward(shape)


def _attention(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, head = shape.embedding, shape.head_size
    # The hybrid models compute an output gate together with each head's query.
    per_head = head if shape.arch == "qwen3" else 2 * head
    yield "attn_q.weight", (shape.num_heads * per_head, width)
    yield "attn_k.weight", (shape.num_kv_heads * head, width)
    yield "attn_v.weight", (shape.num_kv_heads * head, width)
    yield "attn_q_norm.weight", (head,)
    yield "attn_k_norm.weight", (head,)
    yield "attn_output.weight", (width, shape.num_heads * head)


def _recurrent(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, heads = shape.embedding, shape.num_value_heads
    yield "attn_qkv.weight", (shape.conv_channels, width)
    yield "attn_gate.weight", (shape.value_width, width)
    yield "ssm_conv1d.weight", (shape.conv_channels, shape.conv_kernel)
    yield "ssm_dt.bias", (heads,)
    yield "ssm_a", (heads,)
    yield "ssm_alpha.weight", (heads, width)
    yield "ssm_beta.weight", (heads, width)
    yield "ssm_norm.weight", (shape.recurrent_head_size,)
    yield "ssm_out.weight", (width, shape.value_width)


def _feed_forward(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "ffn_gate.weight", (shape.feed_forward, shape.embedding)
    yield "ffn_up.weight", (shape.feed_forward, shape.embedding)
    yield "ffn_down.weight", (shape.embedding, shape.feed_forward)


def _experts(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, shared = shape.embedding, shape.feed_forward, shape.shared_feed_forward
    yield "ffn_gate_inp.weight", (shape.num_experts, width)
    yield "ffn_gate_exps.weight", (shape.num_experts, inner, width)
    yield "ffn_up_exps.weight", (shape.num_experts, inner, width)
    yield "ffn_down_exps.weight", (shape.num_experts, width, inner)
    yield "ffn_gate_inp_shexp.weight", (width,)
    yield "ffn_gate_shexp.weight", (shared, width)
    yield "ffn_up_shexp.weight", (shared, width)
    yield "ffn_down_shexp.weight", (width, shared)
