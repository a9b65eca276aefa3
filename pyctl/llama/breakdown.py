"""Memory of a context by place as the extension counts it; without the extension, an estimate from
the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from llama_cpp import llama_cpp as api

from pyctl.engine.model_settings import ModelSettings
from pyctl.llama.extension import core
from pyctl.llama.params import element_bytes, gpus, metadata_text

__all__ = ["ALL_GPUS", "Parts", "core", "layer_of", "parts_of"]

ALL_GPUS = "Meta"
"""llama.cpp's name of the combined device of --split-mode tensor, followed by the GPUs' names in
parentheses.
"""

Parts: TypeAlias = Sequence[int]
"""Bytes of weights, K and V, states, and compute buffers."""

KEYS = re.compile(r"\.attn_(k|kv\w*)\.")
RECURRENT = re.compile(r"\.(ssm|shortconv|time_mix)")
"""Tensors of layers with K and V, and of those with a state."""

ACTIVATIONS = 12
"""Vectors as wide as the largest matrix that a batch takes for each token: more than any tested
model's.
"""


def layer_of(tensor: str) -> int:
    """Return the layer of the tensor of this name, -1 for none."""
    found = re.match(r"blk\.(\d+)\.", tensor)
    return int(found[1]) if found is not None else -1


def parts_of(ctx: Any, settings: ModelSettings, tensors: Mapping[str, int]) -> Mapping[str, Parts]:
    """Return the memory of ``ctx`` by device, "" for the host. ``tensors`` are the bytes of those
    in use by name.
    """
    if core is None:
        return _Estimate(ctx, settings, tensors).parts()
    counted: Mapping[str, Parts] = core.breakdown(ctx)
    return counted


class _Estimate:
    """Memory of a context from its model's file: rather too much than too little."""

    def __init__(self, ctx: Any, settings: ModelSettings, tensors: Mapping[str, int]) -> None:
        self._ctx = ctx
        self._settings = settings
        self._tensors = tensors
        self._model = api.llama_get_model(ctx)
        self._n_layers = int(api.llama_model_n_layer(self._model))
        self._width, self._n_heads = (
            int(api.llama_model_n_embd(self._model)),
            self._number("attention.head_count", 1),
        )

    def parts(self) -> Mapping[str, Parts]:
        """Return the memory of the host, and of all GPUs together."""
        settings = self._settings
        found = gpus(self._settings)
        whole = sum(self._tensors.values())
        (kv, states), compute = self._memory(), self._compute()
        if not found:
            return {"": (whole, kv, states, compute)}
        n_blocks = self._n_layers + int(api.llama_model_n_layer_nextn(self._model))
        first = max(n_blocks + 1 - settings.n_gpu_layers, 0) if settings.n_gpu_layers >= 0 else 0
        share = max(n_blocks - first, 0) / n_blocks if settings.offload_kqv else 0.0
        weights = sum(
            size for name, size in self._tensors.items() if self._is_on_gpu(name, first, n_blocks)
        )
        of_gpus = (
            weights,
            int(kv * share),
            int(states * share),
            compute * len(found),
        )  # each has all buffers
        tied = self._tensors.get(
            "token_embd.weight", 0
        )  # the input is on the host, perhaps also the output on a GPU
        device = found[settings.main_gpu].name if settings.split_mode == "none" else ALL_GPUS
        return {
            "": (whole - weights + tied, kv - of_gpus[1], states - of_gpus[2], compute),
            device: of_gpus,
        }

    def _is_on_gpu(self, tensor: str, first: int, output: int) -> bool:
        """Whether a GPU has ``tensor`` if it has the layers from ``first`` to ``output``."""
        for pattern, buffer in self._settings.placements:
            if re.search(pattern, tensor):
                return buffer != "CPU"
        layer = layer_of(tensor)
        return (output if layer < 0 else layer) >= first

    def _memory(self) -> tuple[int, int]:
        """Return the bytes of K and V, as if no layer had a sliding window, and of states with
        their convolutions.
        """
        recurrent = {layer_of(name) for name in self._tensors if RECURRENT.search(name)}
        attention = {layer_of(name) for name in self._tensors if KEYS.search(name)}
        n_kv = len(attention | {*range(self._n_layers)} - recurrent)
        row = 0.0
        for part, kind in (("key", self._settings.type_k), ("value", self._settings.type_v)):
            n_elements = self._number(f"attention.{part}_length", self._width // self._n_heads)
            row += (
                self._number("attention.head_count_kv", self._n_heads)
                * n_elements
                * element_bytes(kind)
            )
        row += self._number("attention.indexer.key_length") * element_bytes("f16")
        inner = self._number("ssm.inner_size", self._width)
        n_groups = self._number("ssm.group_count", 1)
        depth = max(
            self._number(key) for key in ("ssm.state_size", "wkv.head_size", "kda.head_dim")
        )
        taps = self._number("ssm.conv_kernel", self._number("shortconv.l_cache", 3))
        state = len(recurrent) * 4 * (inner * depth + taps * (inner + 2 * n_groups * depth))
        n_states = int(api.llama_n_seq_max(self._ctx)) * (int(api.llama_n_rs_seq(self._ctx)) + 1)
        return int(api.llama_n_ctx(self._ctx) * n_kv * row), n_states * state

    def _compute(self) -> int:
        """Return the bytes of compute buffers: a mask, scores unless a kernel keeps them, and
        activations.
        """
        n_indexed = self._number("attention.indexer.head_count")
        n_scores = 1 + (n_indexed + 4 if n_indexed else 0)  # with sums and an order of them
        n_scores += 2 * self._n_heads if self._settings.flash_attn == "off" else 0
        experts = self._number("expert_feed_forward_length") * self._number("expert_used_count")
        widest = max(self._width, self._number("feed_forward_length"), experts)
        n_elements = n_scores * int(api.llama_n_ctx(self._ctx)) + ACTIVATIONS * widest
        return 4 * int(api.llama_n_ubatch(self._ctx)) * n_elements

    def _number(self, key: str, default: int = 0) -> int:
        """Return the largest number under ``key`` in the metadata; ``default`` for none or 0."""
        text = metadata_text(
            self._model, f"{metadata_text(self._model, 'general.architecture')}.{key}"
        )
        return max(map(int, re.findall(r"\d+", text)), default=0) or default
