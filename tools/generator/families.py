"""Models with random weights of other families than Qwen's: tiny ones, one or two for each memory
that llama.cpp has, and three as large as published ones (`LARGE`).

A family is only metadata: llama.cpp itself returns the tensors of a model with this metadata
(`llama_model_init_from_user`). Tiny weights are f32, large matrices are quantised. The keys are in
llama.cpp's src/llama-arch.cpp.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from pyctl.files.atomic_file import temp_path
from pyctl.llama.library.bindings import api
from pyctl.llama.library.extension import open_library
from tools.generator.generate import add_tokenizer, source_digest, write_tensors
from tools.generator.shapes import F32, Q4_K, Q8_0, Tensor
from tools.generator.vocab import InitParams, byte_vocab, ggml
from tools.generator.weights import Tiles

__all__ = ["FAMILIES", "LARGE", "WINDOW", "Family", "cached_family", "write_family"]

Value: TypeAlias = int | float | bool | Sequence[int] | Sequence[float]

VOCAB_SIZE = 282
N_LAYERS = 4
WINDOW = 64
"""Tokens of every sliding window and of every attention chunk."""


@dataclass(frozen=True)
class Family:
    """A model: llama.cpp's name of its architecture, the class of its memory if a test relies on
    it, and its keys without the prefix.

    Large models, whose matrices are quantised, have a ``pattern``: kinds of layers, counted from 0,
    that repeat. llama.cpp is asked for one of each.
    """

    name: str
    arch: str
    memory: str = ""
    keys: Mapping[str, Value] = field(default_factory=dict)
    pattern: tuple[int, ...] = ()

    @property
    def all_keys(self) -> dict[str, Value]:
        """The keys with those that all families share."""
        return {**COMMON, **self.keys}

    def of_layers(self, layers: Sequence[int]) -> Family:
        """Return a family of only these layers."""
        n_all = self.all_keys["block_count"]
        keys = dict(self.keys)
        for key, value in self.keys.items():
            if (
                key.startswith(("attention.", "feed_forward"))
                and isinstance(value, tuple)
                and len(value) == n_all
            ):
                keys[key] = tuple(value[layer] for layer in layers)
        return replace(self, keys={**keys, "block_count": len(layers)})


COMMON: Mapping[str, Value] = {
    "vocab_size": VOCAB_SIZE,
    "context_length": 16_384,
    "embedding_length": 64,
    "block_count": N_LAYERS,
    "feed_forward_length": 96,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10_000.0,
}

EXPERTS: Mapping[str, Value] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    "leading_dense_block_count": 1,
}

LATENT: Mapping[str, Value] = {
    "attention.head_count": 1,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 512,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "rope.dimension_count": 64,
}
"""Attention over a compressed latent, K and V in one row."""

INDEXER: Mapping[str, Value] = {
    "attention.indexer.head_count": 64,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 32,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
    "attention.indexer.kpool": 4,
    "attention.indexer.kpool_select_tail": True,
}

MAMBA: Mapping[str, Value] = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 2,
    "ssm.group_count": 2,
}

RWKV: Mapping[str, Value] = {
    "embedding_length": 128,
    "attention.head_count": 0,
    "wkv.head_size": 64,  # with AVX-512, llama.cpp's kernel steps over 64 values at a time
    "attention.decay_lora_rank": 16,
    "attention.iclr_lora_rank": 16,
    "attention.value_residual_mix_lora_rank": 16,
    "attention.gate_lora_rank": 16,
}

HYPER: Mapping[str, Value] = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.low_rank": 8,
}

N_GRAMS: Mapping[str, Value] = {
    "embedding_length_per_layer_input": 16,
    "ple.layers": (0,),
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 2,
    "ple.conv_kernel": 4,
    "ple.eos_token_id": 0,
    "ple.layer_multipliers": (1, 3, 5),
    "ple.head_offsets": tuple(range(0, 4 * VOCAB_SIZE, VOCAB_SIZE)),
    "ple.head_vocab_sizes": (VOCAB_SIZE,) * 4,
}

LATENT_WINDOWS: Mapping[str, Value] = {
    "attention.sliding_window_pattern": (0, 1, 0, 1),
    "attention.indexer.types": (1, 0, 1, 0),
    "attention.kv_lora_rank_swa": 512,
    "attention.key_length_swa": 576,
    "attention.value_length_swa": 512,
    "attention.key_length_mla_swa": 192,
    "attention.value_length_mla_swa": 128,
}

COMPRESSED: Mapping[str, Value] = {
    "embedding_length": 128,
    "attention.head_count_kv": 1,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.q_lora_rank": 32,
    "attention.output_group_count": 2,
    "attention.output_lora_rank": 32,
    "attention.compress_ratios": (0, 0, 4, 128),
    "attention.compress_rope_freq_base": 160_000.0,
    "expert_gating_func": 4,
    "hash_layer_count": 0,
    "swiglu_clamp_exp": 10.0,
}

SLIDING: Mapping[str, Value] = {"attention.sliding_window": WINDOW, "rope.freq_base_swa": 10_000.0}
IN_TURN: Mapping[str, Value] = {**SLIDING, "attention.sliding_window_pattern": 2}
ROPE: Mapping[str, Value] = {"rope.dimension_count": 32}
HEADS: Mapping[str, Value] = {"attention.key_length": 32, "attention.value_length": 32}
DELTA: Mapping[str, Value] = {**MAMBA, "ssm.state_size": 64}
HALF: Mapping[str, Value] = {"attention.head_count_kv": (0, 2, 0, 2)}
"""Every other layer has attention; the others are recurrent."""
FEW: Mapping[str, Value] = {"attention.head_count_kv": (0, 2, 0, 0)}
LATENT_HALF: Mapping[str, Value] = {
    "attention.head_count_kv": (0, 1, 0, 1),
    "attention.key_length": 512,
    "rope.dimension_count": 0,
}
QUARTERS: Mapping[str, Value] = {
    "attention.indexer.key_length": 32,
    "attention.compress_ratios": (4, 4, 4, 4),
    "full_attention_interval": 2,
    "rope.dimension_sections": (8, 4, 4, 0),
}
LFM2: Mapping[str, Value] = {**HALF, **ROPE, "shortconv.l_cache": 3}
GATE: Mapping[str, Value] = {
    "kda.head_dim": 32,
    "kda.safe_gate": True,
    "kda.gate_lower_bound": -5.0,
}

ROWS = "llama_kv_cache"
WINDOWS = "llama_kv_cache_iswa"
HYBRID = "llama_memory_hybrid"
RECURRENT = "llama_memory_recurrent"
INDEXED = "llama_memory_hybrid_idx"


def _tiny(arch: str, memory: str, *groups: Mapping[str, Value], more: str = "") -> Family:
    """Return a family with the keys of all ``groups``; ``more`` is the rest of its name."""
    keys = {key: value for group in groups for key, value in group.items()}
    return Family(f"tiny-{arch.replace('_', '-')}{more}", arch, memory, keys)


_TINY = (
    _tiny("llama", ROWS, ROPE),
    _tiny("deepseek2", ROWS, EXPERTS, LATENT),
    _tiny("nemotron_h", HYBRID, MAMBA, ROPE, FEW, {"feed_forward_length": (0, 0, 0, 96)}),
    _tiny("lfm2", HYBRID, LFM2),
    _tiny("lfm2", "llama_memory_hybrid_iswa", LFM2, IN_TURN, more="-window"),
    _tiny("qwen4exp", INDEXED, EXPERTS, INDEXER, HYPER, HEADS, ROPE, DELTA, N_GRAMS, QUARTERS),
    _tiny(
        "glm5-next",
        INDEXED,
        EXPERTS,
        LATENT,
        INDEXER,
        HYPER,
        GATE,
        LATENT_HALF,
        {"ssm.conv_kernel": 4},
    ),
    _tiny("gemma3", WINDOWS, IN_TURN, HEADS),
    _tiny("gpt-oss", WINDOWS, IN_TURN, EXPERTS, HEADS),
    _tiny(
        "llama4",
        WINDOWS,
        SLIDING,
        EXPERTS,
        ROPE,
        {"attention.chunk_size": WINDOW, "interleave_moe_layer_step": 2},
    ),
    _tiny("mamba2", RECURRENT, MAMBA, {"attention.head_count": 0, "attention.head_count_kv": 0}),
    _tiny("rwkv7", RECURRENT, RWKV, {"token_shift_count": 2}),
    _tiny(
        "minimax-m3",
        "llama_kv_cache_msa",
        EXPERTS,
        INDEXER,
        ROPE,
        {"attention.indexer.head_count": 2},
    ),
    _tiny("deepseek32", "llama_kv_cache_dsa", EXPERTS, LATENT, INDEXER),
    _tiny(
        "dots3note", "llama_kv_cache_dsa_iswa", EXPERTS, LATENT, INDEXER, SLIDING, LATENT_WINDOWS
    ),
    _tiny("deepseek4", "llama_kv_cache_dsv4", EXPERTS, INDEXER, SLIDING, HYPER, ROPE, COMPRESSED),
)
FAMILIES = {family.name: family for family in _TINY}

N_GRAM_ROWS = 100_003
"""Rows of a large model's table for each of its heads."""

LARGE = {
    family.name: family
    for family in (
        Family(
            "gpt-oss-20b",
            "gpt-oss",
            "llama_kv_cache_iswa",
            {
                "vocab_size": 201_088,
                "context_length": 131_072,
                "embedding_length": 2880,
                "block_count": 24,
                "feed_forward_length": 2880,
                "attention.head_count": 64,
                "attention.head_count_kv": 8,
                "attention.key_length": 64,
                "attention.value_length": 64,
                "attention.sliding_window": 128,
                "expert_count": 32,
                "expert_used_count": 4,
                "expert_feed_forward_length": 2880,
                "rope.freq_base": 150_000.0,
            },
            pattern=(0, 1),
        ),
        Family(
            "gemma4-26b-a4b",
            "gemma4",
            "llama_kv_cache_iswa",
            {
                "vocab_size": 262_144,
                "context_length": 262_144,
                "embedding_length": 2816,
                "embedding_length_per_layer_input": 0,
                "block_count": 30,
                "feed_forward_length": 2112,
                "attention.head_count": 16,
                "attention.head_count_kv": (8, 8, 8, 8, 8, 2) * 5,
                "attention.key_length": 512,
                "attention.value_length": 512,
                "attention.key_length_swa": 256,
                "attention.value_length_swa": 256,
                "attention.shared_kv_layers": 0,
                "attention.sliding_window": 1024,
                "attention.sliding_window_pattern": (1, 1, 1, 1, 1, 0) * 5,
                "expert_count": 128,
                "expert_used_count": 8,
                "expert_feed_forward_length": 704,
                "rope.dimension_count": 512,
                "rope.dimension_count_swa": 256,
                "rope.freq_base": 1_000_000.0,
                "rope.freq_base_swa": 10_000.0,
            },
            pattern=(0, 0, 0, 0, 0, 1),
        ),
        Family(
            "qwen4exp-20b-a6b",
            "qwen4exp",
            "llama_memory_hybrid_idx",
            {
                "vocab_size": 248_320,
                "context_length": 262_144,
                "embedding_length": 2560,
                "block_count": 48,
                "feed_forward_length": 640,
                "attention.head_count": 24,
                "attention.head_count_kv": 2,
                "attention.key_length": 256,
                "attention.value_length": 256,
                "attention.layer_norm_rms_epsilon": 1e-6,
                "attention.recurrent_layers": (True, True, True, False) * 12,
                "attention.compress_ratios": (0, 0, 0, 4) * 12,
                "attention.indexer.head_count": 4,
                "attention.indexer.key_length": 128,
                "attention.indexer.top_k": 2048,
                "rope.dimension_count": 64,
                "rope.dimension_sections": (11, 11, 10, 0),
                "rope.freq_base": 10_000_000.0,
                "expert_count": 64,
                "expert_used_count": 10,
                "expert_feed_forward_length": 640,
                "expert_shared_feed_forward_length": 640,
                "hyper_connection.count": 4,
                "hyper_connection.low_rank": 320,
                "ssm.conv_kernel": 4,
                "ssm.inner_size": 6144,
                "ssm.state_size": 128,
                "ssm.time_step_rank": 48,
                "ssm.group_count": 16,
                "embedding_length_per_layer_input": 160,
                "ple.layers": (1,),
                "ple.ngram_size": 3,
                "ple.heads_per_ngram": 8,
                "ple.conv_kernel": 4,
                "ple.eos_token_id": 248_044,
                "ple.layer_multipliers": (
                    23_058_430_092_137,
                    27_670_116_110_565,
                    31_134_703_401_913,
                ),
                "ple.head_offsets": tuple(range(0, 16 * N_GRAM_ROWS, N_GRAM_ROWS)),
                "ple.head_vocab_sizes": (N_GRAM_ROWS,) * 16,
            },
            pattern=(0, 1, 0, 2, *(0, 0, 0, 2) * 11),
        ),
    )
}
"""Sizes of published models; random weights.

qwen4exp-20b-a6b is Qwen3.8-Flash-Next (125B-A6B and a table of 51B) with 64 of its 512 experts and
1.6 of its 320 million rows of n-grams, in 14 GB. A token evaluates as much, and its rows and states
are as large. 64 because CUDA has a kernel that selects experts only for powers of two.
"""

_MIN_QUANTISED = 2**18
"""Values of a matrix of a large model below which it stays f32: routers, convolutions, and what
kernels need so.
"""

_SCALE = re.compile(r"(?<!ffn_gate_inp)\.(input_)?scale$")
"""Scales of matrices, which files have whose matrices have no blocks. Routers have some always."""


def cached_family(family: Family, directory: str | PathLike[str], *, seed: int = 0) -> Path:
    """Return the model of ``family`` in ``directory``; write it there if it is missing."""
    digest = hashlib.blake2b(f"{source_digest()} {family!r}".encode(), digest_size=6).hexdigest()
    path = Path(directory) / f"{family.name}-{seed}-{digest}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_family(path, family, seed=seed)
    return path


def write_family(path: str | PathLike[str], family: Family, *, seed: int = 0) -> None:
    """Write a model of ``family`` to ``path``, the same for the same seed; it appears whole or not
    at all.

    Raises ValueError if llama.cpp finds the metadata incomplete.
    """
    target = Path(path)
    tiles = Tiles(seed)

    def content(tensor: Tensor) -> Iterator[memoryview]:
        if tensor.type is F32:
            yield _values(tensor.name, tensor.dims, seed).reshape(-1).view(np.uint8).data
        else:
            yield from tiles.fill(tensor, _spread(tensor.name, tensor.dims)[1])

    with temp_path(target.parent) as metadata:
        with _begun(
            metadata, family.of_layers(_examples(family)) if family.pattern else family
        ) as writer:
            write_tensors(writer, (), content)
        found = _tensors(metadata)
    listing = [
        Tensor(name, "", dims, _type(family, name, dims))
        for name, dims in _repeated(family, found).items()
    ]
    with temp_path(target.parent) as temporary:
        with _begun(temporary, family) as writer:
            write_tensors(writer, listing, content)
        os.replace(temporary, target)


def _examples(family: Family) -> list[int]:
    """Return a layer of each kind."""
    return [family.pattern.index(kind) for kind in range(max(family.pattern) + 1)]


def _repeated(family: Family, found: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return ``found``, with every layer like its kind, and without scales of matrices."""
    if not family.pattern:
        return dict(found)
    n_all = family.all_keys["block_count"]
    assert isinstance(n_all, int)
    published = {name: dims for name, dims in found.items() if not _SCALE.search(name)}
    listing = {name: dims for name, dims in published.items() if not name.startswith("blk.")}
    for layer in range(n_all):
        prefix = f"blk.{family.pattern[layer % len(family.pattern)]}."
        of_kind = {
            name.removeprefix(prefix): dims
            for name, dims in published.items()
            if name.startswith(prefix)
        }
        listing |= {f"blk.{layer}.{name}": dims for name, dims in of_kind.items()}
    return listing


def _type(family: Family, name: str, dims: tuple[int, ...]) -> GGMLQuantizationType:
    is_matrix = len(dims) > 1 and name.endswith(".weight") and math.prod(dims) >= _MIN_QUANTISED
    if not family.pattern or not is_matrix or "ffn_gate_inp" in name or dims[-1] % 32:
        return F32
    return Q8_0 if dims[-1] % 256 else Q4_K


@contextlib.contextmanager
def _begun(path: Path, family: Family) -> Iterator[GGUFWriter]:
    """Yield a writer of a file at ``path`` that has the metadata."""
    writer = GGUFWriter(path, family.arch)
    keys = family.all_keys
    for name, value in keys.items():  # one group of keys has no prefix
        _add(writer, name if name.startswith("xielu.") else f"{family.arch}.{name}", value)
    n_vocab = keys["vocab_size"]
    assert isinstance(n_vocab, int)
    add_tokenizer(writer, byte_vocab().fitted(n_vocab))
    try:
        yield writer
    finally:
        writer.close()


_WIDE = {"layer_multipliers", "head_offsets", "head_vocab_sizes"}
"""Arrays of 64-bit numbers."""


def _add(writer: GGUFWriter, name: str, value: Value) -> None:
    """Write a key with the type that llama.cpp reads: 32 bits, and 64 bits for the arrays named in
    `_WIDE`.
    """
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        wide = name.rpartition(".")[2] in _WIDE
        kind = (
            GGUFValueType.FLOAT32
            if isinstance(value[0], float)
            else GGUFValueType.UINT64
            if wide
            else None
        )
        writer.add_key_value(
            name, list(value), GGUFValueType.ARRAY, sub_type=kind or GGUFValueType.UINT32
        )


# -- what tensors there are
# ----------------------------------------------------------------------------------


class _TensorHead(ctypes.Structure):
    """The first fields of `ggml_tensor`, ggml.h."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


def _tensors(metadata: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes (slowest dimension first) of the tensors that llama.cpp needs for
    this metadata.
    """
    library = ggml()
    found = {}

    def note(tensor: int, _: Any) -> None:
        head = _TensorHead.from_address(tensor)
        dims = list(head.ne)
        while len(dims) > 1 and dims[-1] == 1:
            dims.pop()
        found[library.ggml_get_name(tensor).decode()] = tuple(reversed(dims))

    make = open_library("libllama.so").llama_model_init_from_user
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    make.restype = ctypes.c_void_p
    make.argtypes = [ctypes.c_void_p, kind, ctypes.c_void_p, api.llama_model_params]
    gguf = library.gguf_init_from_file(os.fsencode(metadata), InitParams(True, None))
    try:
        model = make(gguf, kind(note), None, api.llama_model_default_params())
        if not model:
            raise ValueError("llama.cpp makes no model of this metadata")
        api.llama_model_free(ctypes.cast(model, api.llama_model_p_ctypes))
    finally:
        library.gguf_free(gguf)
    return found


def _values(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Return random weights with which the next token depends on all of the text: layers drown the
    embedding that they add to, attention is sharp, and states decay slowly. Factors of norms are
    one.
    """
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values: NDArray[np.float32] = random.standard_normal(shape, np.float32)
    if re.search(r"ssm_a\b", name):
        return np.multiply(np.abs(values), -0.02, dtype=np.float32)
    mean, deviation = _spread(name, shape)
    values *= deviation
    values += mean
    return values


def _spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of a tensor's values."""
    if re.search(r"norm[^.]*\.weight$", name):
        return 1.0, 0.1
    if "time_mix_w0" in name or "time_mix_decay.weight" in name:
        return -6.0, 1.0
    if name == "token_embd.weight":
        return 0.0, 0.05
    if len(shape) > 1:
        is_score = re.search(r"attn_(q|k|q_b|k_b|kv_a_mqa|qkv)\.weight$", name)
        return 0.0, (4 if is_score else 1.5) / math.sqrt(shape[-1])
    return 0.0, 0.1
