"""Shapes of the models that the generator can write, the cache sizes that follow from them, and
their tensors.

The full-size shapes repeat the published dimensions of the models they are named after; the tiny
ones keep the same layout at the smallest useful widths. Tensors have the names and dimensions that
llama.cpp looks up for the architectures `qwen3`, `qwen35` and `qwen35moe`, and for the draft models
`eagle3` and `dflash`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Arch = Literal["qwen3", "qwen35", "qwen35moe", "eagle3", "dflash"]

F32_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """Dimensions of one model. All widths are in elements, `*_size` of a head is per head.

    `feed_forward` is the width of one expert if there are experts. `attention_interval` is 4 when
    three recurrent layers precede each full-attention layer, and 1 when every layer is full
    attention. `quantised` chooses Q4_K with some Q6_K instead of f32 for the matrices. With
    `num_classes` it is a reranker.

    `num_nextn` (0 or 1) is the number of blocks after the last layer that predict one more token
    each (a head for drafts); `has_trunk` is False for a separate file with nothing but that head.
    `habit` is by how much (in logits) each letter suggests one that follows it: what a head can
    learn.

    A draft model reads the inputs of `target_layers` of its target. With `block` it drafts that
    many tokens at once, the known one among them; `selector` is how many candidates of each place
    it weighs, by vectors of `selector_rank`, and `markov` the rank of what it adds for the token
    before, if `anchored` from the known token's own place on. All its layers but the last look
    `window` tokens back. With `draft_vocab` it proposes only so many of the tokens.
    """

    name: str
    arch: Arch
    num_layers: int
    embedding: int
    feed_forward: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_size: int
    vocab_size: int
    rope_sections: tuple[int, int, int, int] = (0, 0, 0, 0)
    rope_base: float = 1e7
    attention_interval: int = 1
    num_key_heads: int = 0
    num_value_heads: int = 0
    recurrent_head_size: int = 0
    conv_kernel: int = 0
    num_experts: int = 0
    num_experts_used: int = 0
    shared_feed_forward: int = 0
    context_length: int = 262_144
    quantised: bool = False
    num_classes: int = 0
    num_nextn: int = 0
    has_trunk: bool = True
    habit: float = 0.0
    target_layers: tuple[int, ...] = ()
    block: int = 0
    selector: int = 0
    selector_rank: int = 16
    markov: int = 0
    anchored: bool = True
    window: int = 0
    draft_vocab: int = 0

    def eagle3(self) -> Shape:
        """Return a draft model that reads three layers of `with_nextn`, with its own embeddings and
        output matrix.
        """
        return self._reader("eagle3", 1, (1, self.num_layers // 2, self.num_layers))

    def dflash(self, kind: str = "dflash") -> Shape:
        """Return a draft model of blocks of 8 that reads two layers and takes embeddings and output
        matrix from its target; `kind` is dflash, dflash2, dspark, or dflash-window as for the
        Qwen3.6 models.
        """
        layers = (1, self.num_layers - 1)
        shape = replace(
            self._reader("dflash", 2, layers), name=f"{self.name}-{kind}", block=8, has_trunk=False
        )
        return replace(
            shape,
            selector=6 if kind == "dflash2" else 0,
            markov=self.embedding if kind == "dspark" else 0,
            window=64 if kind == "dflash-window" else 0,
        )

    def _reader(self, arch: Arch, num_layers: int, layers: tuple[int, ...]) -> Shape:
        """Return a draft model that reads ``layers`` of its target: two heads or more of the
        target's size, which look near by, full attention and no experts.
        """
        return replace(
            self.with_nextn(),
            name=f"{self.name}-{arch}",
            arch=arch,
            num_layers=num_layers,
            target_layers=layers,
            num_nextn=0,
            num_kv_heads=self.num_heads,
            rope_size=self.head_size,
            rope_sections=(self.head_size // 2, 0, 0, 0)
            if arch == "dflash" and any(self.rope_sections)
            else (0,) * 4,
            rope_base=100.0,
            attention_interval=1,
            num_experts=0,
            feed_forward=2 * self.embedding,
        )

    def with_nextn(self) -> Shape:
        """Return this model with a head for drafts; if not quantised, with habits, so that the head
        is often right.
        """
        return replace(
            self, name=f"{self.name}-nextn", num_nextn=1, habit=0.0 if self.quantised else _HABIT
        )

    def only_nextn(self) -> Shape:
        """Return the head of `with_nextn` in a separate file, with the embeddings and the output
        matrix that it needs.
        """
        return replace(self.with_nextn(), name=f"{self.name}-head", has_trunk=False)

    def is_recurrent(self, layer: int) -> bool:
        """Return whether `layer` (from 0) is a Gated-DeltaNet layer."""
        return layer < self.num_layers and (layer + 1) % self.attention_interval != 0

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - self.num_recurrent_layers

    @property
    def num_recurrent_layers(self) -> int:
        return sum(self.is_recurrent(layer) for layer in range(self.num_layers))

    @property
    def key_width(self) -> int:
        """Width of the keys (and of the queries) of one recurrent layer."""
        return self.num_key_heads * self.recurrent_head_size

    @property
    def value_width(self) -> int:
        """Width of the values of one recurrent layer."""
        return self.num_value_heads * self.recurrent_head_size

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence (f32); 0 for a dense model.

        Per recurrent layer one matrix per value head, and the last `conv_kernel - 1` inputs of the
        convolution.
        """
        matrices = self.num_value_heads * self.recurrent_head_size**2
        conv = (self.conv_kernel - 1) * self.conv_channels
        return self.num_recurrent_layers * (matrices + conv) * F32_BYTES

    def row_bytes(self, type_k: str = "f16", type_v: str = "f16") -> int:
        """Return bytes of K and V of one token over all attention layers, with llama.cpp's names of
        the cache types.

            QWEN36_27B.row_bytes()                # 65536
            QWEN36_27B.row_bytes("q8_0", "q8_0")  # 34816

        Raises `ValueError` for an unknown type or one whose blocks do not divide a head.
        """
        width = self.num_kv_heads * self.head_size
        per_layer = 0
        for name in (type_k, type_v):
            try:
                block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]
            except KeyError:
                raise ValueError(f"unknown cache type {name!r}") from None
            if self.head_size % block:
                raise ValueError(
                    f"cache type {name!r} has blocks of {block}, heads have {self.head_size} "
                    "elements"
                )
            per_layer += width // block * size
        return self.num_attention_layers * per_layer


_HABIT = 12.0
"""Habits in a model with a head: a draft of three is right about 0.8 tokens long."""

BYTE_VOCAB_SIZE = 282

TINY_HYBRID = Shape(
    name="tiny-hybrid",
    arch="qwen35",
    num_layers=8,
    embedding=64,
    feed_forward=128,
    num_heads=2,
    num_kv_heads=1,
    head_size=64,
    rope_size=16,
    rope_sections=(3, 3, 2, 0),
    vocab_size=BYTE_VOCAB_SIZE,
    attention_interval=4,
    num_key_heads=2,
    num_value_heads=4,
    recurrent_head_size=32,
    conv_kernel=4,
)

TINY_MOE = replace(
    TINY_HYBRID,
    name="tiny-moe",
    arch="qwen35moe",
    feed_forward=32,
    num_experts=8,
    num_experts_used=2,
    shared_feed_forward=32,
)

TINY_DENSE = Shape(
    name="tiny-dense",
    arch="qwen3",
    num_layers=4,
    embedding=64,
    feed_forward=128,
    num_heads=2,
    num_kv_heads=1,
    head_size=64,
    rope_size=64,
    rope_base=1e6,
    vocab_size=BYTE_VOCAB_SIZE,
)

TINY_FAT = replace(
    TINY_HYBRID, name="tiny-fat", num_layers=4, num_value_heads=12, recurrent_head_size=64
)
"""A state of as many rows as the 27B's, about 2,400; a row has a 256th of the bytes."""

TINY_RERANK = replace(TINY_DENSE, name="tiny-rerank", num_classes=2)

QWEN36_27B = Shape(
    name="27b",
    arch="qwen35",
    num_layers=64,
    embedding=5120,
    feed_forward=17_408,
    num_heads=24,
    num_kv_heads=4,
    head_size=256,
    rope_size=64,
    rope_sections=(11, 11, 10, 0),
    vocab_size=248_320,
    attention_interval=4,
    num_key_heads=16,
    num_value_heads=48,
    recurrent_head_size=128,
    conv_kernel=4,
    quantised=True,
)

QWEN36_35B_A3B = replace(
    QWEN36_27B,
    name="35b-a3b",
    arch="qwen35moe",
    num_layers=40,
    embedding=2048,
    feed_forward=512,
    num_heads=16,
    num_kv_heads=2,
    num_value_heads=32,
    num_experts=256,
    num_experts_used=8,
    shared_feed_forward=512,
)

_HYBRIDS = (TINY_HYBRID, TINY_MOE, QWEN36_27B, QWEN36_35B_A3B)
_HEADS = (*(shape.with_nextn() for shape in _HYBRIDS), *(shape.only_nextn() for shape in _HYBRIDS))

_DRAFTS = (
    replace(TINY_DENSE, name="tiny-draft", num_layers=2, habit=20.0),
    replace(TINY_HYBRID, name="tiny-hybrid-draft", num_layers=4, habit=_HABIT),
)
"""Small models with the habits of those with a head, whose replies they guess as well."""

_READERS = tuple(
    reader
    for shape in (TINY_HYBRID, TINY_DENSE)
    for reader in (
        shape.eagle3(),
        *map(shape.dflash, ("dflash", "dflash2", "dspark", "dflash-window")),
    )
)

SHAPES = {shape.name: shape for shape in (*_HYBRIDS, TINY_DENSE, *_HEADS, *_DRAFTS, *_READERS)}


# -- tensors
# ----------------------------------------------------------------------------------

F32 = GGMLQuantizationType.F32
Q4_K = GGMLQuantizationType.Q4_K
Q6_K = GGMLQuantizationType.Q6_K
Q8_0 = GGMLQuantizationType.Q8_0
I64 = GGMLQuantizationType.I64

F32_MATRICES = {"ssm_conv1d", "ffn_gate_inp"}
"""Read by operators that take f32 only."""

# Of draft models: added to f32, or too narrow for a quantised block.
_SMALL = {"attn_conv_base", "ffn_conv_base", "conf_proj"}

# A few columns of 32 or 48, too narrow a matrix to be worth four bits, and what all of a head rests
# on.
_Q8_MATRICES = {"ssm_alpha", "ssm_beta", "eh_proj", "fc"}
# More sensitive to rounding; six bits in every second group of four layers, much as the usual
# four-bit mixes do.
_Q6_MATRICES = {"output", "attn_v", "ffn_down", "ffn_down_exps", "ffn_down_shexp"}


@dataclass(frozen=True)
class Tensor:
    """A tensor: `role` is its name without block number and suffix, `dims` are slowest first, as in
    numpy.
    """

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
    """Return all tensors of a model of this shape."""
    if shape.target_layers:
        found = [
            *_reader(shape),
            *(part for layer in range(shape.num_layers) for part in _reading_layer(shape, layer)),
        ]
        return [Tensor(name, role, dims, _type(shape, role, dims, 0)) for name, role, dims in found]
    last = Q6_K if shape.quantised else F32
    first = Q4_K if shape.quantised else F32
    listing = [
        Tensor("token_embd.weight", "token_embd", (shape.vocab_size, shape.embedding), first),
        Tensor("output_norm.weight", "output_norm", (shape.embedding,), F32),
        Tensor("output.weight", "output", (shape.vocab_size, shape.embedding), last),
    ]
    if shape.num_classes:
        listing.append(
            Tensor("cls.output.weight", "cls", (shape.num_classes, shape.embedding), F32)
        )
    for layer in range(
        0 if shape.has_trunk else shape.num_layers, shape.num_layers + shape.num_nextn
    ):
        for suffixed, dims in _layer(shape, layer):
            role = suffixed.removeprefix("nextn.").split(".")[0]
            listing.append(
                Tensor(f"blk.{layer}.{suffixed}", role, dims, _type(shape, role, dims, layer))
            )
    return listing


def _type(shape: Shape, role: str, dims: tuple[int, ...], layer: int) -> GGMLQuantizationType:
    if role == "d2t":
        return I64
    if len(dims) == 1 or role in F32_MATRICES | _SMALL or not shape.quantised:
        return F32
    if role in _Q8_MATRICES:
        return Q8_0
    return Q6_K if role in _Q6_MATRICES and layer // 4 % 2 == 0 else Q4_K


def _layer(shape: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = shape.embedding
    yield "attn_norm.weight", (width,)
    yield from _recurrent(shape) if shape.is_recurrent(layer) else _attention(shape)
    yield "ffn_norm.weight" if shape.arch == "qwen3" else "post_attention_norm.weight", (width,)
    yield from _experts(shape) if shape.num_experts else _feed_forward(shape)
    if layer >= shape.num_layers:
        yield "nextn.eh_proj.weight", (width, 2 * width)
        yield "nextn.enorm.weight", (width,)
        yield "nextn.hnorm.weight", (width,)
        yield "nextn.shared_head_norm.weight", (width,)


def _attention(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = shape.embedding
    head = shape.head_size
    # The hybrid models compute an output gate together with each head's query.
    per_head = head if shape.arch == "qwen3" else 2 * head
    yield "attn_q.weight", (shape.num_heads * per_head, width)
    yield "attn_k.weight", (shape.num_kv_heads * head, width)
    yield "attn_v.weight", (shape.num_kv_heads * head, width)
    yield "attn_q_norm.weight", (head,)
    yield "attn_k_norm.weight", (head,)
    yield "attn_output.weight", (width, shape.num_heads * head)


def _recurrent(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = shape.embedding
    heads = shape.num_value_heads
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


_Part = tuple[str, str, tuple[int, ...]]

KERNEL = 2
GROUP = 16
"""Width and channels per group of the convolutions of a draft model that weighs candidates."""


def _reader(shape: Shape) -> Iterator[_Part]:
    """Yield name, role and dimensions of a draft model's tensors outside its layers."""
    width = shape.embedding
    vocab = shape.vocab_size
    yield "fc.weight", "fc", (width, width * len(shape.target_layers))
    yield "output_norm.weight", "output_norm", (width,)
    if shape.has_trunk:
        yield "token_embd.weight", "token_embd", (vocab, width)
        yield "output.weight", "output", (vocab, width)
    if shape.draft_vocab:
        yield "output.weight", "output", (shape.draft_vocab, width)
        yield "d2t", "d2t", (shape.draft_vocab,)
    if shape.block:
        yield "enc.output_norm.weight", "output_norm", (width,)
    if shape.markov:
        yield "markov_w1.weight", "markov_w1", (vocab, shape.markov)
        yield "markov_w2.weight", "markov_w2", (vocab, shape.markov)
        yield "conf_proj.weight", "conf_proj", (1, width + shape.markov)
    if shape.selector:
        yield "selector_predecessor.weight", "selector", (vocab, shape.selector_rank)
        yield "selector_successor.weight", "selector", (vocab, shape.selector_rank)
        yield "selector_hidden.weight", "selector", (shape.selector_rank, width)


def _reading_layer(shape: Shape, layer: int) -> Iterator[_Part]:
    """Yield name, role and dimensions of the tensors of a draft model's layer, slowest dimension
    first.
    """
    width = shape.embedding
    # EAGLE-3 gets the token with what it read.
    seen = width if shape.block else 2 * width
    heads = shape.num_heads * shape.head_size
    parts: list[tuple[str, tuple[int, ...]]] = [
        ("attn_norm.weight", (width,)),
        ("ffn_norm.weight", (width,)),
    ]
    parts.append(("attn_q.weight", (heads, seen)))
    parts += [
        (f"attn_{name}.weight", (shape.num_kv_heads * shape.head_size, seen)) for name in "kv"
    ]
    parts += [("attn_output.weight", (width, heads)), *_feed_forward(shape)]
    if shape.block:
        parts += [
            ("attn_q_norm.weight", (shape.head_size,)),
            ("attn_k_norm.weight", (shape.head_size,)),
        ]
    else:
        parts.append(("attn_norm_2.weight", (width,)))
    if shape.selector:
        for name in ("attn_conv", "ffn_conv"):
            parts.append((f"{name}_base", (2, KERNEL, width)))
            parts.append((f"{name}_proj.weight", (2 * KERNEL * width // GROUP, width)))
    for name, dims in parts:
        yield f"blk.{layer}.{name}", name.split(".")[0], dims


def _experts(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    width = shape.embedding
    inner = shape.feed_forward
    shared = shape.shared_feed_forward
    yield "ffn_gate_inp.weight", (shape.num_experts, width)
    yield "ffn_gate_exps.weight", (shape.num_experts, inner, width)
    yield "ffn_up_exps.weight", (shape.num_experts, inner, width)
    yield "ffn_down_exps.weight", (shape.num_experts, width, inner)
    yield "ffn_gate_inp_shexp.weight", (width,)
    yield "ffn_gate_shexp.weight", (shared, width)
    yield "ffn_up_shexp.weight", (shared, width)
    yield "ffn_down_shexp.weight", (width, shared)
