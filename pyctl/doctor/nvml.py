"""NVIDIA's management library (NVML), by ctypes: links and memory of the cards."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pyctl.setup.machine import DRIVER_PLACES

__all__ = ["NVML_PLACES", "CardState", "card_states", "used_bytes"]

NVML_PLACES = tuple(place.replace("libcuda", "libnvidia-ml") for place in DRIVER_PLACES)
"""Where the library is looked for, in this order: beside the driver's."""

Load = Callable[[str], Any]
"""Loads a shared library, as `ctypes.CDLL` does. Raises OSError."""

NAME_BYTES = 96


@dataclass(frozen=True)
class CardState:
    """What NVML says of a card; None for what it does not say.

    ``lanes`` are PCIe lanes now, and those of the card. ``generations`` are the best that slot and
    card reach together, and the card's; a card at rest runs below both. ``used`` is bytes.
    """

    name: str
    lanes: tuple[int | None, int | None] = (None, None)
    generations: tuple[int | None, int | None] = (None, None)
    used: int | None = None


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def card_states(load: Load = ctypes.CDLL) -> tuple[CardState, ...] | None:
    """All cards of the machine, whatever CUDA_VISIBLE_DEVICES says; None without a library that answers."""
    for place in NVML_PLACES:
        try:
            library = load(place)
        except OSError:
            continue
        if library.nvmlInit_v2():
            return None
        try:
            count = ctypes.c_uint(0)
            library.nvmlDeviceGetCount_v2(ctypes.byref(count))
            return tuple(_state(library, index) for index in range(count.value))
        finally:
            library.nvmlShutdown()
    return None


def used_bytes(load: Load = ctypes.CDLL) -> int | None:
    """Bytes in use on all cards, by all programs; None without a card."""
    used = [state.used for state in card_states(load) or () if state.used is not None]
    return sum(used) if used else None


def _state(library: Any, index: int) -> CardState:
    device, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(NAME_BYTES), _Memory()
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
        return CardState(f"card {index}")
    library.nvmlDeviceGetName(device, name, NAME_BYTES)

    def number(function: str) -> int | None:
        return _number(library, function, device)

    is_known = not library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    return CardState(
        name.value.decode("utf-8", "replace") or f"card {index}",
        lanes=(number("nvmlDeviceGetCurrPcieLinkWidth"), number("nvmlDeviceGetMaxPcieLinkWidth")),
        generations=(number("nvmlDeviceGetMaxPcieLinkGeneration"), number("nvmlDeviceGetGpuMaxPcieLinkGeneration")),
        used=memory.used if is_known else None,
    )


def _number(library: Any, function: str, device: ctypes.c_void_p) -> int | None:
    """The number, None if the library or the card does not know it."""
    value = ctypes.c_uint(0)
    known = getattr(library, function, None)  # an older library lacks some
    return value.value if known is not None and known(device, ctypes.byref(value)) == 0 else None
