"""How fast weights reach the device: each way of reading the file, beside plain copies of the machine.

    DIR/python -m bench.gpu.weights FILE... [--modes mmap none dio]

Copies, in GB/s, of the beginning of the file, which is in the page cache: from pinned memory, from pageable memory,
from a mapping made for it, and `read` into memory. A load is llama.cpp's own of the whole file with all layers on the
GPU, the faster one of two. Its share is that of the better one of two ways: copies from a mapping, or reading and
copying from pinned memory at the same time, which is as fast as the slower of both. Without a GPU copies go to RAM.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as api
from numpy.typing import NDArray

from bench.common import show, tell
from bench.cuda import open_device
from pyctl.engine.model_settings import LOAD_MODES
from pyctl.llama import devices

BLOCK = 64 * 2**20
"""Bytes of one copy: a large tensor."""

MOST = 2**31
"""Bytes of the file that are copied."""

RATES = ("pinned", "pageable", "mapped", "read")


Copy = Callable[[int, int], object]
"""Copies so many bytes from an address to the device."""


def copies(path: Path) -> dict[str, float]:
    """GB/s by where the bytes come from."""
    size = min(MOST, path.stat().st_size)
    block = min(BLOCK, size)
    memory = np.empty(size, np.uint8)

    def reading() -> None:
        with path.open("rb", buffering=0) as file:
            for at in range(0, size, block):
                file.readinto(memory[at : at + block].data)

    reading()  # now it is in the page cache, and the memory is there
    found = {"read": size / seconds(reading) / 1e9}
    device = open_device()
    if device is None:
        target = np.empty(block, np.uint8).ctypes
        return {**found, **rates_by(lambda source, n: ctypes.memmove(target.data, source, n), path, memory, block)}
    with device.memory(block) as held:
        found |= rates_by(lambda source, n: device.copy_in(held, source, n), path, memory, block)
    return {**found, "pinned": device.copy_rates(block)[1]}


def rates_by(copy: Copy, path: Path, memory: NDArray[np.uint8], block: int) -> dict[str, float]:
    """GB/s of ``copy`` from ``memory``, and from a mapping of as much of the file, a new one as in each load."""
    size = memory.size

    def mapped() -> None:
        with path.open("rb") as file:
            view = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        through(copy, np.frombuffer(view, np.uint8), block)

    pageable = seconds(lambda: through(copy, memory, block))
    return {"pageable": size / pageable / 1e9, "mapped": size / seconds(mapped) / 1e9}


def through(copy: Copy, memory: NDArray[np.uint8], block: int) -> None:
    for at in range(0, memory.size, block):
        copy(memory.ctypes.data + at, min(block, memory.size - at))


def seconds(function: Callable[[], object]) -> float:
    """The faster one of two calls."""
    times = []
    for _ in range(2):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def loading(path: Path, mode: str) -> float:
    """Seconds that llama.cpp takes for the weights."""
    params = api.llama_model_default_params()
    params.n_gpu_layers, params.load_mode = 999, LOAD_MODES[mode]

    def load() -> None:
        model = api.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise SystemExit(f"cannot load {path}")
        api.llama_model_free(model)

    return seconds(load)


def measure(path: Path, modes: list[str]) -> list[dict[str, Any]]:
    """A record for each way of loading ``path``."""
    rates = copies(path)
    best = max(rates["mapped"], min(rates["read"], rates.get("pinned", rates["pageable"])))
    size = path.stat().st_size
    found = []
    for mode in modes:
        took = loading(path, mode)
        rate = size / took / 1e9
        found.append({"file": path.name, "mode": mode, "gb": size / 1e9, "load_s": took, "rate": rate, **rates})
        found[-1]["share"] = rate / best
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--modes", nargs="+", choices=LOAD_MODES, default=["mmap", "none"])
    parser.add_argument("--json", action="store_true", help="print the numbers for a program")
    options = parser.parse_args()
    devices()
    records = [record for path in options.files for record in measure(path, options.modes)]
    if options.json:
        return tell(records)
    columns = ["file", "mode", "GB", "s", "GB/s", "share", *(f"{name} GB/s" for name in RATES)]
    numbers = ("gb", "load_s", "rate", "share", *RATES)
    rows = [[r["file"], r["mode"], *(f"{r[name]:.2f}" if name in r else "-" for name in numbers)] for r in records]
    show("Loading of weights", columns, rows)


if __name__ == "__main__":
    main()
