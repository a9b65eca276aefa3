"""Random weights of the unquantised tensors, scaled so that activations stay of order one at any depth.

The recurrent heads of a layer are given memories from a few tokens to many thousands: a short one forgets fast and
writes strongly, a long one hardly forgets and writes little, since with the delta rule what is written replaces what
lies in the same direction.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import numpy.typing as npt

from tools.generator.babble import CONSTANT, NUM_RESERVED, bias, embed, predict
from tools.generator.shapes import Shape
from tools.generator.tensors import F16, Tensor
from tools.generator.vocab import Vocab

__all__ = ["deviation", "fill"]

FloatArray = npt.NDArray[np.float32]

# Products of two gated or normed factors come out smaller than their inputs; this restores them.
_GAIN = {"ssm_out": 1.7, "attn_output": 1.8, "ffn_down": 2.0, "ffn_down_exps": 2.0, "ffn_down_shexp": 2.0}
# What all layers together add to the residual stream, and the embedding that they add it to.
_BRANCHES = 1.6
_EMBEDDING = 0.5
_LOGITS = 1.5

_FORGET = (0.3, 1e-4)  # per token, fastest and slowest head
_WRITE = (0.5, 0.01)


def deviation(shape: Shape, tensor: Tensor) -> float:
    """Standard deviation of the random values of `tensor`."""
    if tensor.role == "token_embd":
        return _EMBEDDING
    if tensor.role == "ssm_conv1d":
        return 1 / math.sqrt(shape.conv_kernel)
    unit = 1 / math.sqrt(tensor.fan_in)
    if tensor.role == "output":
        return _LOGITS * unit
    if (gain := _GAIN.get(tensor.role)) is not None:
        # Only the hybrid models have a gate that halves what attention returns.
        gated = 1.5 if tensor.role == "attn_output" and shape.num_recurrent_layers else 1.0
        return gain * gated * _BRANCHES / math.sqrt(2 * shape.num_layers) * unit
    return unit


def fill(shape: Shape, tensor: Tensor, vocab: Vocab, seed: int) -> FloatArray:
    """Values of an f16 or f32 tensor, the same for the same shape, vocabulary and seed."""
    if tensor.role.endswith("norm"):
        # Sharp attention: a flat average over thousands of rows would drown each of them.
        return np.full(tensor.dims, 2.0 if tensor.role in ("attn_q_norm", "attn_k_norm") else 1.0, np.float32)
    if tensor.role == "ssm_a":
        return -_per_head(_FORGET, tensor)
    if tensor.role == "ssm_dt":
        return np.full(tensor.dims, math.log(math.e - 1), np.float32)  # softplus of it is 1
    random = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    values = random.standard_normal(tensor.dims, np.float32)
    values *= deviation(shape, tensor)
    if tensor.type is F16:
        _reserve(values, tensor, vocab)
    return values


def _reserve(values: FloatArray, tensor: Tensor, vocab: Vocab) -> None:
    reserved = slice(NUM_RESERVED)
    if tensor.role == "token_embd":
        values[:, reserved] = embed(vocab)
    elif tensor.role == "output":
        values[:, reserved] = predict(vocab)
        values[vocab.ids["<|im_end|>"], NUM_RESERVED:] = 0  # the end is due to the text, not to chance
    elif tensor.role in _GAIN:
        values[..., reserved, :] = 0
    else:
        # What is the same for most tokens must not drown what tells them apart.
        values[..., reserved] = 0
    if tensor.role == "ssm_beta":
        write = _per_head(_WRITE, tensor)
        values[:, CONSTANT] = bias(np.log(write / (1 - write)))


def _per_head(ends: tuple[float, float], tensor: Tensor) -> FloatArray:
    return np.geomspace(*ends, num=tensor.dims[0], dtype=np.float32)
