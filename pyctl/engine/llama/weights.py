"""Names and sizes of the tensors of a model, from the head of its file."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as api

from pyctl.errors import ModelError

__all__ = ["tensor_bytes"]


class _Params(ctypes.Structure):
    """gguf_init_params: without a context to fill, no tensor is made."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def tensor_bytes(path: Path) -> Mapping[str, int]:
    """Bytes of each tensor, over all files of a split model. Raises ModelError."""
    sizes: dict[str, int] = {}
    for part in _parts(path):
        ggml = _ggml()
        head = ggml.gguf_init_from_file(str(part).encode(), _Params(True, None))
        if not head:
            raise ModelError(f"cannot read the head of the model {part}")
        try:
            for index in range(ggml.gguf_get_n_tensors(head)):
                name = ggml.gguf_get_tensor_name(head, index).decode("utf-8", "replace")
                sizes[name] = ggml.gguf_get_tensor_size(head, index)
        finally:
            ggml.gguf_free(head)
    return sizes


def _parts(path: Path) -> list[Path]:
    match = re.match(r"^(.*)-00001-of-(\d{5})\.gguf$", path.name)
    if match is None:
        return [path]
    return [path.with_name(f"{match[1]}-{index:05d}-of-{match[2]}.gguf") for index in range(1, int(match[2]) + 1)]


@cache
def _ggml() -> Any:
    library = ctypes.CDLL(str(Path(str(api._base_path)) / "libggml-base.so"))
    pointer = ctypes.c_void_p
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "gguf_init_from_file": (pointer, [ctypes.c_char_p, _Params]),
        "gguf_free": (None, [pointer]),
        "gguf_get_n_tensors": (ctypes.c_int64, [pointer]),
        "gguf_get_tensor_name": (ctypes.c_char_p, [pointer, ctypes.c_int64]),
        "gguf_get_tensor_size": (ctypes.c_size_t, [pointer, ctypes.c_int64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
