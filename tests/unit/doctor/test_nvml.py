"""NVML by ctypes, on a stand-in for the library."""

from __future__ import annotations

import ctypes
from typing import Any

from pyctl.doctor.nvml import card_states, used_bytes

NUMBER = ctypes.POINTER(ctypes.c_uint)


class FakeNvml:
    """Two cards; ``lacks`` are functions that an older library has not got."""

    def __init__(self, *, lacks: tuple[str, ...] = (), fails: bool = False) -> None:
        self.lacks, self.fails, self.n_open = lacks, fails, 0

    def nvmlInit_v2(self) -> int:
        self.n_open += not self.fails
        return 9 * self.fails

    def nvmlShutdown(self) -> int:
        self.n_open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        ctypes.cast(count, NUMBER)[0] = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))[0] = 100 + index
        return 0

    def nvmlDeviceGetName(self, device: ctypes.c_void_p, name: Any, size: int) -> int:
        name.value = f"card {device.value}".encode()
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: ctypes.c_void_p, memory: Any) -> int:
        ctypes.cast(memory, ctypes.POINTER(ctypes.c_ulonglong))[2] = device.value
        return 0

    def __getattr__(self, name: str) -> Any:
        if name in self.lacks:
            raise AttributeError(name)

        def number(device: ctypes.c_void_p, value: Any) -> int:
            ctypes.cast(value, NUMBER)[0] = len(name)
            return 3 if name == "nvmlDeviceGetCurrPcieLinkWidth" else 0

        return number


def load_of(library: FakeNvml) -> Any:
    return lambda place: library


def test_cards_are_described_and_the_library_is_closed() -> None:
    library = FakeNvml(lacks=("nvmlDeviceGetGpuMaxPcieLinkGeneration",))
    first, second = card_states(load_of(library)) or ()
    assert (first.name, second.name, second.used) == ("card 100", "card 101", 101)
    assert first.generations == (len("nvmlDeviceGetMaxPcieLinkGeneration"), None)
    assert first.lanes[0] is None  # the card does not know
    assert library.n_open == 0
    assert used_bytes(load_of(library)) == 201


def test_without_a_library_there_are_no_states() -> None:
    def missing(place: str) -> Any:
        raise OSError(place)

    assert card_states(missing) is None
    assert used_bytes(missing) is None
    assert card_states(load_of(FakeNvml(fails=True))) is None
