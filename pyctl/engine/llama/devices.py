"""What can hold a model and compute with it: the CPU and the GPUs that ggml found, and their free memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as api

__all__ = ["Device", "devices", "host_available", "host_total"]

CPU, GPU, IGPU = 0, 1, 2
"""ggml_backend_dev_type; what comes after them (accelerators) holds no weights."""


@dataclass(frozen=True)
class Device:
    """``free`` and ``total`` are bytes, None where the device does not say; ``handle`` is a ggml_backend_dev_t."""

    name: str
    description: str
    is_gpu: bool
    handle: int
    buffer_name: str
    buffer_type: int
    free: int | None
    total: int | None


def devices() -> tuple[Device, ...]:
    """All devices, GPUs in llama.cpp's order."""
    api.llama_backend_init()
    ggml = _ggml()
    found = []
    for index in range(ggml.ggml_backend_dev_count()):
        handle = ggml.ggml_backend_dev_get(index)
        kind = ggml.ggml_backend_dev_type(handle)
        if kind not in (CPU, GPU, IGPU):
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        if kind == CPU:
            free.value, total.value = host_available() or 0, host_total() or 0
        buffer_type = ggml.ggml_backend_dev_buffer_type(handle)
        found.append(
            Device(
                ggml.ggml_backend_dev_name(handle).decode(),
                ggml.ggml_backend_dev_description(handle).decode("utf-8", "replace"),
                kind != CPU,
                handle,
                ggml.ggml_backend_buft_name(buffer_type).decode(),
                buffer_type,
                free.value or None,
                total.value or None,
            )
        )
    return tuple(found)


def host_available() -> int | None:
    """Memory that can be had without swapping, in bytes; None where the system does not say."""
    return _meminfo("MemAvailable:")


def host_total() -> int | None:
    """Memory of the machine in bytes."""
    return _meminfo("MemTotal:")


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)


@cache
def _ggml() -> Any:
    """The ggml that llama.cpp uses, with the types of what is called here."""
    library = ctypes.CDLL(str(Path(str(api._base_path)) / "libggml.so"))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_backend_dev_count": (size, []),
        "ggml_backend_dev_get": (pointer, [size]),
        "ggml_backend_dev_type": (ctypes.c_int, [pointer]),
        "ggml_backend_dev_name": (ctypes.c_char_p, [pointer]),
        "ggml_backend_dev_description": (ctypes.c_char_p, [pointer]),
        "ggml_backend_dev_memory": (None, [pointer, ctypes.POINTER(size), ctypes.POINTER(size)]),
        "ggml_backend_dev_buffer_type": (pointer, [pointer]),
        "ggml_backend_buft_name": (ctypes.c_char_p, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
