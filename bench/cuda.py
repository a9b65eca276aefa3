"""The few calls of CUDA's driver that the benchmarks need: device memory, and copies to it from
pinned memory.

python -m bench.cuda MIB    # take memory until MIB are left, print that, wait for the input's end
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["MIB", "Device", "open_device"]

MIB = 2**20


class Device:
    """The first GPU, through the context that llama.cpp uses in this process too."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        device = ctypes.c_int()
        context = ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} failed with CUDA error {code}")

    def free(self) -> int:
        """Return bytes of free device memory."""
        free = ctypes.c_size_t()
        total = ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    @contextmanager
    def memory(self, size: int) -> Iterator[ctypes.c_uint64]:
        """Yield ``size`` bytes on the device."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        try:
            yield pointer
        finally:
            self._call("cuMemFree_v2", pointer)

    def copy_rates(self, size: int, repeat: int = 5) -> tuple[float, float]:
        """Return GB/s of one copy of ``size`` bytes out of the device and into it, from and to
        pinned memory; medians.
        """
        host = ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", ctypes.byref(host), ctypes.c_size_t(size))
        try:
            with self.memory(size) as device:
                out = self._rate(size, repeat, "cuMemcpyDtoH_v2", host, device)
                back = self._rate(size, repeat, "cuMemcpyHtoD_v2", device, host)
        finally:
            self._call("cuMemFreeHost", host)
        return out, back

    def _rate(self, size: int, repeat: int, name: str, to: object, source: object) -> float:
        times = []
        for _ in range(repeat + 1):
            began = time.perf_counter()
            self._call(name, to, source, ctypes.c_size_t(size))
            times.append(time.perf_counter() - began)
        return size / statistics.median(times[1:]) / 1e9


def open_device() -> Device | None:
    """Return the GPU, or None on a machine without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return Device(driver) if driver.cuInit(0) == 0 else None


def hold_all_but(left_mib: int) -> None:
    """Take device memory but for ``left_mib`` MiB, as long as the input is open. SystemExit if
    fewer are free.
    """
    device = open_device()
    if device is None:
        raise SystemExit("no GPU")
    size = device.free() - left_mib * MIB
    if size < 0:
        raise SystemExit(f"only {device.free() // MIB} MiB are free")
    with device.memory(size):
        print(f"{device.free() / MIB:.0f} MiB left", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    hold_all_but(int(sys.argv[1]))
