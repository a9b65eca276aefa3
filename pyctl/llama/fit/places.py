"""Bytes by place: llama.cpp counts them by device, a memory plan by GPU and host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import NamedTuple, TypeAlias

from pyctl.llama.fit.breakdown import ALL_GPUS, Parts
from pyctl.llama.library.devices import Device
from pyctl.llama.settings.memory_plan import Place, Usage

__all__ = ["HOST", "ByPlace", "ContextUsage", "MemoryPlaces", "UsageByPlace"]

HOST = "host"

ByPlace: TypeAlias = Counter[str]
"""Bytes by the name of a GPU, or of the host; places that have none are missing."""


class ContextUsage(NamedTuple):
    """The memory of one context by place."""

    weights: ByPlace
    kv: ByPlace
    states: ByPlace
    compute: ByPlace

    def add(self, place: str, sizes: Parts) -> None:
        """Count ``sizes`` at ``place``."""
        for part, size in zip(self, sizes, strict=True):
            if size:
                part[place] += size


@dataclass(frozen=True)
class UsageByPlace:
    """The memory of a model by place, in the parts of a `Usage`."""

    weights: ByPlace = field(default_factory=Counter)
    kv: ByPlace = field(default_factory=Counter)
    states: ByPlace = field(default_factory=Counter)
    compute: ByPlace = field(default_factory=Counter)
    state_history: ByPlace = field(default_factory=Counter)
    drafts: ByPlace = field(default_factory=Counter)
    vision: ByPlace = field(default_factory=Counter)

    def at(self, place: str) -> Usage:
        """Return the memory at ``place``."""
        return Usage(
            weights=self.weights[place],
            kv=self.kv[place],
            states=self.states[place],
            compute=self.compute[place],
            state_history=self.state_history[place],
            drafts=self.drafts[place],
            vision=self.vision[place],
        )


@dataclass(frozen=True)
class MemoryPlaces:
    """The memories of a machine, over which a model is spread.

    Attributes:
        gpus: All GPUs: tensors may be placed on one that is not used.
        host_free: The free bytes of the host, None if unknown.
        shares: The shares of the GPUs that have a model in parts together, by name.
        margins: The bytes that are to stay free on each GPU in use; the last holds for all further
            ones.
        is_mapped: Whether the weights on the host are pages of a file.
        is_estimate: Whether bytes of all GPUs together are an estimate, not llama.cpp's count.
    """

    gpus: Sequence[Device]
    host_free: int | None
    shares: Mapping[str, float]
    margins: Sequence[int]
    is_mapped: bool
    is_estimate: bool

    def name_of(self, device: str) -> str:
        """Return the place for llama.cpp's name of a device or buffer type."""
        if device.split("(")[0] == ALL_GPUS:
            return ALL_GPUS
        names = (gpu.name for gpu in self.gpus if device in (gpu.name, gpu.buffer_name))
        return next(names, HOST)

    def usage(self, parts: Mapping[str, Parts]) -> ContextUsage:
        """Return by place the bytes that ``parts`` have by device."""
        usage = ContextUsage(Counter(), Counter(), Counter(), Counter())
        for device, sizes in parts.items():
            place = self.name_of(device)
            if place == ALL_GPUS:
                self._spread(sizes, usage)
            else:
                usage.add(place, sizes)
        return usage

    def _spread(self, sizes: Parts, usage: ContextUsage) -> None:
        """Count in ``usage`` the bytes that all GPUs have together, by their shares.

        States count on the GPU that has the most of them, buffers on each.
        """
        weights, kv, states, compute = sizes
        whole = sum(self.shares.values())
        largest = max(self.shares.values())
        for gpu, share in self.shares.items():
            own = [weights * share / whole, kv * share / whole]
            if self.is_estimate:  # it has states and buffers of all GPUs together
                own += [states * share / whole, compute * share / whole]
            else:
                own += [states * share / largest, compute]
            usage.add(gpu, [int(size) for size in own])

    def are_all_local_gpus(self, usage: ContextUsage) -> bool:
        """Return whether GPUs of this machine have all of K, V and states."""
        elsewhere = {HOST, *(gpu.name for gpu in self.gpus if gpu.is_remote)}
        return not elsewhere & {*usage.kv, *usage.states}

    def in_use(self, usage_by_place: UsageByPlace) -> Iterator[Place]:
        """Yield the GPUs that have some of ``usage_by_place``, and the host last."""
        margins = chain(self.margins, repeat(self.margins[-1]))
        for gpu in self.gpus:
            usage = usage_by_place.at(gpu.name)
            if usage.total:
                yield Place(gpu.name, True, usage, gpu.free, margin=next(margins))
        usage = usage_by_place.at(HOST)
        yield Place(HOST, False, usage, self.host_free, is_mapped=self.is_mapped)
