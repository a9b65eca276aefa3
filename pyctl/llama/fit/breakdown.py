"""Memory of a context by device: as the extension counts it, else an estimate from the file.

Each formula of the estimate counts one allocation of llama.cpp, and names the place that makes it.
All count rather too much than too little.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pyctl.llama.library.bindings import api
from pyctl.llama.library.devices import element_bytes, metadata_text
from pyctl.llama.library.extension import core
from pyctl.llama.settings.resolved import Resolved

__all__ = [
    "ALL_GPUS",
    "FLOAT_BYTES",
    "AttentionShape",
    "Estimate",
    "Parts",
    "StateShape",
    "compute_bytes",
    "core",
    "measure_parts",
    "tensor_layer",
]

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


def tensor_layer(tensor: str) -> int:
    """Return the layer of the tensor of this name, -1 for none."""
    match = re.match(r"blk\.(\d+)\.", tensor)
    return int(match[1]) if match is not None else -1


def measure_parts(ctx: Any, resolved: Resolved, tensors: Mapping[str, int]) -> Mapping[str, Parts]:
    """Return the memory of ``ctx`` by device, "" for the host. ``tensors`` are the bytes of those
    in use by name.
    """
    if core is None:
        return Estimate(ctx, resolved, tensors).parts()
    counted: Mapping[str, Parts] = core.breakdown(ctx)
    return counted


@dataclass(frozen=True)
class AttentionShape:
    """The numbers that determine K and V.

    Attributes:
        n_layers: The layers with K and V.
        n_heads: The heads of Q in a layer.
        n_kv_heads: The heads of K and V in a layer.
        key_length: The length of K of one head.
        value_length: The length of V of one head.
        n_indexer_heads: The heads of the indexer, 0 without one.
        indexer_length: The length of the indexer's K, 0 without one.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    key_length: int
    value_length: int
    n_indexer_heads: int = 0
    indexer_length: int = 0

    def kv_bytes(self, n_cells: int, type_k: str, type_v: str) -> int:
        """Return the bytes of K and V of all layers, as if none had a sliding window.

        The constructor of llama_kv_cache allocates a tensor of K and one of V for each layer,
        llama_kv_cache_dsa another K for the indexer.
        """
        k_row = self.n_kv_heads * self.key_length * element_bytes(type_k)
        v_row = self.n_kv_heads * self.value_length * element_bytes(type_v)
        indexer_row = self.indexer_length * element_bytes("f16")
        return int(n_cells * self.n_layers * (k_row + v_row + indexer_row))

    def scores(self, *, are_stored: bool) -> int:
        """Return the numbers that a batch has for each token and cell.

        The scores of attention ``are_stored`` as tensors if no kernel for flash attention keeps
        them.
        """
        n = 1  # the mask: build_attn_inp_kq_mask
        if self.n_indexer_heads:
            n += self.n_indexer_heads + INDEXER_COPIES
        if are_stored:
            n += 2 * self.n_heads  # before and after the softmax: build_attn_mha
        return n


@dataclass(frozen=True)
class StateShape:
    """The numbers that determine recurrent states.

    Attributes:
        n_layers: The layers with a state.
        inner: The channels of a state.
        depth: The numbers of a channel.
        n_groups: The groups of the convolution.
        taps: The taps of the convolution.
    """

    n_layers: int
    inner: int
    depth: int
    n_groups: int
    taps: int

    def state_bytes(self, n_states: int) -> int:
        """Return the bytes of ``n_states`` states of all layers.

        The constructor of llama_memory_recurrent allocates both parts for each layer, with sizes of
        llama_hparams.
        """
        scan = self.inner * self.depth  # n_embd_s
        channels = self.inner + 2 * self.n_groups * self.depth
        convolution = self.taps * channels  # n_embd_r
        return n_states * self.n_layers * FLOAT_BYTES * (scan + convolution)


def compute_bytes(n_ubatch: int, n_cells: int, n_scores: int, widest: int) -> int:
    """Return the bytes of the compute buffers of a batch of ``n_ubatch`` tokens, which
    llama_context::graph_reserve allocates for the largest graph.

    ``n_scores`` are numbers for each token and cell, ``widest`` is the largest width of an
    activation.
    """
    n_elements = n_scores * n_cells + ACTIVATIONS * widest
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
        self._numbers = _Numbers(self._model)

    def parts(self) -> Mapping[str, Parts]:
        """Return the memory of the host, and of all GPUs together."""
        weights = sum(self._tensors.values())
        kv = self._kv_bytes()
        states = self._state_bytes()
        compute = self._compute_bytes()
        gpus = self._resolved.gpus
        if not gpus:
            return {"": (weights, kv, states, compute)}
        gpu_weights = self._gpu_weights()
        gpu_kv = int(kv * self._gpu_share)
        gpu_states = int(states * self._gpu_share)
        # The input is on the host. A model that ties it to its output has it on a GPU as well.
        tied = self._tensors.get("token_embd.weight", 0)
        settings = self._resolved.model
        device = gpus[settings.main_gpu].name if settings.split_mode == "none" else ALL_GPUS
        # Each GPU has all compute buffers.
        return {
            "": (weights - gpu_weights + tied, kv - gpu_kv, states - gpu_states, compute),
            device: (gpu_weights, gpu_kv, gpu_states, compute * len(gpus)),
        }

    def _kv_bytes(self) -> int:
        settings = self._resolved.model
        n_cells = int(api.llama_n_ctx(self._ctx))
        return self._attention.kv_bytes(n_cells, settings.type_k, settings.type_v)

    def _state_bytes(self) -> int:
        numbers = self._numbers
        sizes = ("ssm.state_size", "wkv.head_size", "kda.head_dim")
        shape = StateShape(
            n_layers=len(self._recurrent_layers),
            inner=numbers.get("ssm.inner_size", self._width),
            depth=max(numbers.get(key) for key in sizes),
            n_groups=numbers.get("ssm.group_count", 1),
            taps=numbers.get("ssm.conv_kernel", numbers.get("shortconv.l_cache", 3)),
        )
        states_of_seq = int(api.llama_n_rs_seq(self._ctx)) + 1
        return shape.state_bytes(int(api.llama_n_seq_max(self._ctx)) * states_of_seq)

    def _compute_bytes(self) -> int:
        numbers = self._numbers
        experts = numbers.get("expert_feed_forward_length") * numbers.get("expert_used_count")
        return compute_bytes(
            n_ubatch=int(api.llama_n_ubatch(self._ctx)),
            n_cells=int(api.llama_n_ctx(self._ctx)),
            n_scores=self._attention.scores(are_stored=self._resolved.model.flash_attn == "off"),
            widest=max(self._width, numbers.get("feed_forward_length"), experts),
        )

    @property
    def _attention(self) -> AttentionShape:
        numbers = self._numbers
        n_layers = int(api.llama_model_n_layer(self._model))
        # A layer without a state has K and V, whatever the names of its tensors.
        stateless = {*range(n_layers)} - self._recurrent_layers
        n_heads = numbers.get("attention.head_count", 1)
        return AttentionShape(
            n_layers=len(_layers_with(ATTENTION, self._tensors) | stateless),
            n_heads=n_heads,
            n_kv_heads=numbers.get("attention.head_count_kv", n_heads),
            key_length=numbers.get("attention.key_length", self._width // n_heads),
            value_length=numbers.get("attention.value_length", self._width // n_heads),
            n_indexer_heads=numbers.get("attention.indexer.head_count"),
            indexer_length=numbers.get("attention.indexer.key_length"),
        )

    @property
    def _recurrent_layers(self) -> set[int]:
        return _layers_with(RECURRENT, self._tensors)

    @property
    def _width(self) -> int:
        return int(api.llama_model_n_embd(self._model))

    @property
    def _n_blocks(self) -> int:
        """The number of layers, with the layers of a head."""
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
        layer = tensor_layer(tensor)
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


def _layers_with(pattern: re.Pattern[str], tensors: Iterable[str]) -> set[int]:
    """Return the layers of the tensors whose names match."""
    return {tensor_layer(name) for name in tensors if pattern.search(name)}
