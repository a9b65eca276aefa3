"""Random weights, scaled so that activations stay of order one at any depth, with which a tiny
model babbles in words.

The recurrent heads of a layer are given memories from a few tokens to many thousands: a short one
forgets fast and writes strongly, a long one hardly forgets and writes little, since with the delta
rule what is written replaces what lies in the same direction.

Letters follow letters, and most replies end after a while: the first channels of the embedding are
reserved and no layer writes to them. One is a constant, which gives weights without a bias one; the
others show what kind of character a token ends in. The output matrix reads from these a preference
for the kind that follows, on top of its random part, which is where the context speaks. In a model
with a head for drafts, each letter suggests one that follows (`Shape.habit`): that much of the next
token can be known without the layers. The head passes the token on, adds what its block makes of it
and of the trunk's last hidden state, and is right about every other time.

Quantised tensors are made by tiling one block of random bytes per type: gigabytes per second,
little memory. Only the quants are random. Scales are constant, so that every value is finite and
has mean 0 and the wanted deviation. Layouts: struct block_q4_K, block_q6_K and block_q8_0 of
ggml-common.h.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, TokenType

from tools.generator.shapes import F32, F32_MATRICES, Q4_K, Q6_K, Q8_0, Shape, Tensor
from tools.generator.vocab import Vocab, token_bytes

__all__ = [
    "CONSTANT",
    "NUM_RESERVED",
    "Tiles",
    "bias",
    "deviation",
    "embed",
    "fill",
    "predict",
    "proposed",
]

# -- unquantised tensors
# ----------------------------------------------------------------------------------

FloatArray = npt.NDArray[np.float32]

# Products of two gated or normed factors come out smaller than their inputs; this restores them.
_GAIN = {
    "ssm_out": 1.7,
    "attn_output": 1.8,
    "ffn_down": 2.0,
    "ffn_down_exps": 2.0,
    "ffn_down_shexp": 2.0,
}
# The sum that all layers add to the residual stream, and the embedding that they add it to.
_BRANCHES = 1.6
_EMBEDDING = 0.5
_LOGITS = 1.5

_FORGET = (0.3, 1e-4)  # per token, fastest and slowest head
_WRITE = (0.5, 0.01)


def deviation(shape: Shape, tensor: Tensor) -> float:
    """Return the standard deviation of the random values of `tensor`."""
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
        layers = 1 if tensor.name.startswith(f"blk.{shape.num_layers}.") else shape.num_layers
        return gain * gated * _BRANCHES / math.sqrt(2 * layers) * unit
    return unit


def fill(shape: Shape, tensor: Tensor, vocab: Vocab, seed: int) -> FloatArray:
    """Return the values of an f32 tensor, the same for the same shape, vocabulary and seed."""
    if shape.target_layers and tensor.role not in ("token_embd", "output"):
        return _reader(shape, tensor, vocab, seed)
    if shape.draft_vocab and tensor.role == "output":
        whole = replace(tensor, dims=(shape.vocab_size, shape.embedding))
        return fill(replace(shape, draft_vocab=0), whole, vocab, seed)[proposed(shape)]
    if tensor.role.endswith("norm"):
        # Sharp attention: a flat average over thousands of rows would drown each of them.
        return np.full(
            tensor.dims, 2.0 if tensor.role in ("attn_q_norm", "attn_k_norm") else 1.0, np.float32
        )
    if tensor.role == "ssm_a":
        return -_per_head(_FORGET, tensor)
    if tensor.role == "ssm_dt":
        return np.full(tensor.dims, math.log(math.e - 1), np.float32)  # softplus of it is 1
    random = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    values = random.standard_normal(tensor.dims, np.float32)
    values *= deviation(shape, tensor)
    if len(tensor.dims) > 1 and tensor.role not in F32_MATRICES and not shape.quantised:
        _reserve(values, tensor, vocab)
    if tensor.role == "output" and shape.habit:
        values += _habits(shape, vocab, seed)
    return values


def proposed(shape: Shape) -> npt.NDArray[np.int64]:
    """Return the tokens that a draft model proposes, evenly spread, shape (draft_vocab,)."""
    return np.arange(shape.draft_vocab) * shape.vocab_size // shape.draft_vocab


def _reader(shape: Shape, tensor: Tensor, vocab: Vocab, seed: int) -> FloatArray:
    """Return the values of a tensor of a draft model that reads layers of its target.

    The first head of each layer looks at the token itself, or in a block at the place before, and
    passes the token on: so the habits of the target are found. All else is random, and weak.
    """
    role = tensor.role
    width = shape.embedding
    if "norm" in role:
        return np.full(
            tensor.dims, 2.0 if role in ("attn_q_norm", "attn_k_norm") else 1.0, np.float32
        )
    if role == "markov_w1":
        return fill(
            shape, replace(tensor, name="token_embd.weight", role="token_embd"), vocab, seed
        )
    if role == "markov_w2":
        return _habits(shape, vocab, seed)
    random = np.random.default_rng([seed, zlib.crc32(tensor.name.encode())])
    values = random.standard_normal(tensor.dims, np.float32) / math.sqrt(tensor.fan_in)
    if role.endswith("conv_base"):
        values *= 0.1
        values[:, 0] += 1
    elif role == "fc":
        values[:NUM_RESERVED] = 0
    elif role in ("attn_q", "attn_k", "attn_v"):
        head = values[: shape.head_size]
        head[:] = 0
        if role == "attn_v":
            head[:, :width] = np.eye(shape.head_size, width)
        else:
            head[:, CONSTANT] = _LOOK
            if role == "attn_k" and shape.block:  # turned by one place
                angles = shape.rope_base ** (-np.arange(shape.head_size // 2) * 2 / shape.head_size)
                head[:, CONSTANT] *= np.concatenate(
                    [np.cos(angles) - np.sin(angles), np.sin(angles) + np.cos(angles)]
                )
    elif role == "attn_output":
        values[:NUM_RESERVED] = 0
        values[:, : shape.head_size] = np.eye(width, shape.head_size) * (
            2.0 if shape.block else 1.0
        )
    elif role == "ffn_down":
        values *= 0.3
        values[:NUM_RESERVED] = 0
    elif role != "conf_proj":
        values *= 0.3
    return values


_LOOK = 0.6
"""Weight of the constant in queries and keys of the head that looks near by."""


def _reserve(values: FloatArray, tensor: Tensor, vocab: Vocab) -> None:
    """Set the reserved channels of a tensor's ``values`` in place: the embedding writes them, the
    output matrix reads them, and no layer changes them.
    """
    reserved = slice(NUM_RESERVED)
    if tensor.role == "token_embd":
        values[:, reserved] = embed(vocab)
    elif tensor.role == "output":
        values[:, reserved] = predict(vocab)
        values[vocab.ids["<|im_end|>"], NUM_RESERVED:] = (
            0  # the end is due to the text, not to chance
        )
    elif tensor.role in _GAIN:
        values[..., reserved, :] = 0
    elif tensor.role == "eh_proj":
        # The token as it is, and next to it what the trunk made of the one before, to matter as
        # much.
        width = len(values)
        values[reserved] = values[:, width:][:, reserved] = 0
        values[:, width:] *= math.sqrt(2)
        values[:, :width] = np.eye(width)
    else:
        # Values that most tokens share must not drown those that separate them.
        values[..., reserved] = 0
    if tensor.role == "ssm_beta":
        write = _per_head(_WRITE, tensor)
        values[:, CONSTANT] = bias(np.log(write / (1 - write)))


def _per_head(ends: tuple[float, float], tensor: Tensor) -> FloatArray:
    return np.geomspace(*ends, num=tensor.dims[0], dtype=np.float32)


# -- babble
# ----------------------------------------------------------------------------------

VOWEL, CONSONANT, SPACE, STOP, OTHER, END, NEVER = range(7)

NUM_RESERVED = 1 + 5
CONSTANT = 0

# Logit of the next token's first character by the last character of the token before.
#   vowel  consonant space  stop  other   end  never
_FOLLOWS = np.array(
    [
        [0.0, 3.0, 4.5, 1.5, -5.0, -0.5, -14.0],  # vowel
        [4.5, 0.5, 2.0, 0.0, -5.0, -3.0, -14.0],  # consonant
        [3.0, 3.5, -6.0, -6.0, -5.0, -6.0, -14.0],  # space
        [-3.0, -3.0, 7.0, -6.0, -6.0, 5.5, -14.0],  # stop
        [
            3.0,
            3.5,
            -2.0,
            -6.0,
            -6.0,
            -6.0,
            -14.0,
        ],  # other: a special token, so also the beginning of a reply
    ]
)

# Value of a reserved channel, and its rest after the last norm (measured: the other channels grow).
_LEVEL = 2.0
_NORMED = 1.35


def embed(vocab: Vocab) -> npt.NDArray[np.float32]:
    """Return the reserved channels of the token embedding, shape (tokens, NUM_RESERVED)."""
    channels = np.zeros((len(vocab), NUM_RESERVED), np.float32)
    channels[:, CONSTANT] = _LEVEL
    for row, (token, kind) in enumerate(zip(vocab.tokens, vocab.types, strict=True)):
        last = OTHER if kind is not TokenType.NORMAL else _kind(token_bytes(token)[-1])
        channels[row, 1 + last] = _LEVEL
    return channels


def predict(vocab: Vocab) -> npt.NDArray[np.float32]:
    """Return the reserved columns of the output matrix, shape (tokens, NUM_RESERVED)."""
    first = np.array(
        [_first(token, kind) for token, kind in zip(vocab.tokens, vocab.types, strict=True)]
    )
    columns = np.zeros((len(vocab), NUM_RESERVED), np.float32)
    columns[:, 1:] = _FOLLOWS.T[first] / _NORMED
    return columns


def _habits(shape: Shape, vocab: Vocab, seed: int) -> FloatArray:
    """Return the part of the output matrix by which each letter and space makes another one
    likelier, all in one circle.
    """
    embedding = Tensor("token_embd.weight", "token_embd", (shape.vocab_size, shape.embedding), F32)
    tokens = np.flatnonzero(
        [_first(*token) < STOP for token in zip(vocab.tokens, vocab.types, strict=True)]
    )
    order = np.random.default_rng([seed, len(tokens)]).permutation(tokens)
    values = fill(shape, embedding, vocab, seed)[order]
    values[:, :NUM_RESERVED] = 0
    matrix = np.zeros(embedding.dims, np.float32)
    level = shape.habit * math.hypot(_BRANCHES, _EMBEDDING)
    matrix[np.roll(order, -1)] = values * (level / np.square(values).sum(axis=1, keepdims=True))
    return matrix


def bias(value: Any) -> Any:
    """Return the weight in the `CONSTANT` column that adds about `value` to a product with a normed
    activation.
    """
    return np.asarray(value) / _NORMED


def _first(token: str, kind: TokenType) -> int:
    if token == "<|im_end|>":
        return END
    text = token_bytes(token)
    if kind is not TokenType.NORMAL or not all(0x20 <= byte < 0x7F for byte in text):
        return NEVER
    return _kind(text[0])


def _kind(byte: int) -> int:
    char = chr(byte)
    if char in "aeiou":
        return VOWEL
    if "a" <= char <= "z":
        return CONSONANT
    return SPACE if char == " " else STOP if char in ".,!?" else OTHER


# -- quantised tensors
# ----------------------------------------------------------------------------------

# A prime number of blocks: two rows are equal only if they are that many blocks apart times their
# own length.
TILE_BLOCKS = 131_071

_SUB_SCALE = 8  # what each sub-block's integer scale (and minimum) is set to

_LAYOUT = {
    Q4_K: np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("quants", "u1", 128)]),
    Q6_K: np.dtype([("quants", "u1", 192), ("scales", "i1", 16), ("d", "<f2")]),
    Q8_0: np.dtype([("d", "<f2"), ("quants", "u1", 32)]),
}

# Q4_K packs eight 6-bit scales and eight 6-bit minima; small ones need the low bits of the first
# eight bytes for the sub-blocks 0 to 3, and a nibble each of the last four bytes for the others.
_Q4_K_SCALES = [_SUB_SCALE] * 8 + [_SUB_SCALE << 4 | _SUB_SCALE] * 4


def _uniform_deviation(levels: int) -> float:
    return float(np.sqrt((levels**2 - 1) / 12))


class Tiles:
    """Random tiles, one per quantised type, made once for a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tiles: dict[GGMLQuantizationType, np.ndarray[Any, Any]] = {}

    def fill(self, tensor: Tensor, deviation: float) -> Iterator[memoryview]:
        """Yield the bytes of `tensor`, in pieces of at most one tile, with values of the given
        standard deviation.

        A piece is valid until the next one is asked for.
        """
        tile = self._tile(tensor.type)
        if tensor.type is Q4_K:
            tile["d"] = deviation / (_SUB_SCALE * _uniform_deviation(16))
            tile["dmin"] = tile["d"] * np.float16(7.5)
        elif tensor.type is Q6_K:
            tile["d"] = deviation / (_SUB_SCALE * _uniform_deviation(64))
        else:
            tile["d"] = deviation / _uniform_deviation(256)
        content = tile.view(np.uint8).data
        # Each tensor starts elsewhere in the tile, or all layers would be alike.
        start = zlib.crc32(tensor.name.encode()) % TILE_BLOCKS * tile.itemsize
        left = tensor.num_bytes
        while left:
            piece = content[start : start + left]
            yield piece
            left -= len(piece)
            start = 0

    def _tile(self, kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
        if (tile := self._tiles.get(kind)) is None:
            tile = self._tiles[kind] = np.zeros(TILE_BLOCKS, _LAYOUT[kind])
            random = np.random.default_rng([self._seed, kind])
            tile["quants"] = random.integers(0, 256, tile["quants"].shape, np.uint8)
            if kind is Q4_K:
                tile["scales"] = _Q4_K_SCALES
            elif kind is Q6_K:
                tile["scales"] = _SUB_SCALE
        return tile
