"""Choosing of the weights that leave the GPUs: arithmetic over the sizes of layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from pyctl.llama.fit.breakdown import tensor_layer
from pyctl.llama.settings.placements import CPU_EXPERTS, experts_on_cpu

__all__ = ["CpuShare", "LayerSizes"]

EXPERTS = re.compile(CPU_EXPERTS)

BLOCKS = re.compile("^blk")


@dataclass(frozen=True)
class LayerSizes:
    """The bytes of the weights of each layer.

    Attributes:
        experts: The bytes of its experts.
        blocks: The bytes of all its tensors.
    """

    experts: tuple[int, ...]
    blocks: tuple[int, ...]

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, int], n_layers: int) -> LayerSizes:
        """Return the sizes of ``n_layers`` layers; ``tensors`` are bytes by name."""
        return cls(
            _by_layer(tensors, n_layers, EXPERTS),
            _by_layer(tensors, n_layers, BLOCKS),
        )

    @property
    def n_layers(self) -> int:
        """The number of layers."""
        return len(self.blocks)


@dataclass(frozen=True)
class CpuShare:
    """The first layers that have left the GPUs.

    Attributes:
        n_experts: The layers whose experts are on the CPU.
        n_layers: The layers that are there as a whole.
        n_all: The layers of the model.
    """

    n_experts: int = 0
    n_layers: int = 0
    n_all: int = 0

    @property
    def placements(self) -> tuple[tuple[str, str], ...]:
        """The rules that keep the experts on the CPU."""
        return experts_on_cpu(self.n_experts)

    @property
    def n_gpu_layers(self) -> int:
        """The layers that stay on GPUs; the last of N is the output."""
        return self.n_all + 1 - self.n_layers

    def freeing(
        self, missing: int, sizes: LayerSizes, rows: int, *, can_move_experts: bool
    ) -> CpuShare:
        """Return a larger share, which frees ``missing`` bytes on the GPUs: experts if they have
        as many, else layers.

        ``rows`` are the bytes of K, V and states on GPUs, which leave with their layers.
        """
        experts = sizes.experts[self.n_experts :]
        if can_move_experts and sum(experts) >= missing:
            return replace(self, n_experts=self.n_experts + _count_to_free(experts, missing))
        rows_of_layer = rows // sizes.n_layers
        layers = [size + rows_of_layer for size in sizes.blocks[self.n_layers :]]
        n_layers = self.n_layers + _count_to_free(layers, missing)
        return replace(self, n_layers=n_layers, n_all=sizes.n_layers)


def _by_layer(
    tensors: Mapping[str, int], n_layers: int, wanted: re.Pattern[str]
) -> tuple[int, ...]:
    """Return for each layer the bytes of the tensors whose names match ``wanted``."""
    sums = [0] * n_layers
    for name, size in tensors.items():
        layer = tensor_layer(name)
        if 0 <= layer < n_layers and wanted.search(name):
            sums[layer] += size
    return tuple(sums)


def _count_to_free(sizes: Sequence[int], missing: int) -> int:
    """Return the least number of leading ``sizes`` that sum to ``missing``, or all."""
    return next((n for n, total in enumerate(accumulate(sizes), 1) if total >= missing), len(sizes))
