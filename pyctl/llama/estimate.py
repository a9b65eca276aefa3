"""An estimate of a context's memory from its model's file, for use without the extension.

Each method counts one allocation of llama.cpp, and names the place that makes it. All count rather
too much than too little.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from llama_cpp import llama_cpp as api

from pyctl.llama.params import element_bytes, metadata_text
from pyctl.llama.settings.resolved import Resolved

__all__ = ["ALL_GPUS", "Estimate", "Parts", "Shape", "layer_of"]

ALL_GPUS = "Meta"
"""llama.cpp's name of the combined device of --split-mode tensor, followed by the GPUs' names in
parentheses.
"""

Parts: TypeAlias = Sequence[int]
"""Bytes of weights, K and V, states, and compute buffers."""

FLOAT_BYTES = 4
"""Bytes of a number in a recurrent state, in scores and in activations."""

ATTENTION = re.compile(r"\.attn_(k|kv\w*)\.")
"""Tensors of layers with K and V."""

RECURRENT = re.compile(r"\.(ssm|shortconv|time_mix)")
"""Tensors of layers with a state."""

ACTIVATIONS = 12
"""Vectors as wide as the largest matrix that a batch takes for each token: more than any tested
model's.
"""

INDEXER_COPIES = 4
"""Copies of an indexer's scores: their sums, and an order of them."""


def layer_of(tensor: str) -> int:
    """Return the layer of the tensor of this name, -1 for none."""
    match = re.match(r"blk\.(\d+)\.", tensor)
    return int(match[1]) if match is not None else -1


@dataclass(frozen=True)
class Shape:
    """Numbers of a model's file that determine the memory of a context.

    ``width`` is n_embd, ``widest`` the largest width of an activation. ``key_length`` and
    ``value_length`` are of one head, ``indexer_length`` is the K of an indexer; 0 without one.
    ``state_inner``, ``state_depth``, ``state_groups`` and ``conv_taps`` are those of a recurrent
    state.
    """

    width: int
    widest: int
    n_heads: int
    n_kv_heads: int
    key_length: int
    value_length: int
    n_kv_layers: int
    n_indexer_heads: int = 0
    indexer_length: int = 0
    n_recurrent_layers: int = 0
    state_inner: int = 0
    state_depth: int = 0
    state_groups: int = 1
    conv_taps: int = 3

    @classmethod
    def of(cls, model: Any, tensors: Iterable[str]) -> Shape:
        """Return the shape of a llama_model with these ``tensors`` in use."""
        n_layers = int(api.llama_model_n_layer(model))
        width = int(api.llama_model_n_embd(model))
        names = tuple(tensors)
        recurrent = _layers_with(RECURRENT, names)
        # A layer without a state has K and V, whatever its tensors are called.
        attention = _layers_with(ATTENTION, names) | {*range(n_layers)} - recurrent
        numbers = _Numbers(model)
        n_heads = numbers.get("attention.head_count", 1)
        state_sizes = ("ssm.state_size", "wkv.head_size", "kda.head_dim")
        experts = numbers.get("expert_feed_forward_length") * numbers.get("expert_used_count")
        return cls(
            width=width,
            widest=max(width, numbers.get("feed_forward_length"), experts),
            n_heads=n_heads,
            n_kv_heads=numbers.get("attention.head_count_kv", n_heads),
            key_length=numbers.get("attention.key_length", width // n_heads),
            value_length=numbers.get("attention.value_length", width // n_heads),
            n_kv_layers=len(attention),
            n_indexer_heads=numbers.get("attention.indexer.head_count"),
            indexer_length=numbers.get("attention.indexer.key_length"),
            n_recurrent_layers=len(recurrent),
            state_inner=numbers.get("ssm.inner_size", width),
            state_depth=max(numbers.get(key) for key in state_sizes),
            state_groups=numbers.get("ssm.group_count", 1),
            conv_taps=numbers.get("ssm.conv_kernel", numbers.get("shortconv.l_cache", 3)),
        )

    def kv_bytes(self, n_cells: int, type_k: str, type_v: str) -> int:
        """Return the bytes of K and V of all layers, as if none had a sliding window.

        The constructor of llama_kv_cache allocates a tensor of K and one of V for each layer,
        llama_kv_cache_dsa another K for the indexer.
        """
        k_row = self.n_kv_heads * self.key_length * element_bytes(type_k)
        v_row = self.n_kv_heads * self.value_length * element_bytes(type_v)
        indexer_row = self.indexer_length * element_bytes("f16")
        return int(n_cells * self.n_kv_layers * (k_row + v_row + indexer_row))

    def state_bytes(self, n_states: int) -> int:
        """Return the bytes of ``n_states`` recurrent states of all layers.

        The constructor of llama_memory_recurrent allocates both parts for each layer; their sizes
        are those of llama_hparams.
        """
        scan = self.state_inner * self.state_depth  # n_embd_s
        channels = self.state_inner + 2 * self.state_groups * self.state_depth
        convolution = self.conv_taps * channels  # n_embd_r
        return n_states * self.n_recurrent_layers * FLOAT_BYTES * (scan + convolution)

    def compute_bytes(self, n_ubatch: int, n_cells: int, *, stores_scores: bool) -> int:
        """Return the bytes of the compute buffers of a batch of ``n_ubatch`` tokens.

        llama_context::graph_reserve allocates them for the largest graph. ``stores_scores``: the
        scores of attention are tensors, since no kernel for flash attention keeps them.
        """
        n_rows = 1  # the mask: build_attn_inp_kq_mask
        if self.n_indexer_heads:
            n_rows += self.n_indexer_heads + INDEXER_COPIES
        if stores_scores:
            n_rows += 2 * self.n_heads  # before and after the softmax: build_attn_mha
        n_elements = n_rows * n_cells + ACTIVATIONS * self.widest
        return FLOAT_BYTES * n_ubatch * n_elements


class Estimate:
    """The memory of the context ``ctx`` by device; ``tensors`` are the bytes of those in use by
    name.
    """

    def __init__(self, ctx: Any, resolved: Resolved, tensors: Mapping[str, int]) -> None:
        self._ctx = ctx
        self._resolved = resolved
        self._tensors = tensors
        self._model = api.llama_get_model(ctx)

    def parts(self) -> Mapping[str, Parts]:
        """Return the memory of the host, and of all GPUs together."""
        settings = self._resolved.model
        shape = Shape.of(self._model, self._tensors)
        n_cells = int(api.llama_n_ctx(self._ctx))
        states_of_seq = int(api.llama_n_rs_seq(self._ctx)) + 1
        weights = sum(self._tensors.values())
        kv = shape.kv_bytes(n_cells, settings.type_k, settings.type_v)
        states = shape.state_bytes(int(api.llama_n_seq_max(self._ctx)) * states_of_seq)
        compute = shape.compute_bytes(
            int(api.llama_n_ubatch(self._ctx)), n_cells, stores_scores=settings.flash_attn == "off"
        )
        gpus = self._resolved.gpus
        if not gpus:
            return {"": (weights, kv, states, compute)}
        gpu_weights = self._gpu_weights()
        gpu_kv = int(kv * self._gpu_share)
        gpu_states = int(states * self._gpu_share)
        # The input is on the host, and a model that ties it to its output has it on a GPU, too.
        tied = self._tensors.get("token_embd.weight", 0)
        is_single = settings.split_mode == "none"
        device = gpus[settings.main_gpu].name if is_single else ALL_GPUS
        # Each GPU has all compute buffers.
        return {
            "": (weights - gpu_weights + tied, kv - gpu_kv, states - gpu_states, compute),
            device: (gpu_weights, gpu_kv, gpu_states, compute * len(gpus)),
        }

    @property
    def _n_blocks(self) -> int:
        """The number of layers, with those of a head."""
        n_layers = int(api.llama_model_n_layer(self._model))
        return n_layers + int(api.llama_model_n_layer_nextn(self._model))

    @property
    def _first_on_gpu(self) -> int:
        """The first layer on a GPU; the output counts as a layer, after all others."""
        n_gpu_layers = self._resolved.model.n_gpu_layers
        if n_gpu_layers < 0:
            return 0
        return max(self._n_blocks + 1 - n_gpu_layers, 0)

    @property
    def _gpu_share(self) -> float:
        """The share of the layers whose K, V and states are on GPUs."""
        if not self._resolved.model.offload_kqv:
            return 0.0
        return max(self._n_blocks - self._first_on_gpu, 0) / self._n_blocks

    def _gpu_weights(self) -> int:
        """Return the bytes of the weights on GPUs, where llama_model_loader::create_tensor puts
        them.
        """
        return sum(size for name, size in self._tensors.items() if self._is_on_gpu(name))

    def _is_on_gpu(self, tensor: str) -> bool:
        for pattern, buffer in self._resolved.model.placements:
            if re.search(pattern, tensor):
                return buffer != "CPU"
        layer = layer_of(tensor)
        return (layer if layer >= 0 else self._n_blocks) >= self._first_on_gpu


class _Numbers:
    """Numbers in the metadata of a llama_model, by keys after the architecture's name."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._architecture = metadata_text(model, "general.architecture")

    def get(self, key: str, default: int = 0) -> int:
        """Return the largest number under ``key``; ``default`` for none or 0."""
        text = metadata_text(self._model, f"{self._architecture}.{key}")
        numbers = [int(number) for number in re.findall(r"\d+", text)]
        return max(numbers, default=0) or default


def _layers_with(pattern: re.Pattern[str], tensors: Collection[str]) -> set[int]:
    """Return the layers of the tensors whose names match."""
    return {layer_of(name) for name in tensors if pattern.search(name)}
